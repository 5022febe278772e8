"""From a gradient and a residual to messages, and from messages to a sum. The law lives here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..compression import BaseCompressor
from ..kernels import kernels_for
from ..kernels.reference import all_finite
from ..layout import Partition
from ..types import Clock, Held, Payload, Slot, Stamp
from ..wire import Opened


def room_for_sum(bucket: Tensor) -> Tensor:
    """Where the float32 mean is built: in ``bucket`` itself, if that is float32."""
    return bucket if bucket.dtype == torch.float32 else torch.empty_like(bucket, dtype=torch.float32)


def deliver_(bucket: Tensor, mean: Tensor, scale: float = 1.0) -> bool:
    """Write ``scale`` times the float32 ``mean`` into ``bucket``; False if that overflows.

    ``mean`` is multiplied in place.
    """
    if scale != 1.0:
        mean.mul_(scale)
    if mean is not bucket:
        bucket.copy_(mean)
    if bucket.dtype == torch.float32:  # as it came: whoever made the mean knows that it is finite
        return scale <= 1.0 or kernels_for(bucket).finite_sum(None, bucket)
    return all_finite(bucket)


def unscaled_(bucket: Tensor, scale: float, *, changes: bool = False) -> Tensor:
    """``bucket`` divided by ``scale``: itself, or a float32 copy, for in 16 bits small ones would vanish.

    ``changes``: something else will be made of it before it is sent, which has to fit too.
    """
    if scale == 1.0 and not changes:
        return bucket
    wide = bucket.to(torch.float32) if bucket.element_size() < 4 else bucket
    return wide if scale == 1.0 else wide.mul_(1.0 / scale)


class Packer:
    """Makes the messages of one bucket, one for each shard, all of one size; and reads them."""

    def __init__(
        self, compressor: BaseCompressor, part: Partition, small: Tensor, *, scaled: bool = True
    ) -> None:
        """``small`` are the bucket positions of tensors that travel whole.

        ``scaled``: these are a worker's own messages, to which the compressor's scaling applies,
        and not a result that was scaled before.
        """
        self.compressor = compressor
        self.codec = compressor.codec
        self.part = part
        self.scaled = scaled
        shards = range(part.shards)
        self.small_local = [part.to_local(small, s) for s in shards]
        self.small = [part.to_global(local, s) for s, local in enumerate(self.small_local)]
        self._alone = [part.shard(s) for s in shards]
        self._shapes = [(part.local_numel(s), part.k(s), self.small[s].numel()) for s in shards]
        self._nbytes = [self.codec.nbytes(*shape) for shape in self._shapes]
        self.row_bytes = max(self._nbytes)

    def pack_(
        self,
        gradient: Tensor,
        memory: Slot | None,
        stamp: Stamp,
        clock: Clock,
        held: Held = (),
        sent: list[Tensor] | None = None,
    ) -> Tensor:
        """Messages (shards, row_bytes) for ``memory.old + gradient``; the rest to ``memory.new``.

        The law: ``old + gradient == decode(own messages) + new``. May overwrite ``gradient`` where
        small tensors lie. If anything is not finite, every message says so and ``memory.new``
        means nothing. What is owed in the ranges ``held`` stays owed. ``sent`` is as for
        ``Collective.mean_``.
        """
        start = time.perf_counter()
        original = gradient.numel() * gradient.element_size()
        with clock.phase("select"):
            gradient = gradient.to(torch.float32).contiguous()
            residual = memory.old if memory else None
            out = memory.new if memory else torch.empty_like(gradient)
            if residual is not None:
                for a, b in held:  # make it sum to zero, so that nothing there is chosen
                    torch.neg(residual[a:b], out=gradient[a:b])
            small = [self._detach_(gradient, residual, positions) for positions in self.small]
            taken, finite = self.compressor.take_parts(residual, gradient, out, self.part, stamp)
            finite = finite and all(all_finite(values) for values in small if values.numel())
        with clock.phase("encode"):
            rows = gradient.new_zeros((self.part.shards, self.row_bytes), dtype=torch.uint8)
            for shard, size in enumerate(self._nbytes):
                row, where = rows[shard, :size], stamp._replace(shard=stamp.shard + shard)
                if finite:
                    seen = self._encode(row, shard, taken[shard], small[shard], out, where)
                    if sent is not None:
                        # A zero says nothing: rounded away, of a small tensor, or held.
                        sent.append(self._chosen(shard, taken[shard][1][seen != 0]))
                else:
                    numel, _, dense = self._shapes[shard]
                    self.codec.encode_not_finite(row, numel, dense, where)
            if residual is not None:
                for a, b in held:
                    out[a:b] = residual[a:b]
        if self.scaled:
            self.compressor.stats.add(original, rows.numel(), time.perf_counter() - start)
        return rows

    @cached_property
    def _waiting(self) -> list[tuple[Tensor, Tensor]]:
        """For each shard, where its quotas end, and whether anything in them may have to wait."""
        found = []
        for small, quotas in zip(self.small_local, self.part.quotas, strict=True):
            ends = small.new_tensor([stop for _, stop, _ in quotas])
            waits = []
            for start, stop, k in quotas:
                apart = int(((small >= start) & (small < stop)).sum())
                waits.append(k < stop - start - apart or not self.compressor.fills)
            found.append((ends, small.new_tensor(waits, dtype=torch.bool)))
        return found

    def _chosen(self, shard: int, indices: Tensor) -> Tensor:
        """Bucket positions of those local ``indices`` that were chosen among others."""
        ends, waits = self._waiting[shard]
        among = waits[torch.searchsorted(ends, indices, right=True)]
        return self.part.to_global(indices[among], shard)

    @staticmethod
    def _detach_(gradient: Tensor, residual: Tensor | None, positions: Tensor) -> Tensor:
        """Take what is due at ``positions`` out of the sum, so that selection passes over it."""
        if positions.numel() == 0:
            return gradient[:0]
        due = gradient[positions]
        if residual is None:
            gradient[positions] = 0
            return due
        owed = residual[positions]
        gradient[positions] = -owed
        return due + owed

    def _encode(
        self,
        row: Tensor,
        shard: int,
        taken: tuple[Tensor, Tensor],
        small: Tensor,
        out: Tensor,
        stamp: Stamp,
    ) -> Tensor:
        """Write one shard's message to ``row``; what rounding takes from it is left in ``out``.

        Returns the entries' values as they will be read.
        """
        values, indices = taken
        numel, k, _ = self._shapes[shard]
        sent = self.compressor.scale(values, k, numel) if self.scaled else values
        payload = Payload(sent, indices, torch.Size([numel]))
        _, seen, seen_small = self.codec.encode(payload, k=k, dense=small, stamp=stamp, out=row)
        kernels_for(out).put_difference_(out, self.part, shard, indices, values, seen)
        if small.numel():
            out[self.small[shard]] = small - seen_small
        return seen

    def unpack(self, row: Tensor, shard: int, stamp: Stamp) -> Opened:
        """Check a message about ``shard``, all but its entries; raises WireError."""
        numel, k, dense = self._shapes[shard]
        return self.codec.open(row[: self._nbytes[shard]], numel=numel, k=k, dense=dense, stamp=stamp)

    def sum_(self, out: Tensor, messages: Sequence[tuple[int, Opened]], scale: float) -> None:
        """Overwrite ``out``, the whole bucket, with ``scale`` times each message about a shard.

        The entries are checked before anything is written; raises WireError.
        """
        self.codec.sum_(out, self.part, messages, scale)
        self._add_small(out, self.small, messages, scale)

    def sum_shard_(self, out: Tensor, shard: int, messages: Sequence[Opened], scale: float) -> None:
        """Overwrite ``out``, a shard's own elements, with ``scale`` times the messages about it."""
        numbered = [(0, message) for message in messages]
        self.codec.sum_(out, self._alone[shard], numbered, scale)
        self._add_small(out, [self.small_local[shard]], numbered, scale)

    @staticmethod
    def _add_small(
        out: Tensor, small: Sequence[Tensor], messages: Sequence[tuple[int, Opened]], scale: float
    ) -> None:
        for shard, message in messages:
            if message.dense.numel():
                out[small[shard]] += message.dense * scale
