"""The drift guard: are the replicas still one model?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..kernels import kernels_for
from ..types import Clock, SyncError, Transport

_MASK = 0xFFFFFFFFFFFFFFFF


def check_replicas(
    net: Transport,
    parameters: Mapping[str, Tensor],
    device: torch.device,
    clock: Clock,
    *,
    step: int,
    joined: bool = False,
) -> None:
    """Compare a 64-bit hash of all parameters over all ranks, which call it together.

    If they differ, every rank raises SyncError with the first parameter that differs. A ``joined`` rank,
    which has run out of data, keeps old weights until the others end: it takes part and is not compared.
    """
    hashes = {name: fingerprint(parameter) for name, parameter in parameters.items()}
    whole = 0
    for found in hashes.values():
        whole = (whole * 0x9E3779B97F4A7C15 + found + 1) & _MASK
    mine = bytes([not joined]) + whole.to_bytes(8, "little")
    rows = _everyones(net, mine, device, clock)
    counting = [rank for rank, row in enumerate(rows) if row[0]]
    if len({rows[rank] for rank in counting}) <= 1:
        return
    each = b"".join(found.to_bytes(8, "little") for found in hashes.values())
    tables = _everyones(net, each, device, clock)
    first = counting[0]
    for at, name in enumerate(hashes):
        cells = {rank: tables[rank][8 * at : 8 * at + 8] for rank in counting}
        others = [rank for rank in counting if cells[rank] != cells[first]]
        if others:
            raise SyncError(
                f"the replicas have drifted apart: at step {step} parameter {name!r} of rank "
                f"{', '.join(map(str, others))} is not that of rank {first}. Weights must change alike on "
                "all ranks: was a checkpoint loaded on one of them, or an update applied under a condition?"
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


def _everyones(net: Transport, row: bytes, device: torch.device, clock: Clock) -> list[bytes]:
    mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(device)
    rows = mine.new_empty((net.world_size, len(row)))
    with clock.phase("wait"):
        net.all_gather(rows, mine)
    moved = (net.world_size - 1) * len(row)
    clock.traffic(moved, moved)
    return [bytes(found.tolist()) for found in rows.cpu()]
