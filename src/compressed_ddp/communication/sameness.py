"""What travels without a checksum of its own: has everyone received the same?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from ..types import SyncError, Transport

_MASK = 0xFFFFFFFFFFFFFFFF
_PIECE_BITS = 11
CHECK_FLOATS = 6
"""How many floats a hash takes."""


def combined(hashes: Iterable[int]) -> int:
    """One 64-bit hash of several, in order."""
    whole = 0
    for found in hashes:
        whole = (whole * 0x9E3779B97F4A7C15 + found + 1) & _MASK
    return whole


def as_floats(mine: int) -> torch.Tensor:
    """A 64-bit hash as whole numbers whose float32 sum is exact for up to 8192 ranks: if all have the same,
    it is so many times that of each, and if one has another it is not that of anyone."""
    pieces = [mine >> (_PIECE_BITS * at) & ((1 << _PIECE_BITS) - 1) for at in range(CHECK_FLOATS)]
    return torch.tensor(pieces, dtype=torch.float32, device="cpu")


def check_same(net: Transport, mine: int, what: str, phase: str, device: torch.device) -> int:
    """Raises SyncError on every rank unless all have the hash ``mine`` of ``what``; the bytes sent.

    8 bytes to each other rank. For sums and copies by all-reduce, which have neither header nor checksum: a
    bit that flips on the way to one rank is found. One that flips before it is added up is in the sum of
    all of them, and cannot be.
    """
    row = torch.tensor(list(mine.to_bytes(8, "little")), dtype=torch.uint8, device=device)
    rows = row.new_empty((net.world_size, 8))
    net.all_gather(rows, row)
    found = [bytes(each) for each in rows.cpu().tolist()]
    usual, times = Counter(found).most_common(1)[0]
    odd = tuple(rank for rank, each in zip(net.ranks, found, strict=True) if each != usual)
    if odd:
        sure = times > len(odd)
        who = f"rank {', '.join(map(str, odd))} received something else" if sure else "the ranks differ"
        raise SyncError(
            f"{what}: {who}. It was damaged on its way, or in memory: go back to a checkpoint",
            phase=phase,
            ranks=odd if sure else (),
        )
    return (net.world_size - 1) * 8
