"""Which method keeps accuracy? Every method beside dense training: accuracy against bytes that were sent.

Four gloo workers, three seeds, ratios 10 %, 1 % and 0.1 %. SimpleCNN on MNIST and Fashion-MNIST (three
epochs, SGD; `fashion_adamw`: AdamW), the GPT on the sources of Python's standard library (200 steps, AdamW),
ResNet-18 on a part of CIFAR-10. Every method chooses its learning rate on training data that is held out, at
1 %, among as many as any other. One CSV row a run, written as it ends; started again, it goes on.

    torchrun --standalone --nproc-per-node 4 experiments/methods.py --data-dir data
    python experiments/methods.py --only-plot        # the picture, and the tables of docs/methods.md
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import legacy
import method_tables
from origin import origin
from pages import ROOT
from rows import append, read

from compressed_ddp.metrics import Trackers
from compressed_ddp.training.config import Running, TrainConfig
from compressed_ddp.training.figures import TrainingDiverged
from compressed_ddp.training.loop import Trainer
from compressed_ddp.training.place import Place, joined
from compressed_ddp.training.progress import Progress
from compressed_ddp.training.run import load_data

OUT = ROOT / "results" / "methods.csv"
TUNE, TEST, TUNE_SEED, TUNE_RATIO, SEEDS = "tune", "test", 100, 0.01, (0, 1, 2)
RATIOS = (0.1, 0.01, 0.001)

Flags = Mapping[str, Any]
Row = dict[str, str]


class Method(NamedTuple):
    """Settings beside those of the task; ``faster`` multiplies the learning rates that are tried."""

    flags: Flags
    faster: float = 1.0

    @property
    def dense(self) -> bool:
        return not self.flags.get("compress")


class Task(NamedTuple):
    """What is trained, and by which methods; a smaller ``score`` is better for a loss."""

    flags: Flags
    rates: tuple[float, ...]
    held_out: int
    score: str
    methods: Mapping[str, Method]
    ratios: tuple[float, ...] = RATIOS

    def better(self, scores: Mapping[float, float]) -> float:
        """The rate with the best score."""
        return (max if self.score == "test_accuracy" else min)(scores, key=lambda rate: scores[rate])


def topk(faster: float = 1.0, **flags: Any) -> Method:
    return Method({"compress": True} | flags, faster)


DGC: dict[str, Any] = {"momentum_correction": True, "clip_norm": 2.0}
WARMUP: dict[str, Any] = {"ratio_schedule": "warmup", "ratio_warmup": 0.5}
NONE, VALUES = topk(error_feedback=False), {v: topk(values=v) for v in ("fp32", "int4")}
ADAPTIVE, LOCAL = topk(adapt_every=50), topk(local_steps=8)
SGD = {
    "dense": Method({}),
    "no error feedback": NONE,
    "write-up's error": topk(compressor=legacy.NAME),
    "error feedback": topk(),
    "fp32 values": VALUES["fp32"],
    "int4 values": VALUES["int4"],
    "adaptive": ADAPTIVE,
    "local steps": LOCAL,
    "DGC": topk(**DGC, **WARMUP),
    "DGC, no correction": topk(clip_norm=2.0, **WARMUP),
    "DGC, no masking": topk(**DGC, **WARMUP, momentum_masking=False),
    "DGC, no clipping": topk(momentum_correction=True, **WARMUP),
    "DGC, no warm-up": topk(**DGC),
    # An average of ten gradients, and no momentum behind it: the sum of momentum 0.9 is ten times that.
    "EF21-SGDM": topk(10.0, memory="ef21-sgdm", eta=0.1, momentum=0.0),
}
ADAM = {
    "dense": Method({}),
    "no error feedback": NONE,
    "write-up's error": topk(compressor=legacy.NAME, collective=legacy.NAME, split_optimizer=False),
    "error feedback, Adam behind it": topk(split_optimizer=False),
    "Adam in two halves": topk(),
    "fp32 values": VALUES["fp32"],
    "int4 values": VALUES["int4"],
    "adaptive": ADAPTIVE,
    "local steps": LOCAL,
    "EF21-SGDM": topk(memory="ef21-sgdm", eta=0.1),
}
IMAGES = {"model": "simple_cnn", "batch_size": 32, "epochs": 3, "schedule": "cosine", "channels_last": True}
TEXT = {"model": "gpt", "dataset": "text", "batch_size": 8, "epochs": 1, "max_steps": 200}
TEXT |= {"schedule": "cosine", "warmup": 0.02, "optimizer": "adamw", "clip_norm": 1.0}
# Workers' updates hardly overlap: an owner that chooses again among them, as sharded does, costs accuracy.
TEXT |= {"collective": "allgather"}
BEST = ("dense", "error feedback", "DGC, no warm-up", "adaptive")
TASKS = {
    "mnist": Task(IMAGES | {"dataset": "mnist"}, (0.02, 0.05, 0.1), 10_000, "test_accuracy", SGD),
    "fashion": Task(IMAGES | {"dataset": "fashion_mnist"}, (0.02, 0.05, 0.1), 10_000, "test_accuracy", SGD),
    "fashion_adamw": Task(
        IMAGES | {"dataset": "fashion_mnist", "optimizer": "adamw"},
        (0.0005, 0.001, 0.002, 0.004),
        10_000,
        "test_accuracy",
        {
            name: ADAM[name]
            for name in ("dense", "error feedback, Adam behind it", "Adam in two halves", "EF21-SGDM")
        },
        (0.01,),
    ),
    "text": Task(TEXT, (0.002, 0.004, 0.008), 4_000, "test_loss", ADAM),
    "cifar10": Task(
        IMAGES | {"dataset": "cifar10", "model": "resnet18", "limit": 2_000, "epochs": 4},
        (0.05,),
        1_000,
        "test_accuracy",
        {name: SGD[name] for name in BEST},
    ),
}
COLUMNS = (
    *("task", "method", "purpose", "ratio", "seed", "lr", "test_accuracy", "test_loss", "socket_sent"),
    *("payload_sent", "dense_ring", "seconds", "steps", "workers", "parameters", "described", "failed"),
    *("command", "commit", "version", "machine"),
)


class Run(NamedTuple):
    """What tells one run from another."""

    task: str
    method: str
    purpose: str
    ratio: float
    seed: int
    lr: float


def key(row: Row) -> Run:
    return Run(
        *(row["task"], row["method"], row["purpose"]),
        *(float(row["ratio"]), int(row["seed"]), float(row["lr"])),
    )


# --- the plan ------------------------------------------------------------------------------


def rates(task: Task, method: Method) -> list[float]:
    return [float(f"{rate * method.faster:g}") for rate in task.rates]


def chosen(rows: Sequence[Row], name: str, method: str) -> float:
    """The learning rate that did best on held-out data; a run that failed did not."""
    task = TASKS[name]
    tuned = {
        float(row["lr"]): float(row[task.score])
        for row in rows
        if (row["task"], row["method"], row["purpose"]) == (name, method, TUNE) and not row["failed"]
    }
    return task.better(tuned) if tuned else rates(task, task.methods[method])[0]


def planned(names: Sequence[str], out: Path) -> Iterator[Run]:
    """All runs, seed by seed; the rates that tuning chose are known when they are needed."""
    for name in names:
        task = TASKS[name]
        for method_name, method in task.methods.items():
            if len(task.rates) > 1:
                ratio = 1.0 if method.dense else TUNE_RATIO
                for lr in rates(task, method):
                    yield Run(name, method_name, TUNE, ratio, TUNE_SEED, lr)
    for seed, name in itertools.product(SEEDS, names):
        task = TASKS[name]
        for method_name, method in task.methods.items():
            lr = chosen(read(out), name, method_name)
            for ratio in (1.0,) if method.dense else task.ratios:
                yield Run(name, method_name, TEST, ratio, seed, lr)


def settings(run: Run, data_dir: str) -> dict[str, Any]:
    """The training application's settings for ``run``."""
    task = TASKS[run.task]
    flags = {**task.flags, **task.methods[run.method].flags}
    flags |= {"data_dir": data_dir, "lr": run.lr, "seed": run.seed, "ratio": run.ratio, "keep": 0}
    flags["validation"] = task.held_out if run.purpose == TUNE else 0
    return flags


