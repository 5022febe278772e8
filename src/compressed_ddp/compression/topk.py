"""Top-K: the entries of largest magnitude."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kernels import kernels_for
from ..kernels.selection import roughly_topk_indices
from ..layout import Partition
from ..types import Stamp
from .base import BaseCompressor


class TopKCompressor(BaseCompressor):
    """Send the k = ceil(ratio * n) entries of largest magnitude, exactly; ties to the lower index.

    ``exact=False`` sends those at or above a sampled estimate of the k-th magnitude instead, thinned
    to k: at most k entries, somewhat fewer or not quite the largest. It saves the look for the exact k-th,
    which is seldom much: small tensors, and large ones at ratio 0.1, were measured slower (docs/kernels.md).

    Cost: one pass over the bucket to add and select. Bytes an entry with 8-bit values: 2.1 at
    ratio 0.01, 2.6 at 0.001 (Elias-Fano index and value). Needs error feedback: without it the
    small entries are never sent. Aji & Heafield, "Sparse Communication for Distributed Gradient
    Descent", 2017; Stich et al., "Sparsified SGD with Memory", 2018.
    """

    name = "topk"
    in_place = True
    adapts = True

    def __init__(
        self, ratio: float = 0.01, *, values: str = "int8", exact: bool = True, seed: int = 0
    ) -> None:
        super().__init__(ratio, values=values, seed=seed)
        self.exact = exact

    def options(self) -> dict[str, Any]:
        return super().options() | {"exact": self.exact}

    def select(self, flat: Tensor, k: int, stamp: Stamp) -> Tensor:
        if not self.exact:
            return roughly_topk_indices(flat, k)
        return kernels_for(flat).topk_indices(flat, k)

    def take_parts(
        self, residual: Tensor | None, gradient: Tensor, out: Tensor, part: Partition, stamp: Stamp
    ) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        return kernels_for(out).take_topk(residual, gradient, out, part, exact=self.exact)


class TopKCompressorCPU(TopKCompressor):
    """Top-K under the name that the original write-up gives it for CPU tensors."""


class TopKCompressorGPU(TopKCompressor):
    """Top-K under the name that the original write-up gives it for CUDA and MPS tensors.

    A tensor is compressed where it lies, by device-generic torch operations.
    """
