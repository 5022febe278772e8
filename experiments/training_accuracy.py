"""Does accuracy survive? Dense, Top-K 1 % and Top-K 0.1 % on real MNIST and Fashion-MNIST.

Four workers of `compressed-ddp train` on this machine, SimpleCNN, three epochs, three seeds, test set. The
learning rate is chosen before that, once, for dense, on 10,000 training images that are held out; all
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

ROOT = Path(__file__).resolve().parents[1]
WORKERS, BATCH, EPOCHS, HELD_OUT = 4, 32, 3, 10_000
RATES, TUNE_SEED, SEEDS = (0.02, 0.05, 0.1, 0.2), 100, (0, 1, 2)
RATIOS = (1.0, 0.01, 0.001)  # 1: plain DDP
# Points that compressed may lose against dense.
ALLOWED = {
    ("mnist", 0.01): 0.2,
    ("mnist", 0.001): 1.0,
    ("fashion_mnist", 0.01): 1.0,
    ("fashion_mnist", 0.001): 3.5,
}


class Run(NamedTuple):
    """What tells one run from another; the first columns of the CSV."""

    purpose: str  # tune: scored on held-out training images; test: on the test set
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
        flags = {
            "model": "simple_cnn",
            "dataset": run.dataset,
            "data-dir": data_dir,
            "workers": WORKERS,
            "batch-size": BATCH,
            "epochs": EPOCHS,
            "lr": run.lr,
            "schedule": "cosine",
            "seed": run.seed,
            "validation": HELD_OUT if run.purpose == "tune" else 0,
            "ratio": run.ratio,
            "keep": 0,
            "run-dir": f"{folder}/run",
        }
        program = [sys.executable, "-m", "compressed_ddp", "train", "--no-tensorboard"]
        program += [f"--{name}={value}" for name, value in flags.items()]
        program += ["--compress"] if run.ratio < 1 else []
        subprocess.run(program, check=True, stderr=subprocess.DEVNULL)
        return dict(json.loads(Path(folder, "run", "summary.json").read_text()))


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def key(row: Row) -> Run:
    return Run(row["purpose"], row["dataset"], float(row["ratio"]), int(row["seed"]), float(row["lr"]))


def best_rate(rows: list[Row], dataset: str) -> float:
    """The rate with the best dense accuracy on held-out training images."""
    tuned = [row for row in rows if (row["purpose"], row["dataset"]) == ("tune", dataset)]
    return float(max(tuned, key=lambda row: float(row["test_accuracy"]))["lr"])


def planned(datasets: list[str], path: Path) -> Iterator[Run]:
    """All runs in order; rates are known when it comes to the second half."""
    for dataset in datasets:
        for lr in RATES:
            yield Run("tune", dataset, 1.0, TUNE_SEED, lr)
    for seed in SEEDS:
        for dataset in datasets:
            for ratio in RATIOS:
                yield Run("test", dataset, ratio, seed, best_rate(read(path), dataset))


def table(rows: list[Row]) -> str:
    """Means over seeds, and the distance to dense with what is allowed."""
    lines = [
        "| dataset | ratio | lr | test accuracy, % | against dense | allowed | sent, % of dense |",
        "|---|---|---|---|---|---|---|",
    ]
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        groups = {
            ratio: [row for row in rows if key(row)[:3] == ("test", dataset, ratio)] for ratio in RATIOS
        }
        if not all(groups.values()):
            continue
        score = {ratio: [float(row["test_accuracy"]) for row in mine] for ratio, mine in groups.items()}
        sent = {
            ratio: statistics.fmean(float(row["socket_sent"]) for row in mine)
            for ratio, mine in groups.items()
        }
        for ratio in RATIOS:
            mean = statistics.fmean(score[ratio])
            spread = statistics.stdev(score[ratio]) if len(score[ratio]) > 1 else 0.0
            less = mean - statistics.fmean(score[1.0])
            allowed = f"-{ALLOWED[dataset, ratio]}" if ratio < 1 else ""
            name = "dense" if ratio == 1 else f"{ratio:g}"
            lines.append(
                f"| {dataset} | {name} | {groups[ratio][0]['lr']} | {mean:.2f} ± {spread:.2f} | "
                f"{f'{less:+.2f}' if ratio < 1 else ''} | {allowed} | {100 * sent[ratio] / sent[1.0]:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="has mnist/ and fashion-mnist/ in it")
    parser.add_argument("--datasets", nargs="+", default=["mnist", "fashion_mnist"])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "training_accuracy.csv")
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
        print(*run, f"{summary['test_accuracy']:.2f} %, {summary['seconds']:.0f} s", flush=True)
    print(table(read(args.out)))


if __name__ == "__main__":
    main()
