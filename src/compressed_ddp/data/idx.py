"""idx files (MNIST's format), plain or gzipped. Headers are checked before they are believed."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

MAX_BYTES = 2**30
"""No file of any of our datasets is larger than this."""
MOST_ITEMS = 60_000
"""As many images or labels has the largest file in this format, of MNIST and of Fashion-MNIST."""

_CHUNK = 2**20
_UNSIGNED_BYTES = 0x08
_AGAIN = "delete it and fetch it again"


def read_idx(path: Path, item: tuple[int, ...] = ()) -> Tensor:
    """The array in ``path`` as a new uint8 tensor of things of shape ``item``, up to ``MOST_ITEMS`` of them.

    ValueError names the file, what was expected and what was found. At most one byte more than
    the header promises is ever unpacked, and nothing if it promises something else.
    """
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not packed:
            return _parse(path, file, item)
        try:
            with gzip.GzipFile(fileobj=file) as stream:
                return _parse(path, cast(BinaryIO, stream), item)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: damaged gzip file ({error}); {_AGAIN}") from error


def _parse(path: Path, stream: BinaryIO, item: tuple[int, ...]) -> Tensor:
    dims = 1 + len(item)
    head = 4 + 4 * dims
    header = stream.read(head)
    if len(header) < head:
        raise ValueError(f"{path}: expected an idx header of {head} bytes, found {len(header)}; {_AGAIN}")
    magic, *shape = struct.unpack(f">{dims + 1}I", header)
    expected = _UNSIGNED_BYTES << 8 | dims
    if magic != expected:
        raise ValueError(
            f"{path}: expected idx magic {expected:#010x} ({dims}-dimensional bytes), found {magic:#010x}; "
            "is it another file under this name?"
        )
    size = math.prod(shape)
    if tuple(shape[1:]) != item:
        wanted = " x ".join(map(str, item))
        raise ValueError(f"{path}: expected images of {wanted}, found {tuple(shape[1:])}; {_AGAIN}")
    if not 0 < shape[0] <= MOST_ITEMS:
        raise ValueError(
            f"{path}: the header claims {' x '.join(map(str, shape))} = {size} bytes, "
            f"expected 1 to {MOST_ITEMS:,} of them; {_AGAIN}"
        )
    data = bytearray()
    # In chunks, so that memory grows with what is there and not with what was claimed.
    while len(data) <= size and (chunk := stream.read(min(_CHUNK, size + 1 - len(data)))):
        data += chunk
    if len(data) != size:
        found = f"only {len(data)}" if len(data) < size else "more"
        raise ValueError(
            f"{path}: expected {' x '.join(map(str, shape))} = {size} bytes after the header, found {found}; "
            f"{_AGAIN}"
        )
    return torch.frombuffer(data, dtype=torch.uint8).view(shape)
