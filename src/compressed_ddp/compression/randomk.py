"""Random-K: a random subset that all workers draw alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..types import Stamp
from ..wire.indices import seeded_indices
from .base import BaseCompressor


class RandomKCompressor(BaseCompressor):
    """Send k random entries; the seed is shared, so no index travels.

    Cost: the values alone (1.06 bytes an entry with 8-bit values), and a random permutation of
    the bucket. All workers send the same positions, so sums stay k entries. Much slower to
    converge than Top-K for the same k. ``unbiased=True`` scales by n/k and works without a
    residual, at the price of n/k times the variance. Stich et al., "Sparsified SGD with Memory",
    2018; Konecny et al., "Federated Learning: Strategies for Improving Communication
    Efficiency", 2016.
    """

    name = "randomk"
    index_format = "seeded"
    scopes = ("bucket",)

    def __init__(
        self, ratio: float = 0.01, *, values: str = "int8", unbiased: bool = False, seed: int = 0
    ) -> None:
        super().__init__(ratio, values=values, seed=seed)
        self.unbiased = unbiased
        self.contraction = not unbiased

    def options(self) -> dict[str, Any]:
        return super().options() | {"unbiased": self.unbiased}

    def select(self, flat: Tensor, k: int, stamp: Stamp) -> Tensor:
        return seeded_indices(flat.numel(), k, stamp, flat.device)

    def scale(self, values: Tensor, k: int, numel: int) -> Tensor:
        return values * (numel / k) if self.unbiased and k else values
