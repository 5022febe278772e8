"""SGD with momentum for compressed gradients: every worker adds its momentum before it sends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..types import Slot
from .split import Memory, SplitOptimizer


class SplitSGD(SplitOptimizer):
    """SGD whose momentum is added before compression, on each worker (momentum correction).

    Behind the compression an entry that waited arrives as one lump, and momentum repeats the lump for
    steps to come, at weights that it knows nothing of. Here each worker adds up its own momentum, and
    what it could not send waits in the residual as velocity. Where an entry was sent its momentum is
    cleared (``masking``), for most of it was late. Where nothing waits, in small tensors and at
    ratio 1, it stays, and this is torch's SGD.

    The learning rate stays behind the compression: velocities are linear in gradients, so what waited
    compares with what is new whatever the rate was, and is applied at the rate of its arrival. Lin et
    al., "Deep Gradient Compression", 2018; equations in docs/methods.md.
    """

    memories = ("momentum",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        masking: bool = True,
        max_norm: float | None = None,
    ) -> None:
        """``max_norm`` is meant for the mean: a worker's own gradient may be sqrt(P) times as large.

        Weight decay is torch's, an L2 penalty that momentum sees. It is alike on all workers, so it is
        neither sent nor masked.
        """
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if nesterov and not momentum:
            raise ValueError("nesterov needs a momentum above 0")
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, options, max_norm)
        self.masking = masking

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"masking": self.masking}

    def slack(self) -> float:
        return math.sqrt(self.world_size)

    def local_(
        self, gradient: Tensor, memory: Mapping[str, Memory], options: Mapping[str, Any], taken: int
    ) -> None:
        old, new = memory["momentum"]
        torch.add(gradient, old, alpha=options["momentum"], out=new)
        if options["nesterov"]:
            gradient.add_(new, alpha=options["momentum"])
        else:
            gradient.copy_(new)

    def after_(self, slots: Mapping[str, Slot], sent: Sequence[Tensor]) -> None:
        for positions in sent:
            slots["momentum"].new[positions] = 0

    def apply_(self, parameters: list[Tensor], means: list[Tensor], options: Mapping[str, Any]) -> None:
        """Subtract the mean velocity and the weight decay's own, both times the learning rate.

        Momentum is linear, so the two parts of it may live in two places.
        """
        if options["weight_decay"]:
            means = list(torch._foreach_add(means, self._decay(parameters, options)))
        torch._foreach_add_(parameters, means, alpha=-options["lr"])

    def _decay(self, parameters: list[Tensor], options: Mapping[str, Any]) -> list[Tensor]:
        """The velocity of the weight decay; its momentum is the state of this optimizer."""
        pull = torch._foreach_mul(parameters, options["weight_decay"])
        for parameter in parameters:
            if "decay" not in self.state[parameter]:
                self.state[parameter]["decay"] = torch.zeros_like(parameter)
        momenta = [self.state[parameter]["decay"] for parameter in parameters]
        torch._foreach_mul_(momenta, options["momentum"])
        torch._foreach_add_(momenta, pull)
        if options["nesterov"]:
            return list(torch._foreach_add(pull, momenta, alpha=options["momentum"]))
        return momenta
