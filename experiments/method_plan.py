"""What the comparison of methods trains: methods, tasks, and the order of runs. ``methods.py`` runs them."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import legacy
from rows import read

TUNE, TEST, TUNE_SEEDS, TUNE_RATIO, SEEDS = "tune", "test", (100, 101), 0.01, (0, 1, 2)
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

    @property
    def clips(self) -> bool:
        """Whether it clips where the task itself does not."""
        return "clip_norm" in self.flags


class Task(NamedTuple):
    """What is trained, and by which methods; a smaller ``score`` is better for a loss."""

    flags: Flags
    rates: tuple[float, ...]
    held_out: int
    score: str
    methods: Mapping[str, Method]
    ratios: tuple[float, ...] = RATIOS
    scored: int | None = None
    """How many examples of the test set a run is scored on, spread evenly over it; None: on all of them."""
    workers: int = 4
    tunings: int = 1
    """With how many seeds learning rates are tried: all with the first, then the two that did best. More than
    one where one says little: by few held-out examples (CIFAR-10), or because the best rate is near to one
    that diverges (Fashion-MNIST)."""
    like: str | None = None
    """The task whose learning rates are taken; None: they are chosen on this one."""

    def ratios_of(self, method: str) -> tuple[float, ...]:
        return (1.0,) if self.methods[method].dense else self.ratios


class Run(NamedTuple):
    """What tells one run from another."""

    task: str
    method: str
    purpose: str
    ratio: float
    seed: int
    lr: float


# --- methods and tasks ---------------------------------------------------------------------


def topk(faster: float = 1.0, **flags: Any) -> Method:
    return Method({"compress": True} | flags, faster)


def some(methods: Mapping[str, Method], *names: str) -> dict[str, Method]:
    return {name: methods[name] for name in names}


DENSE, DENSE_CLIPPED = "dense", "dense, clipped"
PLAIN, NONE = topk(), topk(error_feedback=False)
CLIPPED: dict[str, Any] = {"clip_norm": 2.0}
DGC: dict[str, Any] = {"momentum_correction": True} | CLIPPED
WARMUP: dict[str, Any] = {"ratio_schedule": "warmup", "ratio_warmup": 0.5}
INT4, ADAPTIVE, LOCAL = topk(values="int4"), topk(adapt_every=50), {"local_steps": 8}
SGD = {
    DENSE: Method({}),
    "no error feedback": NONE,
    "write-up's error": topk(compressor=legacy.NAME),
    "error feedback": PLAIN,
    "fp32 values": topk(values="fp32"),
    "int4 values": INT4,
    "adaptive": ADAPTIVE,
    # Eight steps before a meeting want a smaller rate than one.
    "local steps": topk(0.2, **LOCAL),
    "DGC": topk(**DGC, **WARMUP),
    # Without a momentum of its own a worker has nothing to mask, and the mean is clipped behind.
    "DGC, no correction": topk(**CLIPPED, **WARMUP),
    "DGC, no masking": topk(**DGC, **WARMUP, momentum_masking=False),
    "DGC, no clipping": topk(momentum_correction=True, **WARMUP),
    "DGC, no warm-up": topk(**DGC),
    # An average of ten gradients, and no momentum behind it: the sum of momentum 0.9 is ten times that.
    "EF21-SGDM": topk(10.0, memory="ef21-sgdm", eta=0.1, momentum=0.0),
}
# Which part of it is clipping, and what it costs that owners choose again.
PARTS = {
    DENSE_CLIPPED: Method(CLIPPED),
    "error feedback, clipped": topk(**CLIPPED),
    "error feedback, all-gather": topk(collective="allgather"),
}
ADAM = {
    DENSE: Method({}),
    "no error feedback": NONE,
    "write-up's error": topk(compressor=legacy.NAME, collective=legacy.NAME, split_optimizer=False),
    "error feedback, Adam behind it": topk(split_optimizer=False),
    "Adam in two halves": PLAIN,
    "int4 values": INT4,
    "adaptive": ADAPTIVE,
    "local steps": topk(**LOCAL),
    # An average before the compression, and none behind it.
    "EF21-SGDM": topk(memory="ef21-sgdm", eta=0.1, beta1=0.0),
    "two halves, momentum": topk(beta1=0.9),
    "two halves, momentum, frozen": topk(beta1=0.9, freeze_after=50),
}
IMAGES = {"model": "simple_cnn", "batch_size": 32, "epochs": 3, "schedule": "cosine", "channels_last": True}
FASHION = IMAGES | {"dataset": "fashion_mnist"}
TEXT = {"model": "gpt", "dataset": "text", "batch_size": 8, "epochs": 1, "max_steps": 200}
TEXT |= {"schedule": "cosine", "warmup": 0.02, "optimizer": "adamw", "clip_norm": 1.0}
# Workers' updates hardly overlap: an owner that chooses again among them, as sharded does, costs accuracy.
TEXT |= {"collective": "allgather"}
# Small batches: in few steps most of what is owed would never be sent, whatever the method.
CIFAR = IMAGES | {"dataset": "cifar10", "model": "resnet18", "limit": 2_500, "epochs": 4, "batch_size": 8}
CIFAR |= {"precision": "bf16"}
IMAGE_RATES, CIFAR_RATES = (0.02, 0.05, 0.1, 0.2), (0.005, 0.01, 0.02, 0.05, 0.1)
ADAM_RATES, ACCURACY = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032), "test_accuracy"


def on_workers(workers: int) -> Task:
    """The same batches in all, dealt to another number of workers."""
    methods = some(SGD | PARTS, DENSE, "error feedback", "error feedback, all-gather")
    flags = FASHION | {"batch_size": 128 // workers}
    return Task(flags, (), 0, ACCURACY, methods, (0.01, 0.001), workers=workers, like="fashion")


def by_optimizer(rates: tuple[float, ...], **flags: Any) -> Task:
    """Another optimizer, behind the compression or, where there is one, in two halves; at 1 %."""
    methods = some(SGD, DENSE, "error feedback")
    if flags["optimizer"] == "adam":
        methods = some(ADAM, DENSE, "error feedback, Adam behind it", "Adam in two halves")
    return Task(FASHION | flags, rates, 10_000, ACCURACY, methods, (TUNE_RATIO,))


ELSEWHERE = ("no error feedback", "write-up's error", "int4 values", "adaptive", "local steps")
"""Compared with SGD and on the GPT."""
GPT = {name: each for name, each in ADAM.items() if name != "two halves, momentum"}
TASKS = {
    "mnist": Task(
        IMAGES | {"dataset": "mnist"}, IMAGE_RATES, 10_000, ACCURACY, SGD | some(PARTS, DENSE_CLIPPED)
    ),
    "fashion": Task(FASHION, IMAGE_RATES, 10_000, ACCURACY, SGD | PARTS, tunings=len(TUNE_SEEDS)),
    "fashion_adamw": Task(
        FASHION | {"optimizer": "adamw"},
        ADAM_RATES,
        10_000,
        ACCURACY,
        {name: each for name, each in ADAM.items() if name not in ELSEWHERE},
        (TUNE_RATIO,),
    ),
    "text": Task(TEXT, (0.002, 0.004, 0.008), 2_000, "test_loss", GPT, scored=2_000),
    "cifar10": Task(
        CIFAR,
        CIFAR_RATES,
        1_000,
        ACCURACY,
        some(SGD, DENSE, "error feedback", "DGC, no masking", "DGC, no warm-up"),
        scored=2_000,
        tunings=len(TUNE_SEEDS),
    ),
    "sgd": by_optimizer((0.1, 0.2, 0.5, 1.0), optimizer="sgd", momentum=0.0),
    "nesterov": by_optimizer(IMAGE_RATES, optimizer="sgd", nesterov=True),
    "adam": by_optimizer(ADAM_RATES[2:], optimizer="adam"),
    "rmsprop": by_optimizer((0.0005, 0.001, 0.002, 0.004, 0.008), optimizer="rmsprop", momentum=0.0),
    "fashion_2": on_workers(2),
    "fashion_8": on_workers(8),
}
OPTIMIZERS = ("sgd", "fashion", "nesterov", "adam", "fashion_adamw", "rmsprop")
"""Tasks that differ in the optimizer alone."""
WORKERS = ("fashion_2", "fashion", "fashion_8")
"""Tasks that differ in the number of workers alone."""


# --- the plan ------------------------------------------------------------------------------


def rates(task: Task, method: Method) -> list[float]:
    return [float(f"{rate * method.faster:g}") for rate in task.rates]


def settings(run: Run, data_dir: str = "data") -> dict[str, Any]:
    """The training application's settings for ``run``."""
    task = TASKS[run.task]
    flags = {**task.flags, **task.methods[run.method].flags}
    flags |= {"data_dir": data_dir, "lr": run.lr, "seed": run.seed, "ratio": run.ratio, "keep": 0}
    flags["validation"] = task.held_out if run.purpose == TUNE else 0
    return flags


