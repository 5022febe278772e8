"""Adam for compressed gradients: every worker divides by its own second moment before it sends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .split import Memory, SplitOptimizer

_ONE_FOR_ALL = ("beta1", "freeze", "decoupled_weight_decay")
"""Options that groups of parameters do not have of their own: what is remembered depends on them."""


class SplitAdam(SplitOptimizer):
    """Adam whose moments are taken before compression, on each worker.

    Behind the compression Adam goes wrong: what is owed arrives late and large, the second moment
    grows with its square, and the division takes away what error feedback had saved up. Here each
    worker divides its own gradient, the result is compressed with error feedback, and the mean is
    applied as it is. There is no first moment unless asked for: what waits in the residual is a
    momentum already. (Compressing Adam's update with error feedback: Chen et al., Quantized Adam, 2021.)

    With ``beta1`` and ``freeze`` it is of the kind of 1-bit Adam (Tang et al. 2021): momentum is
    compressed, over a second moment that no longer changes. There the second moment is that of the mean
    gradient, from a warm-up in which nothing is compressed, momentum goes on from the mean that all
    agreed on, and the learning rate stays behind the compression. Here both moments are a worker's own
    throughout, so nothing but the update travels. Equations in docs/methods.md.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        beta: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        *,
        beta1: float = 0.0,
        freeze: int | None = None,
        decoupled_weight_decay: bool = True,
    ) -> None:
        """``beta`` and ``eps`` are Adam's second beta and epsilon, ``beta1`` its first; 0: no first moment.

        ``freeze``: after so many steps of a parameter its second moment stays as it is, unless one square
        outweighs all that came before. Without ``decoupled_weight_decay`` weight decay is an L2 penalty, as
        torch's Adam has it: a part of each worker's gradient, after clipping.
        """
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"beta must be in [0, 1), got {beta}")
        if not 0.0 <= beta1 < 1.0:
            raise ValueError(f"beta1 must be in [0, 1), got {beta1}; 0 for no first moment")
        if not eps > 0.0:
            raise ValueError(f"eps must be positive, got {eps}")
        if freeze is not None and freeze < 1:
            raise ValueError(f"freeze must be at least 1 step, got {freeze}; None for never")
        super().__init__(params, {"lr": lr, "beta": beta, "eps": eps, "weight_decay": weight_decay}, max_norm)
        self.beta1, self.freeze, self.decoupled_weight_decay = beta1, freeze, decoupled_weight_decay
        self.memories = ("square", "momentum") if beta1 else ("square",)
        self._steps = 0
        """Of the parameter that has had the most."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for name in _ONE_FOR_ALL:
            if name in param_group:
                raise ValueError(
                    f"a group has {name} {param_group[name]}, and there is one for all parameters: pass it "
                    "to SplitAdam itself"
                )
        super().add_param_group(param_group)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {name: getattr(self, name) for name in _ONE_FOR_ALL}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"freeze": self.freeze, "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with a saved state. ``freeze`` may be another one only where both are still to come."""
        steps, before = state_dict.get("steps", 0), state_dict.get("freeze")
        if not isinstance(steps, int) or not isinstance(before, int | None):
            raise ValueError(f"damaged state: steps are {steps!r}, freeze is {before!r}")
        counted = [steps if freeze is None else min(steps, freeze) for freeze in (before, self.freeze)]
        if counted[0] != counted[1]:
            others = f", or one above {steps}" if before is None or before > steps else ""
            raise ValueError(
                f"freeze is {self.freeze}, and was {before} when this was saved after {steps} steps: a "
                f"second moment of {counted[0]} squares would be taken for one of {counted[1]}. Go on with "
                f"freeze={before}{others}"
            )
        super().load_state_dict(state_dict)
        self._steps = steps

    def penalty(self, options: Mapping[str, Any]) -> float:
        return 0.0 if self.decoupled_weight_decay else float(options["weight_decay"])

    def local_(
        self, gradient: Tensor, memory: Mapping[str, Memory], options: Mapping[str, Any], taken: int
    ) -> None:
        self._steps = max(self._steps, taken + 1)
        beta, square = options["beta"], memory["square"]
        averaged = taken + 1 if self.freeze is None else min(taken + 1, self.freeze)
        # The mean of so few squares is too small by this factor: it began at zero.
        few = 1.0 - beta**averaged
        if averaged > taken:
            square.new.copy_(square.old).mul_(beta).addcmul_(gradient, gradient, value=1.0 - beta)
        else:
            # An entry that hardly had a gradient yet would be divided by nearly nothing ever after. It has
            # at least what this square alone would add.
            torch.maximum(square.old, gradient.square().mul_(1.0 - beta), out=square.new)
        if self.beta1:
            momentum = memory["momentum"]
            torch.lerp(gradient, momentum.old, self.beta1, out=momentum.new)
            torch.div(momentum.new, 1.0 - self.beta1 ** (taken + 1), out=gradient)
        gradient.div_(square.new.sqrt().div_(math.sqrt(few)).add_(options["eps"])).mul_(options["lr"])

    def apply_(self, parameters: list[Tensor], means: list[Tensor], options: Mapping[str, Any]) -> None:
        if self.decoupled_weight_decay:
            super().apply_(parameters, means, options)
        else:  # the penalty came with the gradients
            torch._foreach_sub_(parameters, means)
