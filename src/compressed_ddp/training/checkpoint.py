"""Checkpoints: whole or not there at all, checked when read, and the same bits after them.

A checkpoint is a folder: ``shared.pt`` (what all workers have alike), ``rank-0000.pt`` and so on
(what each has for itself: residuals, random state), and ``manifest.json`` with sizes and SHA-256 of
all of them. It is written under another name, flushed to disk, and renamed when it is complete:
a process killed at any moment leaves the last complete one as it was.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..files import new_file
from .place import Place
from .reading import state_from

FORMAT = 1
SHARED = "shared.pt"
MANIFEST = "manifest.json"
BEST = "best"
_PREFIX = "step-"
_LARGEST_MANIFEST = 2**24


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, found or read; the message has the way out."""


class DamagedError(CheckpointError):
    """A checkpoint that is not as it was written."""


def rank_file(rank: int) -> str:
    return f"rank-{rank:04d}.pt"


class Checkpoints:
    """The checkpoints of one run, in its folder. The folder must be the same for all hosts."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def save(
        self,
        step: int,
        shared: Callable[[], Mapping[str, Any]],
        mine: Mapping[str, Any],
        place: Place,
        *,
        best: bool,
    ) -> Path:
        """Write a checkpoint; all workers call it. ``shared`` is asked for on rank 0 alone.

        Raises CheckpointError or SyncError on every worker if it fails on any; then the older
        checkpoints are as they were.
        """
        name = f"{_PREFIX}{step:08d}"
        work, done = self.folder / f".{name}", self.folder / name
        place.together("making room for a checkpoint", lambda: self._begin(work, place))

        def write() -> dict[str, dict[str, Any]]:
            files = {rank_file(place.rank): mine}
            if place.main:
                files[SHARED] = shared()
            return {file: _write(work / file, state) for file, state in files.items()}

        try:
            written = place.together("writing a checkpoint", lambda: self._told(name, write))
            rows = place.gather(_row(written[rank_file(place.rank)]))
            files = {rank_file(rank): _entry(row) for rank, row in enumerate(rows)}

            def publish() -> None:
                if place.main:
                    manifest = {"format": FORMAT, "step": step, "world_size": place.world_size, BEST: best}
                    self._publish(work, done, manifest | {"files": files | {SHARED: written[SHARED]}})

            place.together("publishing a checkpoint", lambda: self._told(name, publish))
        except BaseException:
            if place.main:
                shutil.rmtree(work, ignore_errors=True)
            raise
        return done

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = self.folder.glob(f"{_PREFIX}[0-9]*")
        numbered = (path for path in found if path.name.removeprefix(_PREFIX).isdecimal())
        return sorted(path for path in numbered if (path / MANIFEST).is_file())

    def drop_after(self, step: int) -> None:
        """Remove checkpoints of later steps: a run that goes on from here has another future."""
        for path in self.all():
            if int(path.name.removeprefix(_PREFIX)) > step:
                self._discard(path)

    def best(self) -> Path | None:
        """The one with the best score."""
        path = follow(self.folder / BEST)
        return path if path is not None and (path / MANIFEST).is_file() else None

    def _told(self, name: str, work: Callable[[], Any]) -> Any:
        """What ``work`` returns; an error of the file system says what it was about, and what is left."""
        try:
            return work()
        except OSError as error:
            last = self.all()
            left = f"the last complete one is {last[-1]}" if last else "there is none before it"
            raise CheckpointError(
                f"checkpoint {name} could not be written to {self.folder}: {error.strerror or error}; {left}"
            ) from error

    def _begin(self, work: Path, place: Place) -> None:
        if place.main:
            self._told(work.name, self._tidy)
            self._told(work.name, lambda: work.mkdir(parents=True))

    def _publish(self, work: Path, done: Path, manifest: Mapping[str, Any]) -> None:
        for file, entry in manifest["files"].items():
            path = work / file
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise CheckpointError(
                    f"{path} by another worker is not here: the run's folder must be one that "
                    "all hosts share (--runs or --run-dir on a network file system)"
                )
        flush(work / MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync_folder(work)
        if done.exists():  # this step again, after a resume from an older one
            self._discard(done)
        work.rename(done)
        if manifest[BEST]:
            point(self.folder / BEST, done.name)
        _sync_folder(self.folder)
        kept = {done, self.best(), *self.all()[-self.keep :]}
        for old in self.all():
            if old not in kept:
                self._discard(old)

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint; half-removed it must not look like one."""
        hidden = path.with_name(f".{path.name}-old")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)  # what is left goes with the next one

    def _tidy(self) -> None:
        """Finish what a killed process began: remove what is half-written or half-removed, mark the best."""
        for path in self.folder.glob(f".{_PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)
        # Killed after publishing the best so far and before saying so, the next one would prune it.
        newest = self.all()[-1:]
        try:
            unmarked = [path.name for path in newest if manifest_of(path).get(BEST) is True]
        except CheckpointError:  # told to whoever resumes from it; no reason not to write another one
            unmarked = []
        for name in unmarked:
            point(self.folder / BEST, name)


def find(path: Path) -> Path:
    """The checkpoint that ``path`` means: one itself, or the newest of a run's folder."""
    run = follow(path)
    if run is not None:
        if (run / MANIFEST).is_file():
            return run
        found = Checkpoints(run / "checkpoints", 1).all()
        if found:
            return found[-1]
    what = "is a file" if path.is_file() else "does not exist"
    if run is not None:
        what = "has no complete checkpoint"
    raise CheckpointError(
        f"{path} {what}: nothing to resume from; give a run's folder, or leave --resume out"
    )


def run_of(checkpoint: Path) -> Path:
    """The run's folder that ``checkpoint`` is in."""
    return checkpoint.resolve().parent.parent


def read(checkpoint: Path, file: str) -> dict[str, Any]:
    """One file of ``checkpoint``, its size and hash compared with the manifest; on the CPU."""
    data = checked_bytes(checkpoint, file)
    try:
        return state_from(data)
    except ValueError as error:
        raise _damaged(checkpoint, f"{file} is not a state: {error}") from error


def checked_bytes(checkpoint: Path, file: str) -> bytes:
    """The bytes of a file of ``checkpoint``; DamagedError unless they are those that were written."""
    entry = manifest_of(checkpoint)["files"].get(file)
    path = checkpoint / file
    try:
        if entry is None:
            raise _damaged(checkpoint, f"its manifest does not know {file}")
        size = path.stat().st_size if path.is_file() else 0
        if size != entry["bytes"]:
            raise _damaged(checkpoint, f"{file} has {size:,} bytes, not {entry['bytes']:,}")
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise _damaged(checkpoint, f"{file} has another SHA-256 than when it was written")
        return data
    except OSError as error:
        raise _damaged(checkpoint, str(error)) from error


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """The manifest of ``checkpoint``, checked as far as it is used."""
    path = checkpoint / MANIFEST
    try:
        if (size := path.stat().st_size) > _LARGEST_MANIFEST:
            raise ValueError(f"{size:,} bytes")
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{checkpoint} has format {manifest['format']}, this release reads {FORMAT}"
            )
        files, world = manifest["files"], manifest["world_size"]
        if type(world) is not int or not 1 <= world <= len(files):
            raise ValueError(f"{world!r} workers")
        for name in (SHARED, *map(rank_file, range(world))):
            if type(files[name]["bytes"]) is not int or not isinstance(files[name]["sha256"], str):
                raise ValueError(f"{name} has no size and hash")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(checkpoint, f"{MANIFEST} cannot be read ({error!r})") from error
    return dict(manifest)


