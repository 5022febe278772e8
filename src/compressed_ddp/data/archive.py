"""Unpack the few files that are wanted from an archive, and refuse one that holds anything odd."""

from __future__ import annotations

import gzip
import os
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from shutil import copyfileobj
from typing import IO, cast

_MOST_MEMBERS = 64
_HEADERS = 2**20
"""Bytes beyond the wanted files, for headers, padding and small files that nobody wants."""


class ArchiveError(ValueError):
    """An archive that does not hold what it should, or holds what it should not."""


def unpack(archive: Path, folder: Path, names: Sequence[str], size: int) -> None:
    """Write the files ``names`` (of exactly ``size`` bytes each) from ``archive`` into ``folder``.

    Whatever folder they have inside the archive is dropped. Nothing is written under a name that
    the archive chose, and nothing at all unless every member is harmless and all of ``names`` are
    there: they are unpacked aside and then moved, each atomically. Of what is packed, no more is ever
    unpacked than those files have bytes, and a megabyte.
    """
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=folder) as aside:
        try:
            with gzip.open(archive) as packed:
                stream = _Bounded(packed, archive, len(names) * size + _HEADERS)
                # Read once from front to back: headers may lie about what follows them.
                with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|") as tar:
                    done = _unpack(tar, archive, Path(aside), names, size)
        except ArchiveError:
            raise
        except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError, RecursionError) as error:
            raise ArchiveError(f"{archive}: cannot be unpacked ({error})") from error
        if lacking := sorted(set(names) - done):
            raise ArchiveError(f"{archive}: expected {', '.join(lacking)} inside, found no such file")
        for name in names:
            os.replace(Path(aside, name), folder / name)


class _Bounded:
    """A stream that ends in an ArchiveError where more is read than there can be."""

    def __init__(self, stream: gzip.GzipFile, archive: Path, most: int) -> None:
        self._stream, self._archive, self._left, self._most = stream, archive, most, most

    def read(self, size: int) -> bytes:
        data = self._stream.read(min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise ArchiveError(f"{self._archive}: refused, it unpacks to more than {self._most:,} bytes")
        return data


def _unpack(tar: tarfile.TarFile, archive: Path, aside: Path, names: Sequence[str], size: int) -> set[str]:
    done: set[str] = set()
    for count, member in enumerate(tar):
        _check(archive, member, size, count)
        name = PurePosixPath(member.name).name
        if not member.isreg() or name not in names:
            continue
        if name in done or member.size != size:
            found = "a second one" if name in done else f"{member.size:,} bytes"
            raise ArchiveError(f"{archive}: expected one {name} of {size:,} bytes, found {found}")
        source = tar.extractfile(member)
        assert source is not None  # it is a regular file
        with source, (aside / name).open("xb") as target:
            copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
            written = target.tell()
        if written != size:
            raise ArchiveError(f"{archive}: expected {name} of {size:,} bytes, it ends after {written:,}")
        done.add(name)
    return done


def _check(archive: Path, member: tarfile.TarInfo, size: int, count: int) -> None:
    """Raises ArchiveError for a member that could lead out of the folder, or fill the disk."""
    path = PurePosixPath(member.name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in member.name:
        raise ArchiveError(f"{archive}: refused, the member {member.name!r} leads out of the folder")
    if not (member.isreg() or member.isdir()) or member.issparse():
        kind = "has holes" if member.issparse() else "is a link or a device"
        raise ArchiveError(f"{archive}: refused, the member {member.name!r} {kind}")
    if member.size > size:
        raise ArchiveError(
            f"{archive}: refused, the member {member.name!r} has {member.size:,} bytes, more than {size:,}"
        )
    if count >= _MOST_MEMBERS:
        raise ArchiveError(f"{archive}: refused, it has more than {_MOST_MEMBERS} members")
