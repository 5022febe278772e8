"""Does accuracy survive? Dense beside Top-K on real data.

Four workers of `compressed-ddp train` on this machine, three seeds, test set: SimpleCNN on MNIST and
Fashion-MNIST for three epochs with SGD, and the GPT on the sources of Python's standard library for 400 steps
with AdamW. The learning rate is chosen before that, once, for dense, on training data that is held out; all
methods then use it. One CSV row a run, written as it ends; started again, it goes on where it was stopped.

python experiments/training_accuracy.py --data-dir data
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from origin import origin
from pages import ROOT, fill
from rows import append, read
from trainings import TEST, USUAL, Row, Run, Task, best_rate, key, mean, planned, train

RESULTS_FILE = ROOT / "results" / "training_accuracy.csv"

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
    "mnist": Task(IMAGES, RATES, 10_000, "test_accuracy", (1.0, 0.01, 0.001)),
    "fashion_mnist": Task(IMAGES, RATES, 10_000, "test_accuracy", (1.0, 0.01, 0.001)),
    "text": Task(TEXT, (0.001, 0.002, 0.004, 0.008), 4_000, "test_loss", (1.0, 0.01)),
}
ALLOWED = {
    "mnist": {0.01: 0.2, 0.001: 1.0},
    "fashion_mnist": {0.01: 1.0, 0.001: 3.5},
    "text": {0.01: 3.0},
}
"""By dataset and ratio: points of accuracy, or percent of the loss, that may be lost; the aim."""

RESULTS = (
    *("test_accuracy", "test_loss", "seconds", "socket_sent", "payload_sent", "dense_ring", "saved_percent"),
    *("steps", "workers", "parameters", "method"),
)
COLUMNS = (*Run._fields, *RESULTS, "command", "commit", "version", "machine")


def table(rows: list[Row]) -> str:
    """Means over seeds, and the distance to dense with what is allowed."""
    lines = [
        "| dataset | | learning rate | test score | against dense | aim | sent, % of dense |",
        "|---|---|---|---|---|---|---|",
    ]
    for dataset, task in TASKS.items():
        wanted = [(TEST, dataset, ratio) for ratio in task.ratios]
        wanted += [(USUAL, dataset, 0.01)] if "optimizer" in task.flags else []
        groups = {each: [row for row in rows if key(row)[:3] == each] for each in wanted}
        if any(len(mine) < 2 for mine in groups.values()):
            continue
        dense, dense_sent = (mean(groups[wanted[0]], column) for column in (task.score, "socket_sent"))
        for (purpose, _, ratio), mine in groups.items():
            score, sent = mean(mine, task.score), mean(mine, "socket_sent")
            spread = statistics.stdev(float(row[task.score]) for row in mine)
            if task.score == "test_accuracy":
                cell, less = f"{score:.2f} ± {spread:.2f} %", f"{score - dense:+.2f} points"
                most = f"-{ALLOWED[dataset].get(ratio)} points"
            else:
                cell, less = f"loss {score:.4f} ± {spread:.4f}", f"{100 * (score / dense - 1):+.2f} %"
                most = f"+{ALLOWED[dataset].get(ratio)} %"
            name = "dense" if ratio == 1 else f"Top-K {100 * ratio:g} %"
            if purpose == USUAL:
                name, most = f"{name}, torch's AdamW behind it", ""
            lines.append(
                f"| {dataset} | {name} | {mine[0]['lr']} | {cell} | {less if ratio < 1 else ''} | "
                f"{most if ratio < 1 else ''} | {100 * sent / dense_sent:.2f} |"
            )
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="has mnist/ and fashion-mnist/ in it")
    parser.add_argument("--datasets", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--out", type=Path, default=RESULTS_FILE)
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    about = origin()
    # Where the data lie is the reader's own.
    about["command"] = about["command"].replace(str(args.data_dir), "data")
    tasks = {dataset: TASKS[dataset] for dataset in args.datasets}

    def rate_of(dataset: str) -> float:
        score = TASKS[dataset].score
        return best_rate(read(args.out), dataset, score, largest=score == "test_accuracy")

    for run in planned(tasks, rate_of):
        if run in map(key, read(args.out)):
            continue
        summary = train(run, tasks[run.dataset], args.data_dir, {})
        append(args.out, COLUMNS, [run._asdict() | summary | about])
        print(*run, f"{summary[tasks[run.dataset].score]:.4f}, {summary['seconds']:.0f} s", flush=True)
    print(table(read(args.out)))
    if args.out == RESULTS_FILE:
        fill("README.md", "accuracy", table(read(args.out)))


if __name__ == "__main__":
    main()
