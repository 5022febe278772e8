"""Trainings whose results are rows of a CSV: what training_accuracy.py and benchmark_training.py share.

A row is written when its run ends; started again, an experiment goes on with the runs that have none.
The learning rate is chosen once for each dataset, for dense, on training data that is held out.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE, run
from typing import Any, NamedTuple

WORKERS, TUNE_SEED, SEEDS = 4, 100, (0, 1, 2)
TUNE, TEST, USUAL = "tune", "test", "usual"

Row = dict[str, str]
Flags = Mapping[str, object]
Start = Callable[[Sequence[str]], None]
"""Runs a command on all workers; raises SystemExit or an error of its own where it fails."""


class Task(NamedTuple):
    """A dataset, the model for it, and how it is trained."""

    flags: Flags
    rates: tuple[float, ...]
    held_out: int
    score: str  # the figure of the summary that counts
    ratios: tuple[float, ...]  # 1: plain DDP


class Run(NamedTuple):
    """What tells one run from another in one CSV."""

    purpose: str
    """tune: scored on held-out training data; test: on the test set; usual: as test, but with torch's AdamW
    behind the compression instead of the half before it."""
    dataset: str
    ratio: float
    seed: int
    lr: float


def key(row: Row) -> Run:
    return Run(row["purpose"], row["dataset"], float(row["ratio"]), int(row["seed"]), float(row["lr"]))


def mean(rows: Sequence[Row], column: str) -> float:
    return statistics.fmean(float(row[column]) for row in rows)


def best_rate(rows: Sequence[Row], dataset: str, column: str, *, largest: bool = True) -> float:
    """The rate that served dense training best, on held-out training data."""
    tuned = {
        float(row["lr"]): float(row[column])
        for row in rows
        if (row["purpose"], row["dataset"]) == (TUNE, dataset)
    }
    return (max if largest else min)(tuned, key=lambda rate: tuned[rate])


def planned(
    tasks: Mapping[str, Task], rate_of: Callable[[str], float], seeds: Sequence[int] = SEEDS
) -> Iterator[Run]:
    """All runs in order; rates are known when it comes to the second half."""
    for dataset, task in tasks.items():
        for lr in task.rates:
            yield Run(TUNE, dataset, 1.0, TUNE_SEED, lr)
    for seed in seeds:
        for dataset, task in tasks.items():
            for ratio in task.ratios:
                yield Run(TEST, dataset, ratio, seed, rate_of(dataset))
            if "optimizer" in task.flags:
                yield Run(USUAL, dataset, 0.01, seed, rate_of(dataset))


def train(each: Run, task: Task, data_dir: Path, more: Flags, start: Start | None = None) -> dict[str, Any]:
    """One whole training by workers on this machine, or as ``start`` runs them; its summary."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "workers": WORKERS,
            **task.flags,
            "dataset": each.dataset,
            "data-dir": data_dir,
            "lr": each.lr,
            "seed": each.seed,
            "validation": task.held_out if each.purpose == TUNE else 0,
            "ratio": each.ratio,
            "keep": 0,
            "run-dir": f"{folder}/run",
            **more,
        }
        program = [sys.executable, "-m", "compressed_ddp", "train", "--no-tensorboard"]
        program += [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
        program += ["--compress"] if each.ratio < 1 else []
        program += ["--split-optimizer=false"] if each.purpose == USUAL else []
        (start or here)(program)
        return dict(json.loads(Path(folder, "run", "summary.json").read_text()))


def here(program: Sequence[str]) -> None:
    done = run(program, check=False, stderr=PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
