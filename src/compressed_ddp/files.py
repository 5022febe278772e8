"""Files in a folder that may have come from anywhere: written in it, never where a link in it leads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

_HERE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)  # each where the system has it


def new_file(path: Path) -> BinaryIO:
    """An empty file at ``path``, open for writing. What was there is removed; of a link, the link itself."""
    how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _HERE  # the file itself, or an error
    try:
        descriptor = os.open(path, how, 0o666)
    except FileExistsError:
        path.unlink()
        descriptor = os.open(path, how, 0o666)
    return os.fdopen(descriptor, "wb")


def longer_file(path: Path) -> BinaryIO:
    """The file at ``path``, open at its end; OSError or ValueError if it is a link, or no file."""
    check_own(path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | _HERE), "ab")


def check_own(path: Path, *, folder: bool = False) -> None:
    """Raises ValueError unless ``path`` is a plain file (or a ``folder``), or nothing is there yet."""
    if path.is_symlink():
        raise ValueError(
            f"{path} is a symbolic link: what a run writes stays in its own folder. Remove the link, or put "
            "what it leads to in its place"
        )
    if path.exists() and not (path.is_dir() if folder else path.is_file()):
        raise ValueError(f"{path} is not a {'folder' if folder else 'file'}: move it away")