def fingerprint(run: Run) -> str:
    """Tells rows of a run that has other settings by now."""
    task = TASKS[run.task]
    text = json.dumps([settings(run), task.scored, task.workers], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def key(row: Row) -> Run:
    return Run(
        *(row["task"], row["method"], row["purpose"]),
        *(float(row["ratio"]), int(row["seed"]), float(row["lr"])),
    )


def valid(rows: Sequence[Row]) -> list[Row]:
    """The rows of runs as they are planned now; others are of no use."""
    return [
        row
        for row in rows
        if row["task"] in TASKS
        and row["method"] in TASKS[row["task"]].methods
        and row["settings"] == fingerprint(key(row))
    ]


def chosen(rows: Sequence[Row], name: str, method: str) -> float:
    """The learning rate that did best on held-out data, among those that were tried with most seeds."""
    task = TASKS[name]
    if task.like is not None:
        return chosen(rows, task.like, method)
    best = by_score(rows, name, method, TUNE_SEEDS[: task.tunings])
    return best[0] if best else rates(task, task.methods[method])[0]


def by_score(rows: Sequence[Row], name: str, method: str, seeds: Sequence[int]) -> list[float]:
    """Learning rates by how many of ``seeds`` they were tried with, then by their mean score; the best first.

    One that failed is not among them. Where two score alike, the one with the smaller loss.
    """
    task = TASKS[name]
    sign = 1.0 if task.score == ACCURACY else -1.0
    tried = rates(task, task.methods[method])
    found: dict[float, list[tuple[float, float]]] = {}
    for row in rows:
        mine = (row["task"], row["method"], row["purpose"]) == (name, method, TUNE)
        if mine and int(row["seed"]) in seeds and float(row["lr"]) in tried:
            good = not row["failed"]
            score = (sign * float(row[task.score]), -float(row["test_loss"])) if good else (-math.inf, 0.0)
            found.setdefault(float(row["lr"]), []).append(score)
    means = {rate: tuple(map(statistics.fmean, zip(*all_, strict=True))) for rate, all_ in found.items()}
    good = [rate for rate in means if means[rate][0] > -math.inf]
    return sorted(good, key=lambda rate: (len(found[rate]), *means[rate]), reverse=True)


def planned(names: Sequence[str], out: Path, workers: int = 4) -> Iterator[Run]:
    """All runs of so many workers, seed by seed; what tuning chose is known when it is needed."""
    names = [name for name in names if TASKS[name].workers == workers]
    for name in names:
        task = TASKS[name]
        for method_name, method in task.methods.items():
            ratio = 1.0 if method.dense else TUNE_RATIO
            tried = rates(task, method)
            for seed in TUNE_SEEDS[: task.tunings] if len(tried) > 1 else ():
                if seed != TUNE_SEEDS[0]:
                    tried = by_score(valid(read(out)), name, method_name, TUNE_SEEDS[:1])[:2]
                for lr in tried:
                    yield Run(name, method_name, TUNE, ratio, seed, lr)
    for seed, name in itertools.product(SEEDS, names):
        for method_name in TASKS[name].methods:
            lr = chosen(valid(read(out)), name, method_name)
            for ratio in TASKS[name].ratios_of(method_name):
                yield Run(name, method_name, TEST, ratio, seed, lr)
