"""Kill -9 while checkpoints are written, at random moments: is there always a complete one to go on from?

    python experiments/kill_points.py           # 100 random moments, then every operation on a file once

*One worker* and *two workers*, in turn, write checkpoints of 3 MB a file in a loop, with the code that
``compressed-ddp train`` writes them with, and are killed after a random time: one of them or both. After each
kill new processes read every file against its hash and what must be in it, find the last checkpoint that was
reported or the one after it, and go on. Then *training*: ``compressed-ddp train`` itself with two workers,
killed and resumed over and over; its last checkpoint must be that of a run that nobody killed, to the bit.
Last, the writers are killed right before each of their operations on files, one after another: a rename is
too short to be hit by chance.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import kill_writers
import rows
from kill_training import Training
from kill_writers import Diary
from origin import origin

COLUMNS = ["point", "kind", "killed", "delay_ms", "phase", "begun", "reported", "resumed", "result"]
COLUMNS += ["date", "command", "commit", "version", "machine"]
WARM = 3
"""Checkpoints before a kill, so that there are old ones to prune."""
FULL = 2 * kill_writers.BEST_EVERY
"""A checkpoint that has everything: one to prune, and a new best."""
_PATIENCE = 120.0


def context() -> Any:
    """Processes are forked from one that has loaded torch: a new one in milliseconds."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["compressed_ddp.training.checkpoint"])
    return found


class Job:
    """Writers in a folder of their own."""

    def __init__(
        self, world: int, folder: Path, end_at: dict[int, tuple[int, int]], last: int = 10**6
    ) -> None:
        self.world, self.folder = world, folder
        (folder / kill_writers.RUN).mkdir()
        self.diaries = [Diary(folder / f"diary-{rank}") for rank in range(world)]
        arguments = [(rank, world, folder, end_at.get(rank), last) for rank in range(world)]
        self.processes = [context().Process(target=kill_writers.write, args=each) for each in arguments]
        for process in self.processes:
            process.start()

    def wait(self, done: int) -> float:
        """Wait until all workers have reported checkpoint ``done``; the time."""
        end = time.monotonic() + _PATIENCE
        while min(diary.read()[1] for diary in self.diaries) < done:
            if time.monotonic() > end or any(process.exitcode is not None for process in self.processes):
                raise RuntimeError(f"the writers did not come to checkpoint {done}")
            time.sleep(0.001)
        return time.monotonic()

    def join(self) -> None:
        for process in self.processes:
            process.join(_PATIENCE)
            if process.exitcode is None:
                process.kill()
                raise RuntimeError("a worker hangs whose peer was killed")

    def outcome(self) -> dict[str, Any]:
        """Where the kill fell, and what new workers make of it."""
        told = [diary.read() for diary in self.diaries]
        for diary in self.diaries:
            diary.close()
        begun, reported = max(each[0] for each in told), max(each[1] for each in told)
        row = {"begun": begun, "reported": reported, "phase": "; ".join(each[3] for each in told)}
        processes = [
            context().Process(target=kill_writers.go_on, args=(rank, self.world, self.folder))
            for rank in range(self.world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(_PATIENCE)
        codes = [process.exitcode for process in processes]
        if any(codes):
            return row | {"resumed": "", "result": f"not resumed: exit status {codes}"}
        resumed = int((self.folder / "resumed").read_text())
        right = reported <= resumed <= begun
        return row | {"resumed": resumed, "result": "complete" if right else "an older one"}


def by_the_clock(world: int, chance: random.Random, folder: Path) -> dict[str, Any]:
    """Writers that are killed after a random time."""
    job = Job(world, folder, {})
    began = job.wait(1)
    pace = (job.wait(WARM) - began) / (WARM - 1)
    delay = chance.uniform(0, 3 * pace)
    victims = chance.choice([[0], [1], [0, 1]]) if world > 1 else [0]
    time.sleep(delay)
    for rank in victims:
        os.kill(job.processes[rank].pid, signal.SIGKILL)
    job.join()
    killed = f"rank {victims[0]}" if len(victims) < world else "all"
    return {"killed": killed, "delay_ms": round(1e3 * delay, 1)} | job.outcome()


def operations(world: int) -> list[int]:
    """How many operations on files each worker does for one checkpoint that has everything."""
    folder = Path(tempfile.mkdtemp())
    try:
        job = Job(world, folder, {}, last=FULL)
        job.join()
        return [diary.read()[2] for diary in job.diaries]
    finally:
        shutil.rmtree(folder)


def at_operation(world: int, rank: int, operation: int, folder: Path) -> dict[str, Any]:
    """Worker ``rank`` ends right before its ``operation``."""
    job = Job(world, folder, {rank: (FULL, operation)})
    job.join()
    if job.processes[rank].exitcode != -signal.SIGKILL:
        raise RuntimeError(f"rank {rank} was to be killed and ended with {job.processes[rank].exitcode}")
    return {"killed": f"rank {rank}", "delay_ms": ""} | job.outcome()


WORLDS = {"one worker": 1, "two workers": 2}


def random_moments(points: int, seed: int) -> Iterator[dict[str, Any]]:
    """Writers, one and two of them in turn, killed by the clock."""
    for point in range(points):
        kind = list(WORLDS)[point % len(WORLDS)]
        with tempfile.TemporaryDirectory() as folder:
            row = by_the_clock(WORLDS[kind], random.Random(f"{seed} {point}"), Path(folder))
        yield {"point": point + 1, "kind": kind} | row


def trainings(points: int, seed: int) -> Iterator[dict[str, Any]]:
    """One run that is killed so many times; the last row says how it ended."""
    training = Training(random.Random(f"training {seed}"))
    try:
        for point in range(points):
            yield {"point": point + 1, "kind": "training"} | training.point()
        yield {"point": "", "kind": "training"} | training.finish()
    finally:
        training.close()


def every_operation() -> Iterator[dict[str, Any]]:
    """Each worker killed before each of its operations."""
    for kind, world in WORLDS.items():
        for rank, number in enumerate(operations(world)):
            for operation in range(1, number + 1):
                with tempfile.TemporaryDirectory() as folder:
                    row = at_operation(world, rank, operation, Path(folder))
                yield {"point": f"{rank}.{operation}", "kind": f"{kind}, every operation"} | row


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--points", type=int, default=100, help="random moments")
    parser.add_argument("--trainings", type=int, default=20, help="how often one run is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-operations", action="store_true", help="leave the last part out")
    parser.add_argument("--out", type=Path, default=Path("results/kill_points.csv"))
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    about = origin() | {"date": time.strftime("%Y-%m-%d")}
    if arguments.out.is_file():
        arguments.out.unlink()
    results: Counter[tuple[str, str]] = Counter()
    parts = [random_moments(arguments.points, arguments.seed)]
    parts += [trainings(arguments.trainings, arguments.seed)] if arguments.trainings else []
    parts += [] if arguments.no_operations else [every_operation()]
    for row in chain.from_iterable(parts):
        rows.append(arguments.out, COLUMNS, [row | about])
        results[row["kind"], row["result"]] += 1
        told = f"{row['point']:>6}  {row['kind']:<32}{row['killed']:<8}{row['phase'][:60]:<62}"
        print(f"{told}{row['result']}", flush=True)
    for (kind, result), count in sorted(results.items()):
        print(f"{count:>4}  {kind}: {result}")
    return 0 if all(result in ("complete", "same bits") for _, result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
