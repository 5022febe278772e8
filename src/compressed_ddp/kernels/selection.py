"""Selection in plain torch, on any device: what the k largest are, and how they leave a sum.

Nothing here waits for the device before everything is queued: sizes are fixed by k, and one read
at the end tells whether the sum was finite and the sampled thresholds were good.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..layout import Partition

LINE = 16
WHOLE = 2048
"""Up to this many elements nothing is sampled: all are looked at."""


def topk_indices(flat: Tensor, k: int) -> Tensor:
    """Positions of the k largest magnitudes, increasing; ties go to the lower index."""
    indices, good = _topk(flat, k)
    return indices if good is None or bool(good) else _topk_of_all(flat.abs(), k)


def take_topk(
    residual: Tensor | None, gradient: Tensor, out: Tensor, part: Partition, *, exact: bool = True
) -> tuple[list[tuple[Tensor, Tensor]], bool]:
    """``out = residual + gradient`` less each shard's largest entries, which are returned."""
    if not exact:
        return take_selected(residual, gradient, out, part, lambda _, flat, k: roughly_topk_indices(flat, k))
    _sum(residual, gradient, out)
    shards = part.split(out)
    chosen = [[(_topk(shards[s][a:b], k), a, b, k) for a, b, k in part.quotas[s]] for s in range(part.shards)]
    flags = [good for quotas in chosen for (_, good), *_ in quotas if good is not None]
    finite, *goods = torch.stack([torch.isfinite(out).all(), *flags]).tolist()
    if not finite:
        return [], False
    answers = iter(goods)
    taken = []
    for local, quotas in zip(shards, chosen, strict=True):
        picked = []
        for (indices, good), a, b, k in quotas:
            if good is not None and not next(answers):
                indices = _topk_of_all(local[a:b].abs(), k)
            picked.append(indices + a)
        taken.append(_gather(local, picked))
    _remove(out, part, taken)
    return taken, True


def take_selected(
    residual: Tensor | None,
    gradient: Tensor,
    out: Tensor,
    part: Partition,
    select: Callable[[int, Tensor, int], Tensor],
) -> tuple[list[tuple[Tensor, Tensor]], bool]:
    """``out = residual + gradient`` less what ``select(shard, elements, k)`` picks.

    Returns ``(values, local indices)`` for each shard, and whether the sum was finite; if it was
    not, nothing is taken and ``out`` means nothing. ``residual`` and ``gradient`` are read only.
    """
    _sum(residual, gradient, out)
    if not all_finite(out):
        return [], False
    taken = []
    for shard, local in enumerate(part.split(out)):
        picked = [select(shard, local[a:b], k) + a for a, b, k in part.quotas[shard]]
        taken.append(_gather(local, picked))
    _remove(out, part, taken)
    return taken, True


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite (one synchronisation with the device)."""
    return bool(torch.isfinite(tensor).all())


def _sum(residual: Tensor | None, gradient: Tensor, out: Tensor) -> None:
    if residual is None:
        out.copy_(gradient)
    else:
        torch.add(residual, gradient, out=out)


def _gather(local: Tensor, picked: list[Tensor]) -> tuple[Tensor, Tensor]:
    indices = torch.cat(picked) if picked else torch.empty(0, dtype=torch.int64, device=local.device)
    return local[indices], indices


def _remove(out: Tensor, part: Partition, taken: list[tuple[Tensor, Tensor]]) -> None:
    for shard, (_, indices) in enumerate(taken):
        out[part.to_global(indices, shard)] = 0


# --- exactly the k largest -----------------------------------------------------------------


def _topk(flat: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
    """The k largest, and a flag (on the device) that says whether the sample served; None: surely.

    A magnitude a little below the k-th is estimated from a sample; only what passes it is ranked.
    """
    n = flat.numel()
    if k >= n:
        return torch.arange(n, device=flat.device), None
    magnitude = flat.abs()
    if n <= WHOLE or k == 0:
        return _topk_of_all(magnitude, k), None
    sample = magnitude[sample_positions(n, flat.device)]
    rank = sample.numel() * k / n
    rank += 5.0 * math.sqrt(1.5 * rank) + 4.0  # entries of a line are alike: more than their number says
    low = min(sample.numel(), int(rank) + 1)
    room = min(n, max(3 * k, 2 * (low * n // sample.numel())) + 256)  # twice what is expected to pass
    passing = magnitude >= _kth(sample, low)
    count = passing.sum()
    candidates = first_positions(passing, room)
    ranked = torch.where(torch.arange(room, device=flat.device) < count, magnitude[candidates], -1.0)
    return candidates[_topk_of_all(ranked, k)], (count >= k) & (count <= room)


def _topk_of_all(magnitude: Tensor, k: int) -> Tensor:
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=magnitude.device)
    # topk alone leaves open which of several equal entries it returns, so only its smallest
    # value is used: everything above it, and as many of its equals as there is room for.
    kth = _kth(magnitude, k)
    above, ties = magnitude > kth, magnitude == kth
    return first_positions(above | (ties & (torch.cumsum(ties, 0) <= k - above.sum())), k)


def _kth(magnitude: Tensor, k: int) -> Tensor:
    return torch.topk(magnitude, k, sorted=False).values.min()


def first_positions(mask: Tensor, size: int) -> Tensor:
    """Positions of the first ``size`` set elements; where there are fewer, zeros follow."""
    return (_by_nonzero if mask.device.type == "cpu" else _by_scatter)(mask, size)


def _by_nonzero(mask: Tensor, size: int) -> Tensor:
    """Fast where asking for the number of set elements costs nothing."""
    found = mask.nonzero().view(-1)[:size]
    return torch.nn.functional.pad(found, (0, size - found.numel()))


def _by_scatter(mask: Tensor, size: int) -> Tensor:
    """The same without asking: each set element knows its place from a running count."""
    place = torch.cumsum(mask, 0) - 1
    place = torch.where(mask & (place < size), place, size)  # the others share one place, cut off
    positions = torch.zeros(size + 1, dtype=torch.int64, device=mask.device)
    return positions.scatter_(0, place, torch.arange(mask.numel(), device=mask.device))[:size]


# --- roughly the k largest -----------------------------------------------------------------


def roughly_topk_indices(flat: Tensor, k: int) -> Tensor:
    """At most k of the largest: those at or above a sampled k-th magnitude, thinned evenly to k.

    Where the sample misses k by more than a factor of two, and for few elements, exactly the k
    largest.
    """
    n = flat.numel()
    if k == 0 or k >= n or n <= WHOLE:
        return topk_indices(flat, k)
    magnitude = flat.abs()
    sample = magnitude[sample_positions(n, flat.device)]
    rank = max(1, int(sample.numel() * k / n + 0.5))
    passing = (magnitude >= _kth(sample, rank)).nonzero().view(-1)
    count = passing.numel()
    if 2 * count < k or count > 2 * k:
        return topk_indices(flat, k)
    if count <= k:
        return passing
    place = torch.arange(count + 1, device=flat.device) * k // count
    return passing[place[1:] > place[:-1]]


def sample_positions(n: int, device: torch.device) -> Tensor:
    """Where ``n`` > 2,048 elements are sampled: lines of 16, one at a jittered place of each stratum."""
    lines = min(max(n // 2048, 128), 8192)
    width = n // lines
    j = torch.arange(lines, device=device)
    jitter = (j * 40503 % 65536) * (width - LINE + 1) // 65536
    starts = (j * width + jitter) // LINE * LINE
    return (starts.view(-1, 1) + torch.arange(LINE, device=device)).view(-1)
