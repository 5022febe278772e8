"""Where everything lies in a bucket: parameters, interleaved shards, and how many entries each sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
"""Shards are dealt in blocks of this many elements (see Partition)."""


@dataclass(frozen=True)
class BucketLayout:
    """The parameters of one flat bucket, in order, by name. Hashable: it is the key of a bucket."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @cached_property
    def numels(self) -> tuple[int, ...]:
        return tuple(shape.numel() for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter starts; one entry more than there are parameters."""
        return (0, *accumulate(self.numels))

    @property
    def numel(self) -> int:
        return self.offsets[-1]

    def view(self, flat: Tensor, name: str) -> Tensor:
        """``name``'s part of ``flat`` in the parameter's own shape, sharing memory."""
        at = self._at[name]
        return flat[self.offsets[at] : self.offsets[at + 1]].view(self.shapes[at])

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of ``flat``."""
        return {name: self.view(flat, name) for name in self.names}

    @cached_property
    def _at(self) -> dict[str, int]:
        return {name: at for at, name in enumerate(self.names)}


class Quota(NamedTuple):
    """The ``k`` largest entries of a shard's own elements ``start`` to ``stop`` are to be sent."""

    start: int
    stop: int
    k: int


@dataclass(frozen=True)
class Partition:
    """A flat bucket dealt to ``shards`` in interleaved blocks of 64 elements.

    Block b belongs to shard ``b % shards``, so every shard is a fair sample of the bucket:
    choosing k/P in each is as good as choosing k in all. Inside a shard elements keep their
    order and are numbered from 0 (its *local* index). One shard is simply the bucket itself.
    """

    numel: int
    shards: int
    quotas: tuple[tuple[Quota, ...], ...]
    """For each shard, disjoint local ranges in increasing order."""

    @staticmethod
    @lru_cache(maxsize=1024)
    def whole(numel: int, k: int) -> Partition:
        """One shard, one range: the ``k`` largest of everything."""
        return Partition(numel, 1, ((Quota(0, numel, k),) if numel else (),))

    @cached_property
    def table(self) -> Tensor:
        """All quotas as rows ``shard, start, stop, k``, checked: kernels take them on trust."""
        rows = [(s, *quota) for s, quotas in enumerate(self.quotas) for quota in quotas]
        end = dict.fromkeys(range(self.shards), 0)
        for s, start, stop, k in rows:
            if not (end[s] <= start <= stop <= self.local_numel(s) and 0 <= k <= stop - start):
                raise ValueError(
                    f"quota {k} of elements {start} to {stop} does not fit shard {s} of {self.shards}, "
                    f"which has {self.local_numel(s)} elements, {end[s]} of them in quotas before it"
                )
            end[s] = stop
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), 4)

    @cached_property
    def rooms(self) -> list[int]:
        """``k`` of each shard."""
        return [self.k(shard) for shard in range(self.shards)]

    @cached_property
    def total(self) -> int:
        """How many entries all shards send together."""
        return sum(self.rooms)

    def local_index(self, position: int, shard: int) -> int:
        """How many elements of ``shard`` lie before global ``position``."""
        rounds, rest = divmod(position, BLOCK * self.shards)
        return rounds * BLOCK + min(max(rest - BLOCK * shard, 0), BLOCK)

    def local_numel(self, shard: int) -> int:
        return self.local_index(self.numel, shard)

    def k(self, shard: int) -> int:
        """How many entries a message about ``shard`` has room for."""
        return sum(quota.k for quota in self.quotas[shard])

    def to_global(self, local: Tensor, shard: int) -> Tensor:
        """Positions in the bucket of a shard's local indices; order is kept."""
        if self.shards == 1:
            return local
        return (local // BLOCK) * (BLOCK * self.shards) + shard * BLOCK + local % BLOCK

    def to_local(self, positions: Tensor, shard: int) -> Tensor:
        """Local indices of those bucket ``positions`` that lie in ``shard``; order is kept."""
        mine = positions[(positions // BLOCK) % self.shards == shard]
        return (mine // (BLOCK * self.shards)) * BLOCK + mine % BLOCK

    def shard(self, shard: int) -> Partition:
        """One shard as a bucket of its own, with the same quotas."""
        return Partition(self.local_numel(shard), 1, (self.quotas[shard],))

    def split(self, flat: Tensor) -> list[Tensor]:
        """Each shard's elements in local order: ``flat`` itself for one shard, else copies."""
        if self.shards == 1:
            return [flat]
        rounds = -(-self.numel // (BLOCK * self.shards))
        padded = flat.new_zeros(rounds * self.shards * BLOCK)
        padded[: self.numel] = flat
        dealt = padded.view(rounds, self.shards, BLOCK).transpose(0, 1).reshape(self.shards, -1)
        return [dealt[s, : self.local_numel(s)] for s in range(self.shards)]


def deal(k: int, sizes: Sequence[int], first: int = 0) -> list[int]:
    """Split ``k`` over bins of ``sizes`` in proportion, sum kept; leftovers go from bin ``first`` on.

    Never gives a bin more than its size, given ``k <= sum(sizes)``.
    """
    total = sum(sizes)
    if total == 0:
        return [0] * len(sizes)
    shares = [k * size // total for size in sizes]
    left = k - sum(shares)
    bin_ = first
    while left > 0:
        at = bin_ % len(sizes)
        if shares[at] < sizes[at]:
            shares[at] += 1
            left -= 1
        bin_ += 1
    return shares


def partition(
    layout: BucketLayout,
    shards: int,
    quota: Callable[[int], int],
    *,
    scope: str = "bucket",
    min_numel: int = 0,
) -> Partition:
    """How many entries each shard of a bucket sends, and from which ranges.

    ``quota(numel)`` is the compressor's k. Tensors below ``min_numel`` do not count: they travel
    whole (see ``small_positions``).
    """
    bare = Partition(layout.numel, shards, ())
    locals_ = [
        [(bare.local_index(start, s), bare.local_index(start + size, s)) for s in range(shards)]
        for start, size in zip(layout.offsets, layout.numels, strict=False)
        if size >= min_numel and size > 0
    ]
    sizes = [[stop - start for start, stop in tensor] for tensor in locals_]
    if scope == "bucket" and sizes:
        # One range, the whole shard; small tensors in it count nothing and sum to zero.
        sizes = [[sum(column) for column in zip(*sizes, strict=True)]]
        locals_ = [[(0, bare.local_numel(s)) for s in range(shards)]]
    quotas: list[list[Quota]] = [[] for _ in range(shards)]
    first = 0
    for ranges, lengths in zip(locals_, sizes, strict=True):
        k = quota(sum(lengths))
        for s, share in enumerate(deal(k, lengths, first)):
            if lengths[s]:  # at least one, or these elements would never be sent
                quotas[s].append(Quota(*ranges[s], max(share, 1)))
        first += k
    return Partition(layout.numel, shards, tuple(map(tuple, quotas)))


def uneven_partition(
    layout: BucketLayout, shards: int, shares: Sequence[float], *, min_numel: int = 0, least: int = 8
) -> Partition:
    """As ``partition``, with a share of its own for each parameter, at most all of it.

    Neighbours are sought in together until ``least`` entries come to each shard: at less, giving every
    range at least one entry would cost more than the shares save.
    """
    bare = Partition(layout.numel, shards, ())
    runs: list[tuple[int, float]] = []  # where each ends, and how many entries it sends
    size, k = 0, 0.0
    for stop, numel, share in zip(layout.offsets[1:], layout.numels, shares, strict=True):
        if numel >= min_numel:
            size, k = size + numel, k + min(1.0, share) * numel
        if k >= least * shards:
            runs.append((stop, k))
            size, k = 0, 0.0
    if runs and (size or k):  # too few for a range of their own
        runs[-1] = layout.numel, runs[-1][1] + k
    elif size:
        runs = [(layout.numel, max(k, 1.0))]
    quotas: list[list[Quota]] = [[] for _ in range(shards)]
    begin, first = 0, 0
    for stop, k in runs:
        ranges = [(bare.local_index(begin, s), bare.local_index(stop, s)) for s in range(shards)]
        lengths = [b - a for a, b in ranges]
        whole = min(round(k), sum(lengths))
        for s, share in enumerate(deal(whole, lengths, first)):
            if lengths[s]:
                quotas[s].append(Quota(*ranges[s], max(share, 1)))
        begin, first = stop, first + whole
    return Partition(layout.numel, shards, tuple(map(tuple, quotas)))


def resized(part: Partition, factor: float) -> Partition:
    """The same partition with every quota ``factor`` times as large.

    No quota falls below one entry or rises above its whole range; one that is whole stays whole.
    """

    def times(quota: Quota) -> Quota:
        whole = quota.stop - quota.start
        k = quota.k if quota.k == whole else max(1, round(quota.k * factor))
        return quota._replace(k=min(whole, k))

    quotas = tuple(tuple(times(quota) for quota in shard) for shard in part.quotas)
    return Partition(part.numel, part.shards, quotas)


def small_positions(layout: BucketLayout, min_numel: int, device: torch.device) -> Tensor:
    """Bucket positions of all tensors below ``min_numel`` elements, increasing."""
    runs = [
        torch.arange(start, start + size, device=device)
        for start, size in zip(layout.offsets, layout.numels, strict=False)
        if 0 < size < min_numel
    ]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)


def bucket_strides(parameter: Tensor) -> tuple[int, ...]:
    """How DDP lays a gradient of ``parameter`` in its part of a bucket.

    As the parameter itself lies in memory; in the order of its indices if that has gaps or overlaps, as a
    slice of a larger tensor has.
    """
    dense = fills_memory(parameter.shape, parameter.stride())
    return parameter.stride() if dense else index_strides(parameter.shape)


def index_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie in the order of their indices."""
    steps = accumulate(reversed(shape), lambda step, size: step * max(size, 1), initial=1)
    return tuple(steps)[: len(shape)][::-1]


def fills_memory(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor's elements fill a stretch of memory without gaps, in whatever order."""
    dims = sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1)
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return False
        expected *= size
    return True
