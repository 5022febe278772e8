"""Who sees which example when: a worker's share of an epoch, and where a resumed run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from ..types import seed_of
from .dataset import Split


class Batches:
    """A worker's share of ``split``, epoch by epoch, in the order of torch's ``DistributedSampler``.

    All workers get equally many batches, and of equal sizes: the sampler repeats up to
    ``world_size - 1`` examples where the split does not divide. The last batch may be smaller.
    """

    def __init__(self, split: Split, batch_size: int, *, rank: int, world_size: int, seed: int) -> None:
        _check(batch_size, rank, world_size)
        if len(split) == 0:
            raise ValueError("the training split is empty; there is nothing to make batches of")
        self.split = split
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed

    def steps(self, seen: int = 0) -> int:
        """Batches of an epoch that are still to come after ``seen``."""
        return -(-(self._share() - self._skipped(seen)) // self.batch_size)

    def epoch(self, epoch: int, seen: int = 0) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Inputs, targets, and ``seen`` after this batch, from where ``seen`` left off.

        ``seen`` counts the examples of *all* workers in this epoch, so a run may go on with another
        number of them: each skips ``seen // world_size`` of its own. Where that does not divide, the
        last ``seen % world_size`` examples come again. Augmentation draws from (seed, epoch, seen,
        rank) alone: a resumed run draws what the uninterrupted one would have drawn.
        """
        if epoch < 0:
            raise ValueError(f"epochs count from 0, got {epoch}")
        return self._epoch(epoch, self._skipped(seen))

    def _epoch(self, epoch: int, skipped: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        sampler: DistributedSampler[Any] = DistributedSampler(
            cast(Any, self.split), self.world_size, self.rank, shuffle=True, seed=self.seed
        )
        sampler.set_epoch(epoch)
        order = torch.tensor(list(sampler), dtype=torch.int64)
        for start in range(skipped, len(order), self.batch_size):
            indices = order[start : start + self.batch_size]
            seed = seed_of(self.seed, epoch, start * self.world_size, self.rank)
            generator = torch.Generator().manual_seed(seed)
            yield *self.split.batch(indices, generator), (start + len(indices)) * self.world_size

    def _share(self) -> int:
        """Examples of one worker in an epoch."""
        return -(-len(self.split) // self.world_size)

    def _skipped(self, seen: int) -> int:
        if seen < 0:
            raise ValueError(f"seen counts the examples of this epoch so far, got {seen}; 0 begins it")
        # Padding can take ``seen`` past the end, and with fewer workers there is less of it.
        return self._share() if seen >= len(self.split) else seen // self.world_size


def shares(split: Split, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For evaluation: ``rank``'s batches of every ``world_size``-th example, in order.

    Nothing is padded and no example comes twice, so a sum over all workers is a sum over the split;
    workers may have different numbers of batches, or none.
    """
    _check(batch_size, rank, world_size)
    return _shares(split, batch_size, rank, world_size)


def _shares(split: Split, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(rank, len(split), batch_size * world_size):
        stop = min(start + batch_size * world_size, len(split))
        yield split.batch(torch.arange(start, stop, world_size))


def _check(batch_size: int, rank: int, world_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be 0 to world_size - 1 = {world_size - 1}, got {rank}")
