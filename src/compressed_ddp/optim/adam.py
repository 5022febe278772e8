"""Adam for compressed gradients: every worker divides by its own second moment before it sends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .split import Memory, SplitOptimizer


class SplitAdam(SplitOptimizer):
    """AdamW whose second moment is taken before compression, on each worker; no first moment.

    Behind the compression Adam goes wrong: what is owed arrives late and large, the second moment
    grows with its square, and the division takes away what error feedback had saved up. Here each
    worker divides its own gradient, the result is compressed with error feedback, and the mean is
    applied as it is. There is no first moment: what waits in the residual is a momentum already.
    (Compressing Adam's update with error feedback: Chen et al., Quantized Adam, 2021.)
    """

    memories = ("square",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        beta: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
    ) -> None:
        """``beta`` and ``eps`` are Adam's second beta and epsilon."""
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"beta must be in [0, 1), got {beta}")
        if not eps > 0.0:
            raise ValueError(f"eps must be positive, got {eps}")
        super().__init__(params, {"lr": lr, "beta": beta, "eps": eps, "weight_decay": weight_decay}, max_norm)

    def local_(
        self, gradient: Tensor, memory: Mapping[str, Memory], options: Mapping[str, Any], taken: int
    ) -> None:
        beta, square = options["beta"], memory["square"]
        square.new.copy_(square.old).mul_(beta).addcmul_(gradient, gradient, value=1.0 - beta)
        # The mean of so few squares is too small by this factor: it began at zero.
        bias = math.sqrt(1.0 - beta ** (taken + 1))
        gradient.div_(square.new.sqrt().div_(bias).add_(options["eps"])).mul_(options["lr"])
