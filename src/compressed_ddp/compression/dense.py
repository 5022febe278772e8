"""Everything is sent: as it is, or in half the bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.reference import all_finite
from ..layout import Partition
from ..types import Payload, Stamp
from .base import BaseCompressor


class FullCompressor(BaseCompressor):
    """Parent of all methods that send every element; children differ in the value format alone."""

    index_format = "all"
    small_tensors_apart = False

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(1.0, values=self.value_formats[0], seed=seed)

    def select(self, flat: Tensor, k: int, stamp: Stamp) -> Tensor:
        return torch.arange(flat.numel(), device=flat.device)

    def rounded(self, payload: Payload, stamp: Stamp) -> Tensor:
        return self.codec.encode(payload, stamp=stamp).values

    def take_parts(
        self, residual: Tensor | None, gradient: Tensor, out: Tensor, part: Partition, stamp: Stamp
    ) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        due = gradient.clone() if residual is None else residual + gradient
        if not all_finite(due):
            return [], False
        out.zero_()
        return [(local, self.select(local, local.numel(), stamp)) for local in part.split(due)], True


class DenseCompressor(FullCompressor):
    """Send every element in 32 bits: the baseline, through the same machinery as everything else.

    Cost: 4 bytes an element, no error, no residual. Sums are formed in rank order, so unlike a
    ring all-reduce the result does not depend on where in the bucket an element lies.
    """

    name = "dense"
    value_formats = ("fp32",)
    unbiased = True


class FP16Compressor(FullCompressor):
    """Send every element in IEEE half precision; sums are formed in float32.

    Cost: 2 bytes an element. Values beyond 65504 saturate and the rest stays in the residual.
    Micikevicius et al., "Mixed Precision Training", 2018.
    """

    name = "fp16"
    value_formats = ("fp16",)


class BF16Compressor(FullCompressor):
    """Send every element in bfloat16: float32's range with 8 bits of precision.

    Cost: 2 bytes an element. Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training",
    2019.
    """

    name = "bf16"
    value_formats = ("bf16",)
