"""Three workers, one of which is killed, stopped, cut off or loses its connections in a given phase.

python experiments/faults.py select:kill decode:stop     # a line of JSON for each rank of each cell

Real processes and gloo groups. The fault is real too; only its moment is chosen: in the victim the phase is
wrapped, and waits there until its peers are in the exchange that they cannot end without it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # DDP imports it when it is first used: here it is imported once for all
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compressed_ddp import CompressionConfig, GradientSync, SyncError, attach
from compressed_ddp.communication.packer import Packer
from compressed_ddp.communication.rollcall import RollCall, grace, new_address, open_sockets
from compressed_ddp.lab import Lab, missing
from compressed_ddp.training import checkpoint
from compressed_ddp.training.place import Place

PHASES = ("select", "all-to-all", "all-gather", "decode", "checkpoint write")
FAULTS = ("kill", "stop", "cut", "close")
WORLD, VICTIM, STEP, BUCKET = 3, 2, 3, 1
RAISED = 3
"""The exit status of a program that ends with the SyncError."""
_PATIENCE = 60.0
"""Seconds after which a process that has not ended never will."""


class Cell(NamedTuple):
    """One worker's fault in one phase."""

    phase: str
    fault: str

    def __str__(self) -> str:
        return f"{self.phase.replace(' ', '-')}:{self.fault}"

    @classmethod
    def of(cls, text: str) -> Cell:
        phase, _, fault = text.partition(":")
        known = {str(cls(phase, fault)): cls(phase, fault) for phase in PHASES for fault in FAULTS}
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
        return known[f"{phase}:{fault}"]


def cells() -> list[Cell]:
    """All of them; without those that need a network of their own where there can be none."""
    faults = [fault for fault in FAULTS if fault != "cut" or missing() is None]
    return [Cell(phase, fault) for phase in PHASES for fault in faults]


