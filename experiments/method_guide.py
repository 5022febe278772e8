"""Which method to take: advice, each with the figures that say so. The last table of docs/methods.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from method_plan import Row, Task
from method_results import Result, default, dense_of, distance, markdown, results, share

SMALL = ("mnist", "fashion")
IMAGES = (*SMALL, "cifar10")


class Of(NamedTuple):
    """A method at a ratio. *Error feedback* is a task's plain method, whatever its name there."""

    method: str
    ratio: float

    def on(self, task: Task) -> str:
        return default(task) if self.method == "error feedback" else self.method


class Advice(NamedTuple):
    """In this case take that, and not the other if there was one; measured on these tasks."""

    case: str
    take: str
    tasks: tuple[str, ...]
    this: Of
    instead: Of | None = None


GUIDE = (
    Advice(
        "SGD with momentum, 10 %",
        "plain error feedback, the default: DGC is hardly better",
        IMAGES,
        Of("error feedback", 0.1),
        Of("DGC, no warm-up", 0.1),
    ),
    Advice(
        "SGD with momentum, 1 %",
        "`--momentum-correction --clip-norm 2`",
        IMAGES,
        Of("DGC, no warm-up", 0.01),
        Of("error feedback", 0.01),
    ),
    Advice(
        "the same, 0.1 %",
        "the same",
        IMAGES,
        Of("DGC, no warm-up", 0.001),
        Of("error feedback", 0.001),
    ),
    Advice(
        "0.1 % of a small model, and bytes to spare at the start",
        "with `--no-momentum-masking --ratio-schedule warmup --ratio-warmup 0.5`",
        IMAGES,
        Of("DGC, no masking", 0.001),
        Of("DGC, no warm-up", 0.001),
    ),
    Advice(
        "still fewer bytes",
        "`--values int4`: the same entries in fewer bits",
        (*SMALL, "text"),
        Of("int4 values", 0.01),
        Of("error feedback", 0.01),
    ),
    Advice(
        "latency is what costs",
        "`--local-steps 8`, at ten times the ratio",
        SMALL,
        Of("local steps", 0.1),
        Of("error feedback", 0.01),
    ),
    Advice(
        "one ratio for each layer?",
        "no: leave `adapt_every` at 0",
        (*SMALL, "text"),
        Of("error feedback", 0.01),
        Of("adaptive", 0.01),
    ),
    Advice(
        "Adam, AdamW on images, 1 %",
        "`SplitAdam`, the application's own choice",
        ("fashion_adamw",),
        Of("Adam in two halves", 0.01),
        Of("error feedback, Adam behind it", 0.01),
    ),
    Advice(
        "AdamW on a GPT, 1 %",
        "`SplitAdam`, by all-gather",
        ("text",),
        Of("Adam in two halves", 0.01),
        Of("error feedback, Adam behind it", 0.01),
    ),
    Advice(
        "error feedback off?",
        "never below 10 %",
        ("mnist", "text"),
        Of("error feedback", 0.01),
        Of("no error feedback", 0.01),
    ),
    Advice(
        "SGD without momentum, Nesterov, RMSprop, 1 %",
        "plain error feedback, the default",
        ("sgd", "nesterov", "rmsprop"),
        Of("error feedback", 0.01),
    ),
    Advice(
        "2 workers, 1 %",
        "the default: both ways are one",
        ("fashion_2",),
        Of("error feedback", 0.01),
    ),
    Advice(
        "8 workers, 1 %, accuracy before bytes",
        "`--collective allgather`",
        ("fashion_8",),
        Of("error feedback, all-gather", 0.01),
        Of("error feedback", 0.01),
    ),
    Advice(
        "8 workers, 0.1 %",
        "`--collective allgather`",
        ("fashion_8",),
        Of("error feedback, all-gather", 0.001),
        Of("error feedback", 0.001),
    ),
)


def table(rows: Sequence[Row], tasks: Mapping[str, Task]) -> str:
    """A line an advice, for which anything was measured; empty without any."""
    found = {name: results(rows, name, tasks[name]) for name in {n for each in GUIDE for n in each.tasks}}
    lines = []
    for advice in GUIDE:
        this, other, name = _figures(advice.this, advice.tasks, found, tasks), "", ""
        if advice.instead is not None:
            name = f"{advice.instead.method}, {advice.instead.ratio:.1%}"
            other = _figures(advice.instead, advice.tasks, found, tasks)
        if this and (other or advice.instead is None):
            lines.append([advice.case, advice.take, this, name, other])
    return markdown(("case", "take", "against dense", "and not", "against dense"), lines)


def _figures(
    of: Of, names: Sequence[str], found: Mapping[str, Sequence[Result]], tasks: Mapping[str, Task]
) -> str:
    """How far from dense on each of the tasks where it was measured."""
    words = []
    for name in names:
        mine = next((e for e in found[name] if (e.method, e.ratio) == (of.on(tasks[name]), of.ratio)), None)
        dense = dense_of(found[name])
        if mine is not None and dense is not None:
            words.append(f"{name} {distance(mine, found[name], tasks[name])}, {share(mine, dense)} sent")
    return "; ".join(words)
