"""Processes that write checkpoints until they are killed, and processes that go on from what they left.

Everything is written by ``compressed_ddp.training.checkpoint``. A diary, a few bytes of memory mapped from
a file, survives the process: which checkpoint it was at, and at which operation on which file.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from compressed_ddp.training import checkpoint
from compressed_ddp.training.checkpoint import Checkpoints, find, read
from compressed_ddp.training.place import Place

ELEMENTS = 750_000
"""3 MB in each file, so that most of the time goes into writing them."""
KEEP, BEST_EVERY = 2, 3
RUN = "run"
_ROOM = 4096
_BEST_NEW = f".{checkpoint.BEST}-new"


class Diary:
    """What one writer is at: written by it, read by whoever killed it."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_ROOM))
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), _ROOM)

    def write(self, begun: int, done: int, operation: int, phase: str) -> None:
        """One assignment, so that a reader finds the old line or the new one."""
        line = f"{begun} {done} {operation} {phase}"
        self._map[:_ROOM] = line.encode().ljust(_ROOM, b"\0")

    def read(self) -> tuple[int, int, int, str]:
        """The checkpoint that was begun, the last that was done, the operation's number, and what it was."""
        text = bytes(self._map).rstrip(b"\0").decode()
        begun, done, operation, phase = text.split(" ", 3) if text else ("0", "0", "0", "starting")
        return int(begun), int(done), int(operation), phase

    def close(self) -> None:
        self._map.close()
        self._file.close()


class Watch:
    """Notes every operation on files that this process does from now on; at one of them it may end it.

    ``end_at`` is a checkpoint and the number of an operation in it: SIGKILL right before that operation.
    """

    def __init__(self, diary: Diary, end_at: tuple[int, int] | None) -> None:
        self._diary, self._end_at = diary, end_at
        self._begun, self._done, self._operation, self._opened = 0, 0, 0, ""
        sys.addaudithook(self._heard)
        sync = os.fsync

        def watched(descriptor: int) -> None:
            self._note(f"flushing {self._opened}")
            sync(descriptor)
            self._note(f"flushed {self._opened}")

        os.fsync = watched

    def begin(self, step: int) -> None:
        self._begun, self._operation = step, 0
        self._note("before the first file")

    def end(self, step: int) -> None:
        self._done = step
        self._note("after the last file")

    def _note(self, phase: str) -> None:
        self._operation += 1
        self._diary.write(self._begun, self._done, self._operation, phase)
        if self._end_at is not None and (self._begun, self._operation) == self._end_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        """Python tells of an operation right before it does it."""
        if event == "open" and isinstance(args[0], str) and f"/{RUN}/" in args[0]:
            path, mode, flags = args
            self._opened = re.sub(r"^\.?step-\d+$", "the folder", Path(path).name)
            if mode is None and flags & os.O_CREAT == 0:
                return  # to flush a folder, or to remove what is in it
            if "w" in (mode or "w"):
                self._note(f"writing {self._opened}")
        elif event in _PHASES:
            self._note(_PHASES[event](*map(str, args[:2])))


def _renamed(source: str, target: str) -> str:
    if Path(target).name == checkpoint.BEST:
        return "marking the best"
    return "pruning: hiding an old one" if target.endswith("-old") else "publishing: the rename"


_PHASES: dict[str, Callable[..., str]] = {
    "os.mkdir": lambda *_: "making the folder and the bytes",
    "os.rename": _renamed,
    "os.symlink": lambda *_: "marking the best",
    "os.remove": lambda path, *_: "marking the best" if _BEST_NEW in path else "pruning: removing a file",
    "os.rmdir": lambda *_: "pruning: removing a folder",
}


def contents(step: int, rank: int) -> dict[str, Any]:
    """What file ``rank`` (-1: the shared one) of checkpoint ``step`` must hold, to the bit."""
    return {"step": step, "rank": rank, "x": torch.arange(ELEMENTS).add_(7 * step + rank).float()}


def join(rank: int, world: int, store: Path) -> Place:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    return Place(rank, world, rank, torch.device("cpu"), "gloo")


def save(step: int, place: Place, folder: Path) -> None:
    checkpoints = Checkpoints(folder / RUN / "checkpoints", KEEP)
    mine = contents(step, place.rank)
    best = step % BEST_EVERY == 0
    checkpoints.save(step, lambda: contents(step, -1), mine, place, best=best)


def write(rank: int, world: int, folder: Path, end_at: tuple[int, int] | None, last: int) -> None:
    """Checkpoint after checkpoint, up to ``last`` or until something ends this process.

    A worker whose peer was killed ends with status 3: that is how it should notice.
    """
    place = join(rank, world, folder / "store")
    watch = Watch(Diary(folder / f"diary-{rank}"), end_at)
    for step in range(1, last + 1):
        watch.begin(step)
        try:
            save(step, place, folder)
        except RuntimeError:
            os._exit(3)  # the process group is of no use any more
        watch.end(step)


def go_on(rank: int, world: int, folder: Path) -> None:
    """A new job finds the newest checkpoint, checks all of it, and goes on: two more of them.

    Whatever is wrong raises, and this process ends with status 1.
    """
    place = join(rank, world, folder / "store-of-the-next")
    newest = find(folder / RUN)
    step = int(checkpoint.manifest_of(newest)["step"])
    for file, who in [(checkpoint.SHARED, -1), *((checkpoint.rank_file(r), r) for r in range(world))]:
        found, wanted = read(newest, file), contents(step, who)
        if found.keys() != wanted.keys() or not torch.equal(found.pop("x"), wanted.pop("x")):
            raise AssertionError(f"{file} of {newest} is not what was written")
        if found != wanted:
            raise AssertionError(f"{file} of {newest} has {found}, not {wanted}")
    checkpoints = Checkpoints(newest.parent, KEEP)
    place.gather(b"read")  # nobody removes what another one still reads
    if place.main:
        checkpoints.drop_after(step)
    for following in (step + 1, step + 2):
        save(following, place, folder)
    if place.main:
        check_order(checkpoints, step + 2)
        (folder / "resumed").write_text(str(step))
    place.gather(b"done")


def check_order(checkpoints: Checkpoints, last: int) -> None:
    """Nothing is left of the killed process, the newest are there, and the best is what it should be."""
    steps = [int(path.name.removeprefix("step-")) for path in checkpoints.all()]
    best = last - last % BEST_EVERY
    if steps != sorted({best, last - 1, last} - {0}):
        raise AssertionError(f"there are checkpoints {steps} after {last}")
    marked = checkpoints.best()
    if best and (marked is None or not marked.name.endswith(f"{best:08d}")):
        raise AssertionError(f"{marked} is the best after {last}, not {best}")
    left = [path.name for path in checkpoints.folder.iterdir() if path.name.startswith(".")]
    if left:
        raise AssertionError(f"{left} are left over")
