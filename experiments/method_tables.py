"""What came of experiments/methods.py: its tables in docs/methods.md, and its picture. Partial results do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import method_guide
from method_plan import DENSE, OPTIMIZERS, SEEDS, TUNE, WORKERS, Row, Task, chosen, rates
from method_results import (
    Result,
    by_accuracy,
    default,
    dense_of,
    distance,
    gap,
    markdown,
    results,
    score,
    share,
)
from pages import fill

PAGE = "docs/methods.md"
WHOLE = ("mnist", "fashion", "fashion_adamw", "text", "cifar10")
"""Tasks with a table and a panel of their own."""
BESIDE = (
    "error feedback",
    "DGC, no warm-up",
    "error feedback, Adam behind it",
    "Adam in two halves",
    "two halves, momentum",
    "two halves, momentum, frozen",
    "EF21-SGDM",
)
"""Methods that are shown optimizer by optimizer."""
ALIKE = 1.25
"""How much more than the task's plain method another may send and still be compared with it at one ratio."""
COMMAND = "torchrun --standalone --nproc-per-node 4 experiments/methods.py --data-dir data"


class Aim(NamedTuple):
    """How many points below dense a method, None for the best of all, may be."""

    task: str
    method: str | None
    ratio: float
    points: float


AIMS = (
    Aim("mnist", "error feedback", 0.01, 0.1),
    Aim("mnist", None, 0.001, 0.5),
    Aim("fashion", "error feedback", 0.01, 0.6),
    Aim("fashion", None, 0.001, 2.0),
    Aim("fashion_adamw", None, 0.01, 1.0),
)


def table(rows: Sequence[Row], name: str, task: Task) -> str:
    """A line a method and ratio; empty without any run."""
    found = results(rows, name, task)
    dense = dense_of(found)
    head = ("method", "ratio", "learning rate", "accuracy, %" if by_accuracy(task) else "loss")
    return markdown(
        (*head, "against dense", "sent"),
        [
            [
                *(each.method, "" if each.ratio == 1 else f"{each.ratio:.1%}", f"{each.lr:g}"),
                *(
                    score(each, task),
                    "" if each is dense else distance(each, found, task),
                    share(each, dense),
                ),
            ]
            for each in found
        ],
    )


def best_of(found: Sequence[Result], task: Task, ratio: float) -> Result | None:
    """The method that scored best at ``ratio``; one that failed with some seed, or sent more, is not it."""
    able = [each for each in found if each.ratio == ratio < 1 and not each.failed]
    plain = next((each.sent for each in able if each.method == default(task)), math.inf)
    able = [each for each in able if not each.sent > ALIKE * plain]
    pick = max if by_accuracy(task) else min
    return pick(able, key=lambda each: each.mean, default=None)


def best(rows: Sequence[Row], tasks: Mapping[str, Task]) -> str:
    """For each task and ratio the best method that sends about as much, beside the plain one."""
    lines = []
    for name in WHOLE:
        task = tasks[name]
        found = results(rows, name, task)
        dense = dense_of(found)
        for ratio in task.ratios:
            first = best_of(found, task, ratio)
            if first is None:
                continue
            usual = next((e for e in found if e.ratio == ratio and e.method == default(task)), None)
            lines.append(
                [
                    *(name, f"{ratio:.1%}", first.method, score(first, task), distance(first, found, task)),
                    *(share(first, dense), "-" if usual is None else distance(usual, found, task)),
                ]
            )
    head = (
        "task",
        "ratio",
        "best method",
        "its score",
        "against dense",
        "sent",
        "the plain method against dense",
    )
    return markdown(head, lines)


