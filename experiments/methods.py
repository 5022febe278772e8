"""Which method keeps accuracy? Every method beside dense training: accuracy against bytes that were sent.

Gloo workers on this machine, three seeds, ratios 10 %, 1 % and 0.1 %. SimpleCNN on MNIST and Fashion-MNIST
(three epochs, SGD; also with other optimizers, and by two and eight workers), the GPT on the sources of
Python's standard library (200 steps, AdamW), ResNet-18 on a part of CIFAR-10. Every method chooses its
learning rate on training data that is held out, at 1 %, among as many as any other. One CSV row a run,
written as it ends; started again, it goes on. What is trained is in ``method_plan.py``.

    torchrun --standalone --nproc-per-node 4 experiments/methods.py --data-dir data
    torchrun --standalone --nproc-per-node 2 experiments/methods.py --data-dir data      # and 8
    python experiments/methods.py --only-plot        # the picture, and the tables of docs/methods.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import method_tables
import torch
from method_plan import TASKS, Run, fingerprint, key, planned, settings, valid
from origin import origin
from pages import ROOT
from rows import append, read

from compressed_ddp.data import Dataset, Subset
from compressed_ddp.metrics import Trackers
from compressed_ddp.training.config import Running, TrainConfig
from compressed_ddp.training.figures import TrainingDiverged
from compressed_ddp.training.loop import Trainer
from compressed_ddp.training.place import Place, joined
from compressed_ddp.training.progress import Progress
from compressed_ddp.training.run import load_data

OUT = ROOT / "results" / "methods.csv"
COLUMNS = (
    *("task", "method", "purpose", "ratio", "seed", "lr", "test_accuracy", "test_loss", "socket_sent"),
    *("payload_sent", "dense_ring", "seconds", "steps", "workers", "parameters", "described", "failed"),
    *("command", "commit", "version", "machine", "settings"),
)


@cache
def loaded(text: str, scored: int | None) -> Dataset:
    """A dataset, once for all runs on it."""
    data = load_data(TrainConfig.from_flat(json.loads(text)))
    if scored is None or scored >= len(data.test):
        return data
    spread = torch.arange(scored) * len(data.test) // scored
    return replace(data, test=Subset(data.test, spread))


def train(run: Run, place: Place, data_dir: str) -> dict[str, Any]:
    """One training by all workers of this job; its row."""
    flags = settings(run, data_dir)
    config = TrainConfig.from_flat(flags)
    about = {name: flags[name] for name in ("dataset", "data_dir", "limit", "validation") if name in flags}
    data = place.together("loading data", lambda: loaded(json.dumps(about), TASKS[run.task].scored))
    trainer = Trainer(config, place, data)
    try:
        summary = trainer.run(Path("unused"), Progress(epochs=1, enabled=False), Trackers([]))
    except TrainingDiverged as error:
        return {**run._asdict(), "failed": str(error).splitlines()[0]}
    finally:
        trainer.sync.close()
    return {**run._asdict(), **summary, "described": summary["method"], "method": run.method, "failed": ""}


def work(options: argparse.Namespace) -> None:
    """One worker of the job: rank 0 says what comes next, and writes it down."""
    about = origin()
    with joined(Running(), 300.0) as place:
        about["command"] = f"torchrun --standalone --nproc-per-node {place.world_size} experiments/methods.py"
        about["command"] += " --data-dir data"
        if options.tasks != list(TASKS):
            about["command"] += f" --tasks {','.join(options.tasks)}"
        todo = planned(options.tasks, options.out, place.world_size) if place.main else iter(())
        while True:
            done = set(map(key, valid(read(options.out)))) if place.main else set()
            following = next((run for run in todo if run not in done), None)
            said = place.say(json.dumps(following) if following else "")
            if not said:
                return
            run = Run(*json.loads(said))
            row = train(run, place, options.data_dir)
            if place.main:
                append(options.out, COLUMNS, [about | row | {"settings": fingerprint(run)}])
                score = row["failed"] or f"{row[TASKS[run.task].score]:.4f}, {row['seconds']:.0f} s"
                print(*run, score, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", default="data", help="has the datasets in it (default: data)")
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"default: {','.join(TASKS)}")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--only-plot", action="store_true", help="train nothing; what is there, drawn, and in docs/methods.md"
    )
    options = parser.parse_args(arguments)
    options.tasks = options.tasks.split(",")
    for name in options.tasks:
        if name not in TASKS:
            parser.error(f"unknown task {name!r}; known are {', '.join(TASKS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if not options.only_plot:
        work(options)
        return
    rows = valid(read(options.out))
    for mark, text in method_tables.parts(rows, TASKS):
        print(f"\n{mark}\n\n{text}")
    method_tables.write(rows, TASKS, options.out)


if __name__ == "__main__":
    main()