# --- running -------------------------------------------------------------------------------


@cache
def loaded(text: str) -> Any:
    """A dataset, once for all runs on it."""
    return load_data(TrainConfig.from_flat(json.loads(text)))


def train(run: Run, place: Place, data_dir: str) -> dict[str, Any]:
    """One training by all workers of this job; its row."""
    flags = settings(run, data_dir)
    config = TrainConfig.from_flat(flags)
    about = {name: flags[name] for name in ("dataset", "data_dir", "limit", "validation") if name in flags}
    data = place.together("loading data", lambda: loaded(json.dumps(about)))
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
    about["command"] = "torchrun --standalone --nproc-per-node 4 experiments/methods.py"
    about["command"] += f" --data-dir data --tasks {','.join(options.tasks)}"
    with joined(Running(), 300.0) as place:
        todo = planned(options.tasks, options.out) if place.main else iter(())
        while True:
            done = set(map(key, read(options.out))) if place.main else set()
            following = next((run for run in todo if run not in done), None)
            said = place.say(json.dumps(following) if following else "")
            if not said:
                return
            run = Run(*json.loads(said))
            row = train(run, place, options.data_dir)
            if place.main:
                append(options.out, COLUMNS, [about | row])
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
    rows = read(options.out)
    for mark, text in method_tables.parts(rows, TASKS):
        print(f"\n{mark}\n\n{text}")
    method_tables.write(rows, TASKS, options.out)


if __name__ == "__main__":
    main()
