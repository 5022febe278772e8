"""Adaptive ratios: one number of entries for the whole model, more of them where entries are large."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..layout import BucketLayout
from ..types import Clock, Transport

BINS = 2048
"""Magnitudes are counted by sign-less exponent and the first three bits of the mantissa."""
_SHIFT = 20
_PARTS = 256
"""Proposals travel in this fraction of an entry."""


class Allotment:
    """Every ``every`` steps, how much of what is sent each parameter gets.

    What a worker would like to send is its residual plus its gradient. Of all ways to choose K entries of
    the whole model, the K largest leave the least unsent (L-GreCo's problem, which for Top-K has this
    solution). So each worker counts the magnitudes of every parameter in one pass, finds the one threshold
    above which K entries lie, and proposes for each parameter as many as it has above it. The sum of all
    workers' proposals, 8 bytes a parameter, is what all of them use until the next time. Only the
    distribution changes, not the number of entries.

    Markov et al., "L-GreCo: Layerwise-Adaptive Gradient Compression", 2024.
    """

    def __init__(self, every: int, min_numel: int) -> None:
        """Tensors below ``min_numel`` elements travel whole and have no part in it."""
        self._every, self._min = every, min_numel
        self._seen: dict[str, Tensor] = {}

    def due(self, taken: int) -> bool:
        """Whether the step after ``taken`` steps is looked at."""
        return self._every > 0 and (taken + 1) % self._every == 0

    def look(self, layout: BucketLayout, residual: Tensor, gradient: Tensor) -> None:
        """Count the magnitudes of one bucket."""
        flat = residual + gradient.to(torch.float32)
        for name, view in layout.views(flat).items():
            if view.numel() >= max(self._min, 1):
                bits = view.reshape(-1).view(torch.int32).bitwise_and(0x7FFFFFFF)
                self._seen[name] = torch.bincount(bits >> _SHIFT, minlength=BINS).cpu()

    def forget(self) -> None:
        """The step does not count."""
        self._seen = {}

    def settle(self, ratio: float, net: Transport, device: torch.device, clock: Clock) -> dict[str, float]:
        """For each parameter that was looked at, by how much its share differs from ``ratio``.

        All ranks call it together and get the same.
        """
        names, counts = sorted(self._seen), self._seen
        self._seen = {}
        if not names:
            return {}
        table = torch.stack([counts[name] for name in names]).flip(1)  # largest first
        numels = [int(count) for count in table.sum(1)]
        wanted = propose(table, max(1, round(ratio * sum(numels))))
        total = (wanted * _PARTS).round().to(torch.int64).to(device)
        with clock.phase("wait"):
            net.all_reduce(total)
        moved = 2 * (net.world_size - 1) * total.nbytes // net.world_size  # as a ring has it
        clock.traffic(moved, moved)
        parts = [int(part) for part in total.cpu()]
        # Whole numbers and the same divisions on all ranks: the same factors to the bit.
        return {
            name: (part * sum(numels)) / (max(sum(parts), 1) * numel)
            for name, part, numel in zip(names, parts, numels, strict=True)
        }


def propose(table: Tensor, k: int) -> Tensor:
    """How many of the ``k`` largest entries lie in each row; ``table`` counts them, the largest first."""
    above = table.sum(0).cumsum(0)
    last = int(torch.searchsorted(above, k).clamp(max=table.shape[1] - 1))  # where the k-th lies
    before = table[:, :last].sum(1).to(torch.float64)
    room = k - float(before.sum())
    here = table[:, last].to(torch.float64)
    return before + here * (room / max(float(here.sum()), 1.0))


def check_factors(state: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> dict[str, float]:
    """The factors of a saved state; raises ValueError unless they are of this model."""
    factors = state.get("factors", {})
    if not isinstance(factors, Mapping):
        raise ValueError(f"damaged state: factors are {type(factors).__name__}")
    for name, factor in factors.items():
        if name not in shapes:
            raise ValueError(f"state has a ratio for {name!r}, which this model does not have")
        if not isinstance(factor, float) or not 0.0 <= factor < float("inf"):
            raise ValueError(f"damaged state: the ratio's factor of {name!r} is {factor!r}")
    return dict(factors)
