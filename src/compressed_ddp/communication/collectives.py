"""The two ways of exchanging sparse messages. Both end with the same bits on every worker."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from ..compression import BaseCompressor
from ..error_feedback.state import fold_owner_
from ..kernels import kernels_for
from ..layout import BucketLayout, Partition, partition, resized, small_positions, uneven_partition
from ..types import Clock, CompressionConfig, Held, Slot, Stamp, Transport
from .packer import Packer, deliver_, room_for_sum

_SURE = 9
"""Up to so many workers the mean of finite floats is finite; with more, rounding may carry it too far."""


MOST_SENT = 0.75
"""The share of k that a worker sends to the owners of all other shards together, at most.

With four workers it is so by itself. With more of them each element is looked at by more, and what a worker
sends need not grow (docs/adr/0012).
"""


def parted(
    layout: BucketLayout,
    compressor: BaseCompressor,
    config: CompressionConfig,
    shards: int,
    device: torch.device,
) -> tuple[Partition, Tensor]:
    """How many entries there are in each of ``shards``, and the positions of what travels whole."""
    smallest = config.min_compress_numel if compressor.small_tensors_apart else 0
    factors = compressor.factors
    if any(name in factors for name in layout.names):
        shares = [compressor.ratio * factors.get(name, 1.0) for name in layout.names]
        part = uneven_partition(layout, shards, shares, min_numel=smallest)
    else:
        part = partition(layout, shards, compressor.quota, scope=config.scope, min_numel=smallest)
    return part, small_positions(layout, smallest, device)


def sent_share(world_size: int) -> float:
    """How much of its quota for each shard a worker sends, so that all others get ``MOST_SENT`` at most."""
    return min(1.0, MOST_SENT * world_size / (world_size - 1)) if world_size > 1 else 1.0


class AllGather:
    """Every worker receives every worker's message and adds them up in rank order.

    Traffic: P - 1 messages out and in. One round.
    """

    def __init__(
        self,
        layout: BucketLayout,
        compressor: BaseCompressor,
        config: CompressionConfig,
        transport: Transport,
        device: torch.device,
    ) -> None:
        self.slots: list[Slot] = []
        self._net = transport
        self._packer = Packer(compressor, *parted(layout, compressor, config, 1, device))
        self.traffic = (transport.world_size - 1) * self._packer.row_bytes

    def mean_(
        self,
        bucket: Tensor,
        memory: Slot | None,
        stamp: Stamp,
        clock: Clock,
        held: Held = (),
        sent: list[Tensor] | None = None,
    ) -> bool:
        world = self._net.world_size
        row = self._packer.pack_(bucket, memory, stamp, clock, held, sent)[0]
        with clock.phase("wait"):
            inbox = row.new_empty((world, row.numel()))
            self._net.all_gather(inbox, row)
        clock.traffic(self.traffic, self.traffic)
        with clock.phase("decode"):
            messages = [self._packer.unpack(inbox[r], 0, stamp._replace(sender=r)) for r in range(world)]
            if not all(message.finite for message in messages):
                bucket.fill_(torch.nan)
                return False
            mean = room_for_sum(bucket)
            self._packer.sum_(mean, [(0, message) for message in messages], 1.0 / world)
            return deliver_(bucket, mean) and (world <= _SURE or kernels_for(mean).finite_sum(None, mean))

    def fold_(self, residual: Tensor) -> None:
        """Nothing is remembered here."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Nothing is remembered here."""


