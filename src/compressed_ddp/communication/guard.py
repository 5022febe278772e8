"""The guard: now and then, are replicas one model, does everybody wait for one, is more and more owed?"""

from __future__ import annotations

import logging
import math
import statistics
import struct
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..kernels import kernels_for
from ..layout import fills_memory
from ..metrics import Ledger
from ..types import Collective, Held, Slot, Stamp, SyncError, Transport
from .residuals import Growth, Owed, Waiting, advice, stale
from .sameness import combined

logger = logging.getLogger("compressed_ddp")

_ROW = struct.Struct("<?Qffff")
"""Whether this rank is compared, the hash of its parameters, its seconds of waiting and of a step, and the
norm and the age of what it owed after the step of the last look."""
_WAITING = 0.3
"""Share of a step that others wait before a straggler is named."""
_LARGEST = torch.finfo(torch.float32).max
_NOT_FINITE = 10
"""Steps in a row that do not count before a word about it. A loss scale that begins too high takes a few."""


class Guard:
    """Looks every ``every`` steps, beginning before the first; 0 never looks. 25 bytes to each other rank."""

    def __init__(self, every: int, net: Transport, device: torch.device, stats: Ledger) -> None:
        self._every, self._net, self._device, self._stats = every, net, device, stats
        self._began: tuple[float, int, float] | None = None
        """When the last look was, at which step, and how long was waited until then; None before any."""
        self._owed: Owed | None = None
        """In a step that is looked at: what is left owed after it."""
        self._norm, self._age, self._at = math.nan, math.nan, 0
        """The norm and age of what was owed after step ``_at``, as all ranks are told at the next look."""
        self._growth, self._waiting = Growth(), Waiting()
        self._lost = 0
        """Steps in a row that did not count."""

    def look(self, parameters: Mapping[str, Tensor], step: int, *, joined: bool = False) -> None:
        """Before a step, all ranks together. SyncError on every rank if their ``parameters`` differ.

        It names the first parameter that differs. A ``joined`` rank, which has run out of data, keeps old
        weights until the others end: it takes part and is not compared.
        """
        self._owed = None
        if not self._every or step % self._every or self._net.world_size == 1:
            return
        self._owed = None if joined else Owed()
        hashes = {name: fingerprint(parameter) for name, parameter in parameters.items()}
        whole = combined(hashes.values())
        owed = min(self._norm, _LARGEST), self._age if self._age < _LARGEST else self._age * math.inf
        mine = _ROW.pack(not joined, whole, *self._pace(step), *owed)
        rows = [_ROW.unpack(row) for row in self._everyones(mine)]
        counting = [rank for rank, row in enumerate(rows) if row[0]]
        if len({rows[rank][1] for rank in counting}) > 1:
            self._name_the_first(hashes, counting, step)
        self._stats.waits = [row[2] for row in rows]
        told = straggler(self._stats.waits, statistics.median(row[3] for row in rows), self._net.ranks)
        if told and self._net.rank == 0 and len(counting) == len(rows):  # who has no data left only waits
            logger.warning("%s (steps up to %d)", told, step)
        self._judge([row[4] for row in rows], [row[5] for row in rows])

    def mean_(
        self,
        collective: Collective,
        bucket: Tensor,
        memory: Slot | None,
        stamp: Stamp,
        held: Held,
        sent: list[Tensor] | None,
    ) -> bool:
        """``collective.mean_``; in a step that is looked at, what it leaves owed is measured beside it."""
        if self._owed is None or memory is None:
            return collective.mean_(bucket, memory, stamp, self._stats, held, sent)
        with self._stats.phase("select"):
            whole = memory.old + bucket  # a copy: the bucket will hold the mean
        finite = collective.mean_(bucket, memory, stamp, self._stats, held, sent)
        if finite:
            with self._stats.phase("select"):
                self._owed.add(memory.new, whole.sub_(memory.new))  # the law
        return finite

    def end_step(self, step: int, *, finite: bool) -> None:
        """``step`` is over; ``finite`` if it counted, as all ranks know."""
        self._lost = 0 if finite else self._lost + 1
        tens, rest = divmod(self._lost, _NOT_FINITE)
        if tens and not rest and tens.bit_count() == 1 and self._net.rank == 0:  # 10, 20, 40, ...
            logger.warning(
                "%d steps in a row had a NaN or an infinity in some rank's gradient: none of them changed a "
                "residual, and with GradScaler none changed the weights. A loss scale that is too high comes "
                "down by itself. Otherwise weights or data are bad: lower the learning rate, clip gradients, "
                "and go on from a checkpoint (steps up to %d)",
                self._lost,
                step,
            )
        found = self._owed.figures() if self._owed is not None and finite else None
        self._owed = None
        if found is not None:
            (self._norm, self._age), self._at = found, step
            self._stats.residual_norm, self._stats.residual_age = found
        self._stats.close_step(finite=finite)

    def _judge(self, norms: Sequence[float], ages: Sequence[float]) -> None:
        """Rank 0 says so if the largest of what all ranks owe grows without bound, or the oldest stays."""
        known = [(norm, rank) for rank, norm in enumerate(norms) if not math.isnan(norm)]
        if self._net.rank or not known:
            return
        norm, rank = max(known)
        ratio, names = self._stats.ratio, self._net.ranks
        age, oldest = max((ages[rank], rank) for _, rank in known)
        if self._waiting.look(self._at, age, ratio):
            logger.warning("%s (steps up to %d)", stale(norms[oldest], names[oldest], age, ratio), self._at)
        times = self._growth.look(self._at, norm, ratio)
        if times is not None:
            logger.warning("%s (steps up to %d)", advice(norm, names[rank], times, ratio), self._at)

    def restart(self) -> None:
        """A state was loaded: its steps, and what was waited in them, are not of this life."""
        self._began = None

    def _pace(self, step: int) -> tuple[float, float]:
        """Seconds of waiting and of a whole step, means since the last look; zeros at the first one."""
        now, wait = time.perf_counter(), self._stats.total.wait
        (then, at, waited), self._began = self._began or (now, step, wait), (now, step, wait)
        steps = step - at
        return ((wait - waited) / steps, (now - then) / steps) if steps > 0 else (0.0, 0.0)

    def _name_the_first(self, hashes: Mapping[str, int], counting: Sequence[int], step: int) -> None:
        each = b"".join(found.to_bytes(8, "little") for found in hashes.values())
        tables, first, names = self._everyones(each), counting[0], self._net.ranks
        for at, name in enumerate(hashes):
            cells = {rank: tables[rank][8 * at : 8 * at + 8] for rank in counting}
            others = [str(names[rank]) for rank in counting if cells[rank] != cells[first]]
            if others:
                raise SyncError(
                    f"the replicas have drifted apart: at step {step} parameter {name!r} of rank "
                    f"{', '.join(others)} is not that of rank {names[first]}. Weights must change alike "
                    "on all ranks: was a checkpoint loaded on one of them, or an update applied under a "
                    "condition? On unlike processors an optimizer may round differently too"
                )
        raise SyncError(
            f"at step {step} the ranks' hashes of all parameters differ, and those of each do not: what one "
            "of them sends is not what it has. Is its memory or its network at fault?"
        )

    def _everyones(self, row: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(self._device)
        rows = mine.new_empty((self._net.world_size, len(row)))
        with self._stats.phase("wait"):
            self._net.all_gather(rows, mine)
        moved = (self._net.world_size - 1) * len(row)
        self._stats.traffic(moved, moved)
        return [bytes(found.tolist()) for found in rows.cpu()]


def straggler(waits: Sequence[float], step: float, ranks: Sequence[int] | None = None) -> str | None:
    """What to say about the rank that the others wait for, if there is one.

    Whoever comes last waits for nobody. Where the network is what takes long, all wait alike. ``ranks`` is
    what the job calls them.
    """
    slowest = min(range(len(waits)), key=waits.__getitem__)
    others = [wait for rank, wait in enumerate(waits) if rank != slowest]
    usual = statistics.median(others)
    lost = usual - waits[slowest]
    if not (0 < step < math.inf and _WAITING * step <= lost < math.inf):  # nor where one is not a number
        return None
    name = slowest if ranks is None else ranks[slowest]
    return (
        f"rank {name} is a straggler: the others wait {usual:.3g} s of each step of {step:.3g} s, it "
        f"waits {waits[slowest]:.3g} s; {lost / step:.0%} of their time goes there"
    )


def fingerprint(tensor: Tensor) -> int:
    """A 64-bit hash of a tensor's bits, in the order of its memory."""
    flat = tensor.detach()
    flat = (
        flat.as_strided((flat.numel(),), (1,))
        if fills_memory(flat.shape, flat.stride())
        else flat.contiguous().view(-1)
    )
    data = flat.view(torch.uint8)
    if data.numel() % 4:
        data = torch.cat([data, data.new_zeros(-data.numel() % 4)])
    if data.data_ptr() % 4:
        data = data.clone()
    return kernels_for(data.view(torch.float32)).fingerprint(data)