def by_workers(rows: Sequence[Row], tasks: Mapping[str, Task]) -> str:
    """A line a method and ratio, a column a number of workers."""
    columns = {name: results(rows, name, tasks[name]) for name in WORKERS}
    lines = []
    for method in tasks[WORKERS[0]].methods:
        for ratio in tasks[WORKERS[0]].ratios_of(method):
            cells = []
            for name, found in columns.items():
                each = next((e for e in found if (e.method, e.ratio) == (method, ratio)), None)
                text = "-" if each is None else score(each, tasks[name])
                if each is not None and each.method != DENSE:
                    text += f", {gap(each, dense_of(found), tasks[name])}"
                cells.append(text)
            if set(cells) != {"-"}:
                lines.append([method, "" if ratio == 1 else f"{ratio:.1%}", *cells])
    return markdown(("method", "ratio", *(f"{tasks[name].workers} workers" for name in WORKERS)), lines)


def by_optimizer(rows: Sequence[Row], tasks: Mapping[str, Task]) -> str:
    """At 1 %, a line an optimizer and where it stands."""
    lines = []
    for name in OPTIMIZERS:
        task = tasks[name]
        found = results(rows, name, task)
        dense = dense_of(found)
        kind, flags = task.flags.get("optimizer", "sgd"), task.flags
        momentum = flags.get("momentum", 0.9)
        title = f"{kind}, momentum {momentum:g}" if kind == "sgd" and momentum else kind
        title += ", Nesterov" if flags.get("nesterov") else ""
        for each in found:
            if each.ratio == 0.01 and dense is not None and each.method in BESIDE:
                lines.append(
                    [title, score(dense, task), each.method, score(each, task), distance(each, found, task)]
                )
    return markdown(("optimizer", "dense", "compressed to 1 %", "accuracy, %", "against dense"), lines)


def aims(rows: Sequence[Row], tasks: Mapping[str, Task]) -> str:
    """What was to be reached, and whether it was."""
    lines = []
    for aim in AIMS:
        task = tasks[aim.task]
        found = results(rows, aim.task, task)
        mine = [each for each in found if each.ratio == aim.ratio and each.method == aim.method]
        each = best_of(found, task, aim.ratio) if aim.method is None else next(iter(mine), None)
        dense = dense_of(found)
        if each is None or dense is None:
            continue
        reached = each.mean >= dense.mean - aim.points  # False for NaN
        complete = min(each.runs, dense.runs) >= len(SEEDS)
        lines.append(
            [
                *(aim.task, f"{aim.ratio:.1%}", each.method + (" (best)" if aim.method is None else "")),
                *(f"-{aim.points:g} points", distance(each, found, task)),
                ("yes" if reached else "no") if complete else "not all runs are there",
            ]
        )
    return markdown(("task", "ratio", "method", "aim", "measured", "reached"), lines)


def by_rate(rows: Sequence[Row], tasks: Mapping[str, Task]) -> str:
    """Which learning rates were tried, and who chose one at an end: beyond it, it might have done better."""
    lines = []
    for name, task in tasks.items():
        seeds: dict[str, set[str]] = {}
        for row in rows:
            if (row["task"], row["purpose"]) == (name, TUNE):
                seeds.setdefault(row["method"], set()).add(str(row["seed"]))
        tuned = [each for each in task.methods if each in seeds]
        if not tuned:
            continue
        ends = []
        for end in (min, max):
            here = [e for e in tuned if chosen(rows, name, e) == end(rates(task, task.methods[e]))]
            ends.append(_who(here, tuned))
        fewest = min(map(len, seeds.values()))
        lines.append([name, ", ".join(f"{rate:g}" for rate in task.rates), str(fewest), *ends])
    return markdown(("task", "rates tried", "seeds", "chose the smallest", "chose the largest"), lines)


def _who(some: Sequence[str], every: Sequence[str]) -> str:
    """``some`` in as few words as there are."""
    if len(some) <= len(every) / 2:
        return "; ".join(some) or "none"
    others = "; ".join(each for each in every if each not in some)
    return f"all but {others}" if others else "all"


