"""Adaptive ratios: one number of entries for the whole model, more of them where entries are large."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layout import BucketLayout
from ..types import Clock, SyncError, Transport
from .guard import fingerprint
from .sameness import check_same

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
    workers' proposals, 8 bytes a tensor, is what all of them use until the next time. Only the
    distribution changes, not the number of entries; nor does it when the ratio is raised (``within``).

    Markov et al., "L-GreCo: Layerwise-Adaptive Gradient Compression", 2024.
    """

    def __init__(self, every: int, min_numel: int) -> None:
        """Tensors below ``min_numel`` elements travel whole and have no part in it."""
        self._every, self._min = every, min_numel
        self._seen: dict[str, Tensor] = {}
        self.factors: dict[str, float] = {}
        """By how much the share of each parameter that was looked at differs from the ratio."""
        self._numels: dict[str, int] = {}

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

    def at(self, ratio: float) -> Mapping[str, float]:
        """The factors in force at ``ratio``."""
        return within(self.factors, self._numels, ratio)

    def load(self, factors: dict[str, float], shapes: Mapping[str, torch.Size]) -> None:
        """Go on with the ``factors`` of a saved state."""
        self.factors, self._numels = factors, {name: shapes[name].numel() for name in factors}

    def settle(self, ratio: float, net: Transport, device: torch.device, clock: Clock) -> None:
        """Find the factors of all parameters that were looked at.

        All ranks call it together and get the same, or a SyncError: message sizes follow from it.
        """
        names, counts = sorted(self._seen), self._seen
        self._seen = {}
        if not names:
            self.factors, self._numels = {}, {}
            return
        table = torch.stack([counts[name] for name in names]).flip(1)  # largest first
        numels = [int(count) for count in table.sum(1)]
        k = max(1, round(ratio * sum(numels)))
        wanted = propose(table, k)
        total = (wanted * _PARTS).round().to(torch.int64).to(device)
        with clock.phase("wait"):
            net.all_reduce(total)
            moved = 2 * (net.world_size - 1) * total.nbytes // net.world_size  # as a ring has it
            moved += check_same(net, fingerprint(total), "adaptive ratios", "all-reduce", device)
        clock.traffic(moved, moved)
        parts = [int(part) for part in total.cpu()]
        _check_total(dict(zip(names, parts, strict=True)), numels, k, net.world_size)
        # Whole numbers and the same divisions on all ranks: the same factors to the bit.
        self._numels = dict(zip(names, numels, strict=True))
        self.factors = {
            name: (part * sum(numels)) / (max(sum(parts), 1) * numel)
            for name, part, numel in zip(names, parts, numels, strict=True)
        }


def within(factors: Mapping[str, float], numels: Mapping[str, int], ratio: float) -> Mapping[str, float]:
    """``factors`` with which no parameter sends more entries than it has, and all together as many as before.

    What one has no more of goes to those that are not whole yet, in proportion to what they send; evenly,
    if that is nothing. The same arithmetic in the same order on all ranks.
    """
    if all(ratio * factor <= 1.0 for factor in factors.values()):
        return factors
    shares: dict[str, float] = {}
    rest = sorted(factors)
    room = math.fsum(ratio * factors[name] * numels[name] for name in rest)
    while rest:
        asked = math.fsum(factors[name] * numels[name] for name in rest)
        weights = {name: factors[name] if asked else 1.0 for name in rest}
        everything = asked or sum(numels[name] for name in rest) or 1.0
        here = {name: weight / everything * room for name, weight in weights.items()}
        whole = [name for name, share in here.items() if share >= 1.0]
        shares |= dict.fromkeys(whole, 1.0) if whole else here
        room = max(0.0, room - sum(numels[name] for name in whole))
        rest = [name for name in rest if name not in shares]
    return {name: share / ratio for name, share in shares.items()}


def _check_total(parts: Mapping[str, int], numels: Sequence[int], k: int, world: int) -> None:
    """Raises SyncError unless the sum of all proposals can be one: each has ``k`` entries, up to rounding."""
    for (name, part), numel in zip(parts.items(), numels, strict=True):
        if not 0 <= part <= world * numel * _PARTS:
            raise SyncError(
                f"adaptive ratios: {world} ranks propose {part / _PARTS:g} entries of {name!r}, which has "
                f"{numel}. The sum was damaged on its way: go back to a checkpoint",
                phase="all-reduce",
            )
    found, whole = sum(parts.values()), world * k * _PARTS
    if abs(found - whole) > world * (len(parts) + 1):
        raise SyncError(
            f"adaptive ratios: {world} ranks propose {found / _PARTS:g} entries, {k} each. The sum was "
            "damaged on its way: go back to a checkpoint",
            phase="all-reduce",
        )


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
    numels = {name: shapes[name].numel() for name in factors}
    whole, found = sum(numels.values()), math.fsum(factors[name] * numels[name] for name in factors)
    if not math.isclose(found, whole, rel_tol=1e-6):
        raise ValueError(
            f"damaged state: the ratio's factors would send {found / whole:g} times as much as the ratio says"
        )
    return dict(factors)
