"""Accuracy, bytes and time of whole trainings: dense beside Top-K at 10 %, 1 % and 0.1 %.

SimpleCNN on MNIST (3 epochs) and on the part of CIFAR-10 that is there (10 epochs), four workers, three
seeds, scored on the test set. The learning rate is chosen before that, once, for dense, on training data
that is held out. One CSV row a run, written as it ends; started again, it goes on where it was stopped.
`first_to` is the training time at the end of the first epoch that reached `target` percent. A run whose
loss is not finite any more gets a row that says so.

Workers of one machine share its cores and have no network between them: their seconds say nothing about a
cluster. With --lab the same training runs on hosts whose links are held to a rate (Linux, root), and the
rows go to results/lab_training.csv; rates are then those that results/benchmark_training.csv has chosen.

    python experiments/benchmark_training.py
    python experiments/benchmark_training.py --lab 4,100mbit --datasets mnist --seeds 0
    python experiments/benchmark_training.py --lab 4,100mbit --datasets cifar10 --model resnet18 --lr 0.05
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from origin import origin
from pages import ROOT
from rows import append, read
from trainings import (
    SEEDS,
    TUNE,
    WORKERS,
    Row,
    Run,
    Start,
    Task,
    best_rate,
    here,
    key,
    planned,
    train,
)

from compressed_ddp.report import SOURCES, read_table
from compressed_ddp.report.tables import training

RATIOS = (1.0, 0.1, 0.01, 0.001)
RATES = (0.02, 0.05, 0.1, 0.2)
IMAGES = {"batch-size": 32, "schedule": "cosine", "channels-last": True}
EPOCHS = {"mnist": 3, "cifar10": 10}
HELD_OUT = {"mnist": 10_000, "cifar10": 4_000}
TARGET = {"mnist": 98.0, "cifar10": 55.0}
ORIGIN = ("command", "commit", "version", "machine")
COLUMNS = (
    *ORIGIN,
    *("dataset", "model", "workers", "ratio", "seed", "lr", "epochs", "accuracy", "loss", "sent"),
    *("dense_bytes", "seconds", "first_to", "target"),
    *("purpose", "limit", "steps", "parameters", "method", "failed"),
)
LAB_COLUMNS = (*COLUMNS, "hosts", "rate", "link_share")


class Place(NamedTuple):
    """Where workers run: how many, what starts them, and what the rows say about it."""

    workers: int
    start: Start
    about: Callable[[], dict[str, object]]
    """Called before each run; on a lab it measures the links."""


@contextmanager
def this_machine(workers: int) -> Iterator[Place]:
    yield Place(workers, here, dict)


@contextmanager
def on_lab(options: argparse.Namespace) -> Iterator[Place]:
    """A shaped network; every run begins with a look whether the machine holds it."""
    from compressed_ddp.lab import Lab, LaunchFailed, check, launch, measure_links
    from compressed_ddp.lab.session import link_share

    hosts, rate = options.hosts, options.rate
    with Lab(hosts, rate) as network:

        def about() -> dict[str, object]:
            figures = measure_links(network) if options.no_check else check(network)
            assert network.rate is not None
            share = link_share(figures, network.rate)
            return {"hosts": hosts, "rate": rate, "link_share": f"{share:.3f}"}

        def start(program: Sequence[str]) -> None:
            with tempfile.TemporaryFile() as words:
                try:
                    launch(network, program, errors=words)
                except LaunchFailed as error:
                    raise SystemExit(str(error)) from error

        yield Place(hosts, start, about)


def identity(row: Row) -> tuple[object, ...]:
    """What tells a row from others, on a lab or not."""
    more = (row["model"], row["workers"], row["epochs"], row["limit"], row.get("rate", ""))
    return (*key(row), *more)


def first_to(history: Sequence[dict[str, float]], target: float) -> float | None:
    """Seconds of training at the end of the first epoch that reached ``target`` percent."""
    return next((epoch["seconds"] for epoch in history if epoch["test_accuracy"] >= target), None)


def row_of(summary: dict[str, Any], target: float) -> dict[str, Any]:
    """The columns that a training's summary gives."""
    same = ("model", "workers", "seconds", "steps", "parameters", "method")
    return {
        **{name: summary[name] for name in same},
        "accuracy": summary["test_accuracy"],
        "loss": summary["test_loss"],
        "sent": summary["socket_sent"] if summary["socket_sent"] is not None else summary["payload_sent"],
        "dense_bytes": summary["dense_ring"],
        "first_to": first_to(summary["history"], target),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), help="has the datasets in it (default: data)")
    add("--datasets", nargs="+", choices=EPOCHS, default=list(EPOCHS))
    add("--model", default="simple_cnn", help="such as resnet18 (default: simple_cnn)")
    add("--epochs", type=int, help="for all datasets (default: 3 on MNIST, 10 on CIFAR-10)")
    add("--limit", type=int, help="train on so many examples only")
    add("--ratios", type=lambda text: tuple(float(part) for part in text.split(",")), default=RATIOS)
    add("--seeds", type=lambda text: tuple(int(part) for part in text.split(",")), default=SEEDS)
    add("--lr", type=float, help="learning rate; without it, it is chosen on held-out data")
    add("--target", type=float, help="percent, for first_to (default: 98 on MNIST, 55 on CIFAR-10)")
    add("--workers", type=int, default=WORKERS, help="without a lab (default: 4)")
    add("--lab", metavar="HOSTS,RATE", help="on a shaped network, such as 4,100mbit")
    add(
        "--no-check", action="store_true", help="with --lab: go on even if the machine does not hold the rate"
    )
    add("--out", type=Path, help="CSV (default: results/benchmark_training.csv, or results/lab_training.csv)")
    options = parser.parse_args(arguments)
    if options.lab is not None:
        hosts, comma, rate = options.lab.partition(",")
        if not comma or not hosts.isdigit():
            parser.error(f"--lab {options.lab}: write hosts and rate, such as 4,100mbit")
        options.hosts, options.rate = int(hosts), rate
    name = "benchmark_training" if options.lab is None else "lab_training"
    options.out = options.out or ROOT / "results" / f"{name}.csv"
    return options