def parts(rows: Sequence[Row], tasks: Mapping[str, Task], picture: str = "") -> Iterator[tuple[str, str]]:
    """Mark and what belongs there; ``picture`` is its address seen from the page."""
    missing = markdown((" ",), [[f"not measured yet: `{COMMAND}`"]])
    yield "methods-picture", f"![accuracy or loss against bytes sent, by task]({picture})" if picture else ""
    for name in WHOLE:
        yield f"methods-{name}", table(rows, name, tasks[name]) or missing
    yield "methods-rates", by_rate(rows, tasks) or missing
    yield "methods-optimizers", by_optimizer(rows, tasks) or missing
    yield "methods-workers", by_workers(rows, tasks) or missing
    yield "methods-aims", aims(rows, tasks) or missing
    yield "methods-best", best(rows, tasks) or missing
    yield "methods-guide", method_guide.table(rows, tasks) or missing


def write(rows: Sequence[Row], tasks: Mapping[str, Task], out: Path) -> None:
    """The picture beside the CSV ``out``, and every table into the page."""
    picture = out.with_suffix(".png")
    drawn = plot(rows, tasks, picture)
    for mark, text in parts(rows, tasks, f"../results/{picture.name}" if drawn else ""):
        fill(PAGE, mark, text)


def plot(rows: Sequence[Row], tasks: Mapping[str, Task], path: Path) -> bool:
    """Accuracy, or loss, against bytes: a panel a task, a line a method. False: there is nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found_in = {name: results(rows, name, tasks[name]) for name in WHOLE}
    panels = {
        name: shown
        for name, found in found_in.items()
        if (shown := [each for each in found if not math.isnan(each.mean + each.sent)])
    }
    if not panels:
        return False
    width = min(3, len(panels) + 1)  # a place more, for the legend
    height = -(-(len(panels) + 1) // width)
    figure, axes = plt.subplots(
        height, width, figsize=(5.2 * width, 4.6 * height), squeeze=False, layout="constrained"
    )
    for panel in axes.flat[len(panels) :]:
        panel.axis("off")
    every = dict.fromkeys(each.method for found in panels.values() for each in found)
    styles = {method: i for i, method in enumerate(every)}
    handles: dict[str, Any] = {}
    for panel, (name, found) in zip(axes.flat, panels.items(), strict=False):
        accuracy = by_accuracy(tasks[name])
        bottom, top = _seen(sorted(each.mean for each in found), accuracy)
        for method in dict.fromkeys(each.method for each in found):
            mine = sorted((each for each in found if each.method == method), key=lambda each: each.sent)
            i = styles[method]  # a method looks alike in all panels
            handles[method] = panel.errorbar(
                [each.sent / 1e6 for each in mine],
                [each.mean for each in mine],
                # A bar across the whole panel says no more than none.
                [each.deviation if each.deviation < top - bottom else 0.0 for each in mine],
                marker="osv^D<>"[i % 7],
                color=f"C{i % 10}",
                linestyle="-" if i < 10 else "--",
                capsize=2,
                markersize=4,
                linewidth=1,
            )
        if (dense := dense_of(found)) is not None:
            panel.axhline(dense.mean, color="black", linewidth=0.6, linestyle=":")
        panel.set(xscale="log", xlabel="sent by one worker, MB", title=name)
        panel.set_ylabel("test accuracy, %" if accuracy else "test loss")
        panel.set_ylim(bottom, top)
    axes.flat[-1].legend(handles.values(), handles.keys(), fontsize=9, loc="center", ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _seen(scores: Sequence[float], accuracy: bool) -> tuple[float, float]:
    """From where to where a panel goes: what failed wholly would hide all differences."""
    if accuracy:
        bottom, top = max(scores[len(scores) // 4] - 5, scores[0]), scores[-1]
    else:
        bottom, top = scores[0], min(scores[3 * len(scores) // 4] * 1.15, scores[-1])
    room = 0.08 * (top - bottom) or 0.1
    return bottom - room, top + room
