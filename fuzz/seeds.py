"""Inputs that the native targets begin with, in the layout that each target reads (see its last function)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import messages
import torch


def native_messages() -> Iterator[bytes]:
    """Golden and packed messages with Elias-Fano indices, unrepaired and repaired, by both sets of loops."""
    for case in messages.cases():
        code = case.codec.values.code
        if case.codec.indices.code != 1 or code > 4 or case.part.numel >= 700 or case.room > 255:
            continue
        count = struct.unpack_from("<I", case.message, 20)[0]
        _, values_at, _, _ = case.cuts
        parts = case.message[32:values_at] + case.message[values_at:][: case.codec.values.nbytes(count)]
        for repairs, how in ((0, 0), (7, 16)):
            chosen = bytes([code, case.part.shards - 1, repairs, how, 1]) + struct.pack("<H", case.part.numel)
            yield chosen + bytes([case.shard, case.room, count]) + parts


def native_selection() -> Iterator[bytes]:
    """Gaussian, equal, zero, tiny, huge and broken numbers, with and without a residual."""
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(60, generator=generator)
    kinds = [gaussian, gaussian.round(), gaussian * 0, gaussian * 1e-42, gaussian * 3e37]
    kinds += [torch.tensor([1.0, torch.nan]), torch.tensor([3.4e38, 3.4e38]), torch.tensor([0.5])]
    for numbers in kinds:
        for how in (0, 1, 2, 6, 8, 0xF0, 0xF3):
            head = bytes([how, how % 3]) + struct.pack("<H", 290 if how < 16 else 4700) + bytes([3])
            yield head + bytes([200, 40] * (1 + how % 3)) + bytes(numbers.view(torch.uint8).tolist())


def write(target: str, folder: Path) -> list[Path]:
    """The seeds of ``target`` as files of ``folder``."""
    from python_messages import seeds

    made = {
        "native_messages": native_messages,
        "native_selection": native_selection,
        "python_messages": seeds,
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, seed in enumerate(made[target]()):
        paths.append(folder / f"seed-{number:04d}")
        paths[-1].write_bytes(seed)
    return paths