def tasks_of(options: argparse.Namespace) -> dict[str, Task]:
    tune = RATES if options.lr is None and options.lab is None else ()
    return {
        dataset: Task(
            IMAGES | {"model": options.model, "epochs": options.epochs or EPOCHS[dataset]},
            tune,
            HELD_OUT[dataset],
            "accuracy",
            options.ratios,
        )
        for dataset in options.datasets
    }


def chosen(options: argparse.Namespace, dataset: str) -> float:
    """The learning rate: as given, or as tuned for this model."""
    if options.lr is not None:
        return float(options.lr)
    path = options.out if options.lab is None else ROOT / "results" / "benchmark_training.csv"
    rows = [row for row in read(path) if row["model"] == options.model and not row["failed"]]
    if options.lab is None:  # of the very same training; on a lab a shorter one may do with it
        length = str(options.epochs or EPOCHS[dataset]), str(options.limit or "")
        rows = [row for row in rows if (row["epochs"], row["limit"]) == length]
    if not any((row["purpose"], row["dataset"]) == (TUNE, dataset) for row in rows):
        raise SystemExit(f"{path} has no rate for {options.model} on {dataset}: give --lr")
    return best_rate(rows, dataset, "accuracy")


def one(run: Run, task: Task, options: argparse.Namespace, place: Place) -> dict[str, Any]:
    """Train once; the row."""
    target = options.target or TARGET[run.dataset]
    row = run._asdict() | dict(task.flags) | {"limit": options.limit, "target": target, "failed": ""}
    row |= {"workers": place.workers} | place.about()
    more = {"workers": place.workers} | ({} if options.limit is None else {"limit": options.limit})
    try:
        return row | row_of(train(run, task, options.data_dir, more, place.start), target)
    except SystemExit as error:
        said = [line.strip(" |") for line in str(error).splitlines()]
        diverged = [line for line in said if "the loss is" in line or "not finite" in line]
        if not diverged:
            raise
        return row | {"failed": diverged[0]}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    about = origin()
    about["command"] = about["command"].replace(f"{options.data_dir}", "data")
    tasks = tasks_of(options)
    columns = COLUMNS if options.lab is None else LAB_COLUMNS
    lab = options.lab is not None
    places = on_lab(options) if lab else this_machine(options.workers)
    with places as place:
        for run in planned(tasks, lambda dataset: chosen(options, dataset), options.seeds):
            flags = tasks[run.dataset].flags
            mine = (options.model, place.workers, flags["epochs"], options.limit or "")
            wanted = (*run, *map(str, mine), options.rate if lab else "")
            if wanted in map(identity, read(options.out)):
                continue
            row = one(run, tasks[run.dataset], options, place)
            append(options.out, columns, [about | row])
            said = row["failed"] or f"{row['accuracy']:.2f} %, {row['seconds']:.0f} s"
            print(*run, said, flush=True)
    grid = training(read_table(SOURCES["benchmark_training" if not lab else "lab_training"], options.out))
    if grid is not None:
        print(grid.markdown())


if __name__ == "__main__":
    main()
