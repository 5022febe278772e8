"""Text as bytes: predict the next one. A file, a folder, or what every Python has: its own sources."""

from __future__ import annotations

import os
import platform
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .dataset import Dataset
from .idx import MAX_BYTES

SUFFIXES = frozenset(
    ".c .cc .cpp .css .csv .go .h .hpp .htm .html .java .js .json .md .py .pyi .rs .rst .sh .tex .toml .ts "
    ".tsv .txt .xml .yaml .yml".split()
)
"""What counts as text in a folder."""

LIBRARY_BYTES = 8_000_000
"""How much of the standard library is read."""

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class TextSplit:
    """Tokens (uint8). Example i: the ``block`` tokens at ``i * block``, and the same moved on by one."""

    tokens: Tensor
    block: int

    def __len__(self) -> int:
        return max(0, self.tokens.numel() - 1) // self.block

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        windows = self.tokens[indices[:, None] * self.block + torch.arange(self.block + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def text(source: str | Path | None, block: int) -> Dataset:
    """The bytes of ``source``, in windows of ``block``; the last tenth is the test set."""
    if block < 1:
        raise ValueError(f"block must be at least 1 token, got {block}; 128 is the default")
    if source is None:
        data, title = _library(), f"sources of the Python {platform.python_version()} standard library"
    else:
        data, title = _read(Path(source)), Path(source).name
    least = 10 * (block + 1)
    if len(data) < least:
        raise ValueError(
            f"{source or 'the standard library'}: expected at least {least} bytes for windows of {block}, "
            f"found {len(data)}; give more text or a smaller block"
        )
    tokens = torch.frombuffer(data, dtype=torch.uint8)
    cut = tokens.numel() * 9 // 10
    train, test = TextSplit(tokens[:cut], block), TextSplit(tokens[cut:], block)
    about = f"{title}: {cut:,} training bytes, {len(data) - cut:,} test bytes, in windows of {block}"
    return Dataset("text", "text", (block,), 256, train, test, about)


def _read(source: Path) -> bytearray:
    if source.is_file():
        if (size := source.stat().st_size) > MAX_BYTES:
            raise ValueError(f"{source}: {size:,} bytes is more than {MAX_BYTES:,}; give a part of it")
        return bytearray(source.read_bytes())
    if not source.is_dir():
        raise FileNotFoundError(
            f"no text at {source}: give a file or a folder, or leave it out for the Python standard library"
        )
    data = bytearray()
    try:
        for path in _files(source):
            data += _contents(path, MAX_BYTES + 1 - len(data))
            if len(data) > MAX_BYTES:
                raise ValueError(f"{source}: more than {MAX_BYTES:,} bytes of text; give a folder inside it")
    except OSError as error:
        raise ValueError(
            f"{error.filename}: cannot be read ({error.strerror or error}), and all workers must train on "
            "the same text: make it readable, or give a folder without it"
        ) from error
    if not data:
        raise ValueError(
            f"{source}: no text files in this folder (looked for {' '.join(sorted(SUFFIXES))}); "
            "give a file by its name, whatever its suffix"
        )
    return data


def _library() -> bytearray:
    data = bytearray()
    root = Path(sysconfig.get_path("stdlib"))
    for path in _files(root, leave_out=_NOT_LIBRARY):
        # _sysconfigdata is written when Python is built: it differs between machines, and workers must agree.
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata"):
            data += _contents(path, LIBRARY_BYTES - len(data))
    return data


def _files(root: Path, leave_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Names that end like text under ``root``, in a fixed order, without hidden folders."""

    def refuse(error: OSError) -> None:
        raise error  # not skipped: another host may be able to read it

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if name not in leave_out and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix.lower() in SUFFIXES:
                yield path


def _contents(path: Path, most: int) -> bytes:
    """The first ``most`` bytes; nothing of a link or a pipe.

    OSError if it may not be read: without it, this worker would train on other text than the rest.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return b""
    with path.open("rb") as file:
        return file.read(min(most, status.st_size))
