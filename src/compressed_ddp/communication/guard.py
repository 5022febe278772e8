"""The guard: now and then, are the replicas still one model, and does everybody wait for one of them?"""

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
from ..metrics import Ledger
from ..types import SyncError, Transport

logger = logging.getLogger("compressed_ddp")

_ROW = struct.Struct("<?Qff")
"""Whether this rank is compared, the hash of its parameters, its seconds of waiting and of a step."""
_MASK = 0xFFFFFFFFFFFFFFFF
_WAITING = 0.3
"""Share of a step that others wait before a straggler is named."""


class Guard:
    """Looks every ``every`` steps, beginning before the first; 0 never looks. 17 bytes to each other rank."""

    def __init__(self, every: int, net: Transport, device: torch.device, stats: Ledger) -> None:
        self._every, self._net, self._device, self._stats = every, net, device, stats
        self._began = (time.perf_counter(), 0, 0.0)
        """When the last look was, at which step, and how long was waited until then."""

    def look(self, parameters: Mapping[str, Tensor], step: int, *, joined: bool = False) -> None:
        """Before a step, all ranks together. SyncError on every rank if their ``parameters`` differ.

        It names the first parameter that differs. A ``joined`` rank, which has run out of data, keeps old
        weights until the others end: it takes part and is not compared.
        """
        if not self._every or step % self._every or self._net.world_size == 1:
            return
        hashes = {name: fingerprint(parameter) for name, parameter in parameters.items()}
        whole = 0
        for found in hashes.values():
            whole = (whole * 0x9E3779B97F4A7C15 + found + 1) & _MASK
        rows = [_ROW.unpack(row) for row in self._everyones(_ROW.pack(not joined, whole, *self._pace(step)))]
        counting = [rank for rank, row in enumerate(rows) if row[0]]
        if len({rows[rank][1] for rank in counting}) > 1:
            self._name_the_first(hashes, counting, step)
        self._stats.waits = [wait for _, _, wait, _ in rows]
        told = straggler(self._stats.waits, statistics.median(row[3] for row in rows))
        if told and self._net.rank == 0 and len(counting) == len(rows):  # who has no data left only waits
            logger.warning("%s (steps up to %d)", told, step)

    def _pace(self, step: int) -> tuple[float, float]:
        """Seconds of waiting and of a whole step, means since the last look."""
        (then, at, waited), now = self._began, time.perf_counter()
        wait, steps = self._stats.total.wait, step - at
        self._began = now, step, wait
        return ((wait - waited) / steps, (now - then) / steps) if steps > 0 else (0.0, 0.0)

    def _name_the_first(self, hashes: Mapping[str, int], counting: Sequence[int], step: int) -> None:
        each = b"".join(found.to_bytes(8, "little") for found in hashes.values())
        tables, first = self._everyones(each), counting[0]
        for at, name in enumerate(hashes):
            cells = {rank: tables[rank][8 * at : 8 * at + 8] for rank in counting}
            others = [rank for rank in counting if cells[rank] != cells[first]]
            if others:
                raise SyncError(
                    f"the replicas have drifted apart: at step {step} parameter {name!r} of rank "
                    f"{', '.join(map(str, others))} is not that of rank {first}. Weights must change alike "
                    "on all ranks: was a checkpoint loaded on one of them, or an update applied under a "
                    "condition?"
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


def straggler(waits: Sequence[float], step: float) -> str | None:
    """What to say about the rank that the others wait for, if there is one.

    Whoever comes last waits for nobody. Where the network is what takes long, all wait alike.
    """
    slowest = min(range(len(waits)), key=waits.__getitem__)
    others = [wait for rank, wait in enumerate(waits) if rank != slowest]
    usual = statistics.median(others)
    lost = usual - waits[slowest]
    if not (0 < step < math.inf and _WAITING * step <= lost < math.inf):  # nor where one is not a number
        return None
    return (
        f"rank {slowest} is a straggler: the others wait {usual:.3g} s of each step of {step:.3g} s, it "
        f"waits {waits[slowest]:.3g} s; {lost / step:.0%} of their time goes there"
    )


def fingerprint(tensor: Tensor) -> int:
    """A 64-bit hash of a tensor's bits, in the order of its memory."""
    flat = tensor.detach()
    flat = flat.as_strided((flat.numel(),), (1,)) if _dense(flat) else flat.contiguous().view(-1)
    data = flat.view(torch.uint8)
    if data.numel() % 4:
        data = torch.cat([data, data.new_zeros(-data.numel() % 4)])
    if data.data_ptr() % 4:
        data = data.clone()
    return kernels_for(data.view(torch.float32)).fingerprint(data)


def _dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory without gaps, in whatever order."""
    dims = sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    )
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return False
        expected *= size
    return True
