"""An hour of training on loopback with everything that goes wrong in a month. PASS or FAIL at the end.

    python experiments/soak.py

Four gloo workers train under DDP and ``attach``. At random: buckets of other sizes, sharded or all-gather,
other value formats; a NaN or an infinity in one worker's gradient; every few minutes one worker is killed
with SIGKILL, the others must say so and end, and all go on from the last complete checkpoint. In the middle
there is one life without a kill, long enough for a slope of memory. What must hold: ``soak_checks.py``.

Writes results/soak.csv (samples of every worker) and results/soak_summary.csv (the verdicts). The workers
sleep most of the time. Linux only: /proc says what a process holds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from datetime import datetime, timezone
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from origin import origin
from rows import append
from soak_checks import Life, books, verdicts
from soak_worker import LOST_A_PEER, WORKERS, Job, Sample, work

FOLDER = Path(__file__).resolve().parent
ORIGIN = ("date", "command", "commit", "machine")
SUMMARY = ("check", "verdict", "found", "limit", "seed", *ORIGIN, "version")
# One heap, and large tensors outside of it: else RSS would show the largest moment that each of many arenas
# has had so far, which is found at random and late. Python's objects too: its own allocator gives memory back
# by the megabyte, and only if nothing lives there. Set before torch is loaded.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
MALLOC["PYTHONMALLOC"] = "malloc"


def plan(minutes: float, quiet: float, between: tuple[float, float], seed: int) -> list[float]:
    """The seconds of each life: short ones around one of ``quiet`` minutes. A kill ends all but the last."""
    chance, lives = random.Random(seed), []
    left = 60 * (minutes - quiet)
    while left > 0:
        lives.append(min(left, chance.uniform(*between)))
        left -= lives[-1]
    middle = len(lives) // 2
    return [*lives[:middle], 60 * quiet, *lives[middle:]] if quiet else lives


class Soak:
    """The one who starts workers, kills one of them, and looks at what they leave."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.chance = random.Random(f"{job.seed} kills")
        # Workers are forked from a process that has loaded torch and done nothing with it.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["soak_worker"])

    def live(self, number: int, seconds: float, *, last: bool) -> Life:
        """Start all workers, let them train, and kill one of them, or tell all to stop."""
        job = self.job
        workers = [
            self.context.Process(target=work, args=(rank, job, number), daemon=True)
            for rank in range(WORKERS)
        ]
        for worker in workers:
            worker.start()
        life, victim = Life(number, seconds), -1
        try:
            if not self._steps(number, workers):
                life.faults.append(f"no step within {job.timeout:g} s: {_codes(workers)}")
                return life
            end = time.monotonic() + seconds
            while time.monotonic() < end and all(worker.is_alive() for worker in workers):
                time.sleep(min(0.2, max(end - time.monotonic(), 0)))
            if not all(worker.is_alive() for worker in workers):
                life.faults.append(f"ended before its time: {_codes(workers)}")
            elif last:
                job.stop.touch()
            else:
                victim = self.chance.randrange(WORKERS)
                life.killed = time.time()
                workers[victim].kill()
            self._wait(life, workers, victim)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
        life.victim = victim
        checkpoints = job.checkpoints.all()
        life.books = books(checkpoints[-1], WORKERS) if checkpoints else None
        return life

    def _steps(self, number: int, workers: list[BaseProcess]) -> bool:
        """Whether all workers have made a step (and a sample) before long."""
        end = time.monotonic() + self.job.timeout
        while time.monotonic() < end and all(worker.is_alive() for worker in workers):
            if {each.rank for each in samples(self.job) if each.life == number} == set(range(WORKERS)):
                return True
            time.sleep(0.1)
        return False

    def _wait(self, life: Life, workers: list[BaseProcess], victim: int) -> None:
        """Until all have ended by themselves, as they must after a kill within the timeout."""
        began, job = time.monotonic(), self.job
        for worker in workers:
            worker.join(max(0.0, began + job.timeout + 30 - time.monotonic()))
        life.ending = time.monotonic() - began
        for rank, worker in enumerate(workers):
            wanted = LOST_A_PEER if victim >= 0 else 0
            if rank != victim and worker.exitcode != wanted:
                life.faults.append(f"rank {rank} ended with {worker.exitcode}, not {wanted}")
            note = job.note("ended", life.number, rank)
            if note.exists():
                life.told.append(json.loads(note.read_text()))


def _codes(workers: list[BaseProcess]) -> str:
    return ", ".join(f"rank {rank}: {worker.exitcode}" for rank, worker in enumerate(workers))


def samples(job: Job) -> list[Sample]:
    """What the workers have written so far."""
    if not job.samples.exists():
        return []
    whole = job.samples.read_text().rpartition("\n")[0]  # the last line may be on its way
    rows = (line.split(",") for line in whole.splitlines())
    return [Sample(float(when), *map(int, others)) for when, *others in rows]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long in all")
    parser.add_argument("--quiet", type=float, default=30.0, help="minutes of the life without a kill")
    parser.add_argument("--warm-up", type=float, default=360.0, help="seconds of a life that do not count")
    parser.add_argument("--between", type=float, nargs=2, default=(90.0, 240.0), help="seconds between kills")
    parser.add_argument("--pace", type=float, default=0.08, help="seconds that a worker sleeps in each step")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--rewrap-every", type=int, default=200, help="steps between new buckets, on average")
    parser.add_argument("--overflow-every", type=int, default=25, help="steps between overflows, on average")
    parser.add_argument("--sample-seconds", type=float, default=5.0)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until a silent peer is dead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FOLDER.parent / "results", help="folder of the CSV files")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, folder: Path) -> tuple[list[Life], list[Sample]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = Job(
        folder,
        store.port,
        options.seed,
        options.pace,
        options.save_every,
        options.rewrap_every,
        options.overflow_every,
        options.sample_seconds,
        options.timeout,
    )
    soak, lives = Soak(job), []
    planned = plan(options.minutes, options.quiet, tuple(options.between), options.seed)
    for number, seconds in enumerate(planned):
        life = soak.live(number, seconds, last=number == len(planned) - 1)
        lives.append(life)
        print(life, flush=True)
        if life.faults:
            break
    return lives, samples(job)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not Path("/proc/self/fd").exists():
        print("this needs Linux's /proc to see what a process holds")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers are ended and files removed
    os.environ.update(MALLOC)
    # The process that workers are forked from looks for soak_worker there, and says nothing if it is not.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    made_by = origin() | {"date": date, "seed": str(options.seed)}
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        lives, taken = run(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = verdicts(lives, taken, options.warm_up)
    write(options.out, taken, [verdict._asdict() | made_by for verdict in found])
    for verdict in found:
        print(f"{verdict.verdict:<10}  {verdict.check}: {verdict.found} ({verdict.limit})")
    failed = [verdict for verdict in found if verdict.verdict == "FAIL"]
    print("FAIL: " + "; ".join(verdict.check for verdict in failed) if failed else "PASS")
    return 1 if failed else 0


def write(out: Path, taken: list[Sample], summary: list[dict[str, Any]]) -> None:
    """Both files anew."""
    for name in ("soak.csv", "soak_summary.csv"):
        (out / name).unlink(missing_ok=True)
    about = {name: summary[0][name] for name in ORIGIN}
    append(out / "soak.csv", (*Sample._fields, *ORIGIN), [each._asdict() | about for each in taken])
    append(out / "soak_summary.csv", SUMMARY, summary)


if __name__ == "__main__":
    sys.exit(main())
