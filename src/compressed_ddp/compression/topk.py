"""Top-K: the entries of largest magnitude."""

from __future__ import annotations

from torch import Tensor

from ..kernels import kernels_for
from ..layout import Partition
from ..types import Stamp
from .base import BaseCompressor


class TopKCompressor(BaseCompressor):
    """Send the k = ceil(ratio * n) entries of largest magnitude, exactly; ties to the lower index.

    Cost: one pass over the bucket to add and select. Bytes an entry with 8-bit values: 2.1 at
    ratio 0.01, 2.6 at 0.001 (Elias-Fano index and value). Needs error feedback: without it the
    small entries are never sent. Aji & Heafield, "Sparse Communication for Distributed Gradient
    Descent", 2017; Stich et al., "Sparsified SGD with Memory", 2018.
    """

    name = "topk"

    def __init__(self, ratio: float = 0.01, *, values: str = "int8", seed: int = 0) -> None:
        super().__init__(ratio, values=values, seed=seed)

    def select(self, flat: Tensor, k: int, stamp: Stamp) -> Tensor:
        return kernels_for(flat).topk_indices(flat, k)

    def take_parts(
        self, residual: Tensor | None, gradient: Tensor, out: Tensor, part: Partition, stamp: Stamp
    ) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        return kernels_for(out).take_topk(residual, gradient, out, part)


class TopKCompressorCPU(TopKCompressor):
    """Top-K under the name that the original write-up gives it for CPU tensors."""


class TopKCompressorGPU(TopKCompressor):
    """Top-K under the name that the original write-up gives it for CUDA and MPS tensors.

    The same device-generic operations as on the CPU: a tensor is compressed where it lies.
    """
