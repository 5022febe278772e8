"""Threshold: everything above a magnitude, found without a full selection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import kernels_for
from ..types import Stamp
from .base import BaseCompressor

SAMPLE = 4096


class ThresholdCompressor(BaseCompressor):
    """Send the entries of at least a given magnitude, at most k = ceil(ratio * n) of them.

    With ``threshold=None`` the k-th magnitude is estimated from a random sample of 4,096
    entries. Where more than k pass, the k largest of them are sent (and then the choice is
    exactly Top-K's); where fewer pass, fewer are sent, in a message of the same size: messages
    are fixed, so a high threshold saves work, not bytes. Cost: one pass to compare, and a
    selection among what passes; bytes as Top-K. Strom, "Scalable
    Distributed DNN Training Using Commodity GPU Cloud Computing", 2015; Lin et al., "Deep
    Gradient Compression", 2018 (the sampled estimate).
    """

    name = "threshold"
    fills = False

    def __init__(
        self,
        ratio: float = 0.01,
        *,
        threshold: float | None = None,
        values: str = "int8",
        seed: int = 0,
    ) -> None:
        super().__init__(ratio, values=values, seed=seed)
        if threshold is not None and not threshold > 0:
            raise ValueError(f"threshold must be a positive magnitude, got {threshold!r}")
        self.threshold = threshold

    def options(self) -> dict[str, Any]:
        return super().options() | {"threshold": self.threshold}

    def select(self, flat: Tensor, k: int, stamp: Stamp) -> Tensor:
        magnitude = flat.abs()
        passing = (magnitude >= self._limit(magnitude, k, stamp)).nonzero().view(-1)
        if passing.numel() <= k:
            return passing
        return passing[kernels_for(flat).topk_indices(flat[passing], k)]

    def _limit(self, magnitude: Tensor, k: int, stamp: Stamp) -> float | Tensor:
        """The fixed threshold, or the sample's estimate of the k-th largest magnitude."""
        if self.threshold is not None:
            return self.threshold
        n = magnitude.numel()
        if n <= SAMPLE:
            sample = magnitude
        else:
            generator = torch.Generator().manual_seed(stamp.private_seed())
            at = torch.randint(n, (SAMPLE,), generator=generator, device="cpu")
            sample = magnitude[at.to(magnitude.device)]
        wanted = max(1, round(k / n * sample.numel())) if n else 0
        if wanted == 0:
            return 0.0
        return torch.topk(sample, min(wanted, sample.numel()), sorted=False).values.min()
