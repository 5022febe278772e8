"""Does accuracy survive? Dense beside Top-K on real data.

Four workers of `compressed-ddp train` on this machine, three seeds, test set: SimpleCNN on MNIST and
Fashion-MNIST for three epochs with SGD, and the GPT on the sources of Python's standard library for 400 steps
with AdamW. The learning rate is chosen before that, once, for dense, on training data that is held out; all
methods then use it. One CSV row a run, written as it ends; started again, it goes on where it was stopped.

python experiments/training_accuracy.py --data-dir data
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from origin import origin
from pages import ROOT, fill

RESULTS_FILE = ROOT / "results" / "training_accuracy.csv"
WORKERS, TUNE_SEED, SEEDS = 4, 100, (0, 1, 2)


class Task(NamedTuple):
    """A dataset, the model for it, and how it is trained."""

    flags: dict[str, object]
    rates: tuple[float, ...]
    held_out: int
    score: str  # the column that counts
    allowed: dict[float, float]
    """By ratio: points of accuracy, or percent of the loss, that may be lost against dense; the aim."""

    @property
    def ratios(self) -> tuple[float, ...]:
        return (1.0, *self.allowed)  # 1: plain DDP


IMAGES = {"model": "simple_cnn", "batch-size": 32, "epochs": 3, "schedule": "cosine"}
TEXT = {
    "model": "gpt",
    "batch-size": 8,
    "epochs": 1,
    "max-steps": 400,
    "schedule": "cosine",
    "optimizer": "adamw",
}
# Workers' updates hardly overlap: an owner that chooses again among them, as sharded does, costs accuracy.
TEXT |= {"warmup": 0.02, "clip-norm": 1.0, "collective": "allgather"}
RATES = (0.02, 0.05, 0.1, 0.2)
TASKS = {
    "mnist": Task(IMAGES, RATES, 10_000, "test_accuracy", {0.01: 0.2, 0.001: 1.0}),
    "fashion_mnist": Task(IMAGES, RATES, 10_000, "test_accuracy", {0.01: 1.0, 0.001: 3.5}),
    "text": Task(TEXT, (0.001, 0.002, 0.004, 0.008), 4_000, "test_loss", {0.01: 3.0}),
}


class Run(NamedTuple):
    """What tells one run from another; the first columns of the CSV."""

    purpose: str
    """tune: scored on held-out training data; test: on the test set; usual: as test, but with torch's AdamW
    behind the compression instead of the half before it."""
    dataset: str
    ratio: float
    seed: int
    lr: float


RESULTS = (
    *("test_accuracy", "test_loss", "seconds", "socket_sent", "payload_sent", "dense_ring", "saved_percent"),
    *("steps", "workers", "parameters", "method"),
)
COLUMNS = (*Run._fields, *RESULTS, "command", "commit", "version", "machine")
Row = dict[str, str]


def measure(run: Run, data_dir: Path) -> dict[str, Any]:
    """One whole training; its summary."""
    with tempfile.TemporaryDirectory() as folder:
        task = TASKS[run.dataset]
        flags = {
            **task.flags,
            "dataset": run.dataset,
            "data-dir": data_dir,
            "workers": WORKERS,
            "lr": run.lr,
            "seed": run.seed,
            "validation": task.held_out if run.purpose == "tune" else 0,
            "ratio": run.ratio,
            "keep": 0,
            "run-dir": f"{folder}/run",
        }
        program = [sys.executable, "-m", "compressed_ddp", "train", "--no-tensorboard"]
        program += [f"--{name}={value}" for name, value in flags.items()]
        program += ["--compress"] if run.ratio < 1 else []
        program += ["--split-optimizer=false"] if run.purpose == "usual" else []
        done = subprocess.run(program, check=False, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        return dict(json.loads(Path(folder, "run", "summary.json").read_text()))


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def key(row: Row) -> Run:
    return Run(row["purpose"], row["dataset"], float(row["ratio"]), int(row["seed"]), float(row["lr"]))


def best_rate(rows: list[Row], dataset: str) -> float:
    """The rate that served dense training best, on held-out training data."""
    score = TASKS[dataset].score
    tuned = {
        float(row["lr"]): float(row[score])
        for row in rows
        if (row["purpose"], row["dataset"]) == ("tune", dataset)
    }
    return (max if score == "test_accuracy" else min)(tuned, key=lambda rate: tuned[rate])


def planned(datasets: list[str], path: Path) -> Iterator[Run]:
    """All runs in order; rates are known when it comes to the second half."""
    for dataset in datasets:
        for lr in TASKS[dataset].rates:
            yield Run("tune", dataset, 1.0, TUNE_SEED, lr)
    for seed in SEEDS:
        for dataset in datasets:
            for ratio in TASKS[dataset].ratios:
                yield Run("test", dataset, ratio, seed, best_rate(read(path), dataset))
            if "optimizer" in TASKS[dataset].flags:
                yield Run("usual", dataset, 0.01, seed, best_rate(read(path), dataset))


def table(rows: list[Row]) -> str:
    """Means over seeds, and the distance to dense with what is allowed."""
    lines = [
        "| dataset | | learning rate | test score | against dense | aim | sent, % of dense |",
        "|---|---|---|---|---|---|---|",
    ]
    for dataset, task in TASKS.items():
        wanted = [("test", dataset, ratio) for ratio in task.ratios]
        wanted += [("usual", dataset, 0.01)] if "optimizer" in task.flags else []
        groups = {each: [row for row in rows if key(row)[:3] == each] for each in wanted}
        if any(len(mine) < 2 for mine in groups.values()):
            continue
        dense, dense_sent = (mean(groups[wanted[0]], column) for column in (task.score, "socket_sent"))
        for (purpose, _, ratio), mine in groups.items():
            score, sent = mean(mine, task.score), mean(mine, "socket_sent")
            spread = statistics.stdev(float(row[task.score]) for row in mine)
            if task.score == "test_accuracy":
                cell, less = f"{score:.2f} ± {spread:.2f} %", f"{score - dense:+.2f} points"
                most = f"-{task.allowed.get(ratio)} points"
            else:
                cell, less = f"loss {score:.4f} ± {spread:.4f}", f"{100 * (score / dense - 1):+.2f} %"
                most = f"+{task.allowed.get(ratio)} %"
            name = "dense" if ratio == 1 else f"Top-K {100 * ratio:g} %"
            if purpose == "usual":
                name, most = f"{name}, torch's AdamW behind it", ""
            lines.append(
                f"| {dataset} | {name} | {mine[0]['lr']} | {cell} | {less if ratio < 1 else ''} | "
                f"{most if ratio < 1 else ''} | {100 * sent / dense_sent:.2f} |"
            )
    return "\n".join(lines)


def mean(rows: list[Row], column: str) -> float:
    return statistics.fmean(float(row[column]) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="has mnist/ and fashion-mnist/ in it")
    parser.add_argument("--datasets", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--out", type=Path, default=RESULTS_FILE)
    args = parser.parse_args()
    about = origin() | {"command": "python experiments/training_accuracy.py --data-dir data"}
    for run in planned(args.datasets, args.out):
        if run in map(key, read(args.out)):
            continue
        summary = measure(run, args.data_dir)
        new = not args.out.exists()
        with args.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
            if new:
                writer.writeheader()
            writer.writerow(run._asdict() | summary | about)
        print(*run, f"{summary[TASKS[run.dataset].score]:.4f}, {summary['seconds']:.0f} s", flush=True)
    print(table(read(args.out)))
    if args.out == RESULTS_FILE:
        fill("README.md", "accuracy", table(read(args.out)))


if __name__ == "__main__":
    main()