class Sharded:
    """Sparse reduce-scatter: each worker owns one interleaved shard of the bucket.

    1. Everyone sends each owner the largest entries of its shard (all-to-all).
    2. The owner adds them up in rank order, divides by P, and chooses again: the largest entries
       of that mean plus what it still owes. This is the law once more, with a residual of its own.
    3. The owners' results go to everyone (all-gather).

    Traffic: at most 3/4 of a message to the owners and (P - 1) / P of one to everyone (more with
    ``owner_factor``): 1.5 for four workers, below 1.75 for any number. Two rounds.
    """

    def __init__(
        self,
        layout: BucketLayout,
        compressor: BaseCompressor,
        config: CompressionConfig,
        transport: Transport,
        device: torch.device,
    ) -> None:
        self._net, me = transport, transport.rank
        part, small = parted(layout, compressor, config, transport.world_size, device)
        sent = Packer(compressor, resized(part, sent_share(transport.world_size)), small)
        part = resized(part, config.owner_factor)
        self._sent = sent
        self._owned = Packer(compressor, part.shard(me), sent.small_local[me], scaled=False)
        self._results = Packer(compressor, part, small, scaled=False)
        self.traffic = (transport.world_size - 1) * (sent.row_bytes + self._results.row_bytes)
        self.owner = Slot(torch.zeros(part.local_numel(me), dtype=torch.float32, device=device))
        self.slots = [self.owner] if config.error_feedback else []
        # Where this shard's part of each parameter lies: if nobody sends any of it, the owner too
        # must keep back what it owes there.
        cuts = [part.local_index(offset, me) for offset in layout.offsets]
        self._hold = list(pairwise(cuts)) if config.hold_unused else []

    def mean_(
        self,
        bucket: Tensor,
        memory: Slot | None,
        stamp: Stamp,
        clock: Clock,
        held: Held = (),
        sent: list[Tensor] | None = None,
    ) -> bool:
        world, me = self._net.world_size, self._net.rank
        rows = self._sent.pack_(bucket, memory, stamp, clock, held, sent)
        with clock.phase("wait"):
            inbox = torch.empty_like(rows)
            self._net.all_to_all(inbox, rows)
        with clock.phase("decode"):
            mean = self._reduce(inbox, stamp._replace(shard=me))
        owner = self.owner if self.slots else None
        quiet = [(a, b) for a, b in self._hold if not bool(mean[a:b].any())]
        result = self._owned.pack_(mean, owner, stamp._replace(shard=me, phase=1), clock, quiet)[0]
        with clock.phase("wait"):
            row = result.new_zeros(self._results.row_bytes)
            row[: result.numel()] = result
            results = row.new_empty((world, row.numel()))
            self._net.all_gather(results, row)
        clock.traffic(self.traffic, self.traffic)
        with clock.phase("decode"):
            return self._spread_(bucket, results, stamp)

    def _reduce(self, inbox: Tensor, stamp: Stamp) -> Tensor:
        """The mean of all workers' entries for this rank's shard; NaN if someone's is not finite."""
        me, world = self._net.rank, self._net.world_size
        messages = [self._sent.unpack(inbox[r], me, stamp._replace(sender=r)) for r in range(world)]
        mean = torch.empty_like(self.owner.old)
        if not all(message.finite for message in messages):
            return mean.fill_(torch.nan)
        self._sent.sum_shard_(mean, me, messages, 1.0 / world)
        return mean

    def _spread_(self, bucket: Tensor, results: Tensor, stamp: Stamp) -> bool:
        """Write every owner's result into ``bucket``."""
        messages = [
            self._results.unpack(results[r], r, stamp._replace(sender=r, shard=r, phase=1))
            for r in range(self._net.world_size)
        ]
        if not all(message.finite for message in messages):
            bucket.fill_(torch.nan)
            return False
        out = room_for_sum(bucket)
        self._results.sum_(out, list(enumerate(messages)), 1.0)
        return deliver_(bucket, out)

    def fold_(self, residual: Tensor) -> None:
        """What the owner owes to the mean, this worker owes P times: add it to its own residual."""
        fold_owner_(residual, self.owner.old, self._net.rank, self._net.world_size)

    def state_dict(self) -> dict[str, Tensor]:
        return {"owner": self.owner.old.clone()} if self.slots else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        owner = state.get("owner")
        if owner is None and not self.slots:
            return
        if owner is None or owner.shape != self.owner.old.shape:
            found = "nothing" if owner is None else f"{tuple(owner.shape)}"
            raise ValueError(
                f"owner residual: expected {tuple(self.owner.old.shape)}, found {found}; "
                "was this state saved by another rank or with another collective?"
            )
        self.owner.old.copy_(owner)