def run(wanted: Sequence[Cell], timeout: float, together: int) -> list[dict[str, Any]]:
    """Run cells in a process of their own, some at the same time; a record for each rank of each."""
    command = [sys.executable, __file__, f"--timeout={timeout}", f"--together={together}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *map(str, wanted)], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


# --- a worker ----------------------------------------------------------------------------------


class Worker:
    """One rank of one cell."""

    def __init__(
        self, cell: Cell, rank: int, folder: Path, beat: mmap.mmap, lab: Lab | None, host: int
    ) -> None:
        self.cell, self.rank, self.folder, self.beat = cell, rank, folder, beat
        self.lab, self.host = lab, host
        self.report: dict[str, Any] = {}

    def main(self, timeout: float) -> int:
        """The whole program; its exit status."""
        if self.lab is not None:
            enter(self.lab.namespace(self.host))
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if self.lab is None else self.lab.interface
        before = open_sockets()
        self.meet()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.folder}/store",
            rank=self.rank,
            world_size=WORLD,
            timeout=timedelta(seconds=timeout - grace(timeout)),
        )
        if self.cell.phase == "checkpoint write":
            self.write_checkpoints(timeout, before)
        else:
            self.train(timeout)
        (self.folder / f"{self.rank}.json").write_text(json.dumps(self.report))
        return RAISED

    def train(self, timeout: float) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8))
        model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
        before = used()
        config = CompressionConfig(ratio=0.05, collective="sharded", sync_timeout=timeout)
        sync = attach(model, config)
        self.count(sync._transport, "all_to_all")
        self.count(sync._transport, "all_gather")
        for step in range(STEP + 1):
            kept = owed(sync)
            if step == STEP and self.rank == VICTIM:
                self.set_trap(sync)
            try:
                model(torch.randn(4, 64)).square().sum().backward()
            except RuntimeError as error:
                self.note(sync.error)
                self.report["quoted"] = str(sync.error) in str(error)
        now = owed(sync)
        self.report["intact"] = (
            sync.step == STEP
            and kept.keys() == now.keys()
            and all(torch.equal(kept[k], now[k]) for k in kept)
        )
        self.report["moved"] = any(bool(tensor.any()) for tensor in kept.values())
        closes = self.rank == 0  # others end without a word, as programs do: their worker thread still waits
        if closes:
            sync.close()
        self.count_what_is_left(before, threads=0 if closes else 1)
        if closes:
            dist.destroy_process_group()

    def write_checkpoints(self, timeout: float, before: set[int]) -> None:
        self.count(Place, "gather")
        place = Place(self.rank, WORLD, self.rank, torch.device("cpu"), "gloo", timeout)
        counted = used()
        roll = RollCall(self.rank, WORLD, new_address(before), place.gather)
        place = Place(self.rank, WORLD, self.rank, torch.device("cpu"), "gloo", timeout, roll)
        kept = checkpoint.Checkpoints(self.folder / "checkpoints", keep=3)
        kept.save(1, lambda: {"w": torch.ones(9)}, {"rank": self.rank}, place, best=False)
        if self.rank == VICTIM:
            real = checkpoint.flush

            def half(path: Path, data: bytes) -> None:
                path.write_bytes(data[: len(data) // 2])
                self.strike()
                real(path, data)

            checkpoint.flush = half
        try:
            kept.save(2, lambda: {"w": torch.zeros(9)}, {"rank": self.rank}, place, best=False)
        except SyncError as error:
            self.note(error)
        last = checkpoint.find(self.folder)
        whole = [checkpoint.read(last, name)["rank"] for name in map(checkpoint.rank_file, range(WORLD))]
        weights = checkpoint.read(last, checkpoint.SHARED)["w"]
        self.report["intact"] = kept.all() == [last] and whole == [0, 1, 2] and bool(weights.all())
        if self.rank == 0:
            roll.close()
        self.count_what_is_left(counted, threads=0)
        if self.rank == 0:
            dist.destroy_process_group()

    def count_what_is_left(self, before: dict[str, int], threads: int) -> None:
        """Report what there is now and was not ``before``; so many ``threads`` of ours may still be there."""
        patience = time.monotonic() + 5  # the kernel lists a thread for a moment after it was joined
        while used()["tasks"] > before["tasks"] + threads and time.monotonic() < patience:
            time.sleep(0.01)
        self.report["left"] = {what: n - before[what] for what, n in used().items()}
        self.report["may_be_left"] = threads

    def meet(self) -> None:
        """Wait for the others: they may have been slow to start, and the time-outs of the cell are short."""
        self.beat[WORLD + self.rank] = 1
        while not all(self.beat[WORLD : 2 * WORLD]):
            time.sleep(0.001)

    def note(self, error: BaseException | None) -> None:
        """What this rank was told, and when."""
        struck = self.folder / "struck"
        self.report |= {
            "seconds": time.monotonic() - float(struck.read_text()),
            "error": type(error).__name__,
            "text": str(error),
        }
        if isinstance(error, SyncError):
            self.report |= {"told": error.phase, "bucket": error.bucket, "ranks": list(error.ranks)}

    # --- the fault -------------------------------------------------------------------------

    def count(self, owner: Any, name: str) -> None:
        """Let the others see when this rank enters an exchange."""
        real = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.beat[self.rank] += 1
            return real(*arguments, **options)

        setattr(owner, name, counted)

    def set_trap(self, sync: GradientSync) -> None:
        """The victim strikes in bucket 1; in decode after bucket 0, so that its peers are in bucket 1."""
        owner, name, calls = {
            "select": (sync._reducer.compressor, "take_parts", 2 * BUCKET),  # as a worker, and as an owner
            "all-to-all": (sync._transport, "all_to_all", BUCKET),
            "all-gather": (sync._transport, "all_gather", BUCKET),
            "decode": (Packer, "sum_", BUCKET - 1),
        }[self.cell.phase]
        real: Callable[..., Any] = getattr(owner, name)
        left = [calls]

        def trapped(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                self.strike()
            return real(*arguments, **options)

        setattr(owner, name, trapped)

    def strike(self) -> None:
        others = [rank for rank in range(WORLD) if rank != self.rank]
        end = time.monotonic() + 20
        while any(self.beat[rank] != self.beat[self.rank] + 1 for rank in others):
            assert time.monotonic() < end, f"peers are at {list(self.beat[:WORLD])}"
            time.sleep(0.001)
        time.sleep(0.05)  # from there into gloo
        if self.cell.fault == "cut":
            assert self.lab is not None
            self.lab.cut(self.host)
        (self.folder / "struck").write_text(repr(time.monotonic()))
        if self.cell.fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.cell.fault == "kill" else signal.SIGSTOP)
            time.sleep(_PATIENCE)  # a signal may take a moment to reach all threads
        elif self.cell.fault == "close":
            close_connections()


def owed(sync: GradientSync) -> dict[str, torch.Tensor]:
    """Copies of what this rank owes, as a worker and as an owner."""
    state = sync.state_dict()
    owners = {f"owner {i}": bucket["state"]["owner"] for i, bucket in enumerate(state["buckets"])}
    return state["residuals"] | owners


def used() -> dict[str, int]:
    """Python's threads, all threads and all sockets of this process."""
    tasks = len(os.listdir("/proc/self/task"))
    return {"threads": threading.active_count(), "tasks": tasks, "sockets": len(open_sockets())}


def close_connections() -> None:
    """Shut every TCP connection of this process down, as a broken middlebox would."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as line:
                if line.family in (socket.AF_INET, socket.AF_INET6) and line.getpeername():
                    line.shutdown(socket.SHUT_RDWR)
        except OSError:  # not a socket, or not connected
            continue


def enter(namespace: str) -> None:
    """Let this process be on a host of the lab."""
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


# --- the runner --------------------------------------------------------------------------------


class Running:
    """The three processes of a cell. They are forked, so that torch is imported once for all of them."""

    def __init__(self, cell: Cell, timeout: float, lab: Lab | None, first: int) -> None:
        """``first`` is rank 0's host."""
        self.cell, self._folder = cell, Path(tempfile.mkdtemp())
        self._end = time.monotonic() + _PATIENCE
        self._left: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        beat = mmap.mmap(-1, mmap.PAGESIZE)
        for rank in range(WORLD):
            worker = Worker(cell, rank, self._folder, beat, lab, first + rank)
            pid = os.fork()
            if pid == 0:
                sys.exit(worker.main(timeout))
            self._left[rank] = pid

    def over(self) -> bool:
        """Look who has ended. A stopped victim is killed when the others have, anyone when it is too late."""
        for rank, pid in list(self._left.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._codes[rank] = os.waitstatus_to_exitcode(status)
                del self._left[rank]
        stopped = self.cell.fault == "stop" and self._left.keys() == {VICTIM}
        if stopped or time.monotonic() > self._end:
            for rank, pid in self._left.items():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._codes[rank] = -signal.SIGKILL
            self._left = {}
        return not self._left

    def records(self) -> list[dict[str, Any]]:
        """What each rank has reported, with its exit status; removes what the cell has left."""
        found = []
        for rank in range(WORLD):
            path = self._folder / f"{rank}.json"
            report = json.loads(path.read_text()) if path.exists() else {}
            found.append({**self.cell._asdict(), "rank": rank, "code": self._codes[rank], **report})
        shutil.rmtree(self._folder)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="+", type=Cell.of, help="phase:fault; blanks of a phase as hyphens")
    parser.add_argument("--timeout", type=float, default=4.0, help="sync_timeout in seconds (default: 4)")
    parser.add_argument("--together", type=int, default=1, help="cells at the same time (default: 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cut = [cell for cell in arguments.cells if cell.fault == "cut"]
    gc.freeze()  # or every fork would copy what it looks through
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(WORLD * len(cut))) if cut else None
        waiting, running = list(arguments.cells), []
        while waiting or running:
            while waiting and len(running) < arguments.together:
                cell = waiting.pop(0)
                first = WORLD * cut.index(cell) if cell in cut else 0
                running.append(Running(cell, arguments.timeout, lab if cell in cut else None, first))
            for done in [it for it in running if it.over()]:
                running.remove(done)
                for record in done.records():
                    print(json.dumps(record), flush=True)
            time.sleep(0.005)


if __name__ == "__main__":
    main()