def _damaged(checkpoint: Path, how: str) -> DamagedError:
    return DamagedError(f"checkpoint {checkpoint} is damaged: {how}{_others(checkpoint)}")


def _others(checkpoint: Path) -> str:
    others = [path for path in Checkpoints(checkpoint.parent, 1).all() if path.name != checkpoint.name]
    return f"; --resume {others[-1]} is an older one" if others else "; there is no older one"


def point(link: Path, target: str) -> None:
    """Make ``link`` lead to its sibling ``target``: a symbolic link, or a text file where none can be."""
    fresh = link.with_name(f".{link.name}-new")
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(target, target_is_directory=True)
    except OSError:
        fresh.write_text(target)
    fresh.replace(link)


def follow(path: Path) -> Path | None:
    """The folder at ``path``, or the sibling that ``point`` made it lead to; None if there is none."""
    name = ""
    if path.is_symlink():
        name = os.readlink(path)
    elif path.is_file() and path.stat().st_size < 4096:
        name = path.read_text(errors="replace").strip()
    if name and name == Path(name).name:
        path = path.with_name(name)
    return path if path.is_dir() else None


def _write(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``state``, flush it to disk, and return its size and hash."""
    # By way of memory: torch's own writer ends the process where the disk is full.
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    data = buffer.getvalue()
    flush(path, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def flush(path: Path, data: bytes) -> None:
    """Write ``data`` to a new file at ``path``, and to the disk itself."""
    with new_file(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere folders cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _row(entry: Mapping[str, Any]) -> bytes:
    return int(entry["bytes"]).to_bytes(8, "little") + bytes.fromhex(entry["sha256"])


def _entry(row: bytes) -> dict[str, Any]:
    return {"bytes": int.from_bytes(row[:8], "little"), "sha256": row[8:].hex()}
