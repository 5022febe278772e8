"""What came of experiments/methods.py: its tables in docs/methods.md, and its picture. Partial results do."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pages import fill

if TYPE_CHECKING:
    from methods import Row, Task

PAGE, SEEDS, TEST = "docs/methods.md", 3, "test"
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


class Result(NamedTuple):
    """The runs of one method at one ratio."""

    method: str
    ratio: float
    lr: float
    mean: float
    """NaN where every run failed; so is what was sent."""
    deviation: float
    sent: float
    """Bytes of one worker, at its sockets."""
    runs: int
    failed: int


def results(rows: Sequence[Row], name: str, task: Task) -> list[Result]:
    """Means over seeds, in the plan's order; dense first."""
    found = []
    for method_name, method in task.methods.items():
        for ratio in (1.0,) if method.dense else task.ratios:
            mine = [
                row
                for row in rows
                if (row["task"], row["method"], row["purpose"]) == (name, method_name, TEST)
                and float(row["ratio"]) == ratio
            ]
            if not mine:
                continue
            good = [row for row in mine if not row["failed"]]
            scores = [float(row[task.score]) for row in good] or [math.nan]
            sent = [float(row["socket_sent"]) for row in good if row["socket_sent"]] or [math.nan]
            deviation = statistics.stdev(scores) if len(scores) > 1 else math.nan
            found.append(
                Result(
                    *(method_name, ratio, float(mine[0]["lr"])),
                    *(statistics.fmean(scores), deviation, statistics.fmean(sent)),
                    *(len(good), len(mine) - len(good)),
                )
            )
    return found


def by_accuracy(task: Task) -> bool:
    return task.score == "test_accuracy"


def score(each: Result, task: Task) -> str:
    """Mean and deviation; in brackets what is missing to three good runs."""
    digits = 2 if by_accuracy(task) else 4
    notes = [f"{each.failed} diverged"] if each.failed else []
    notes += [f"{each.runs + each.failed} of {SEEDS} runs"] if each.runs + each.failed < SEEDS else []
    text = "-" if math.isnan(each.mean) else f"{each.mean:.{digits}f}"
    text += "" if math.isnan(each.deviation) else f" ± {each.deviation:.{digits}f}"
    return f"{text} ({', '.join(notes)})" if notes else text


def gap(each: Result, dense: Result | None, task: Task) -> str:
    """How far from dense."""
    if dense is None or math.isnan(each.mean - dense.mean):
        return "-"
    if by_accuracy(task):
        return f"{each.mean - dense.mean:+.2f} points"
    return f"{each.mean / dense.mean - 1:+.2%}"


def share(each: Result, dense: Result | None) -> str:
    """What was sent, as a share of dense."""
    return "-" if dense is None or math.isnan(each.sent / dense.sent) else f"{each.sent / dense.sent:.2%}"


def dense_of(found: Sequence[Result]) -> Result | None:
    return next((each for each in found if each.method == "dense"), None)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines)) if lines else ""


def table(rows: Sequence[Row], name: str, task: Task) -> str:
    """A line a method and ratio; empty without any run."""
    found = results(rows, name, task)
    dense = dense_of(found)
    head = ("method", "ratio", "learning rate", "accuracy, %" if by_accuracy(task) else "loss")
    return markdown(
        (*head, "against dense", "sent"),
        [
            [
                *(each.method, "" if each is dense else f"{each.ratio:.1%}", f"{each.lr:g}"),
                *(score(each, task), "" if each is dense else gap(each, dense, task), share(each, dense)),
            ]
            for each in found
        ],
    )


def best_of(found: Sequence[Result], task: Task, ratio: float) -> Result | None:
    """The method that scored best at ``ratio``; one that failed with some seed is not it."""
    able = [each for each in found if each.ratio == ratio and each.method != "dense" and not each.failed]
    pick = max if by_accuracy(task) else min
    return pick(able, key=lambda each: each.mean, default=None)


def best(rows: Sequence[Row], tasks: Mapping[str, Task]) -> str:
    """For each task and ratio the best method, beside what the application does by itself."""
    lines = []
    for name, task in tasks.items():
        found = results(rows, name, task)
        dense = dense_of(found)
        for ratio in task.ratios:
            first = best_of(found, task, ratio)
            if first is None:
                continue
            usual = next((e for e in found if e.ratio == ratio and e.method == default(task)), None)
            lines.append(
                [
                    *(name, f"{ratio:.1%}", first.method, score(first, task), gap(first, dense, task)),
                    *(share(first, dense), "-" if usual is None else gap(usual, dense, task)),
                ]
            )
    head = ("task", "ratio", "best method", "its score", "against dense", "sent", "the default against dense")
    return markdown(head, lines)


def default(task: Task) -> str:
    """The method that has no settings but ``compress``: what the application does when it is not asked."""
    return next(name for name, each in task.methods.items() if each.flags == {"compress": True})


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
        complete = min(each.runs, dense.runs) >= SEEDS
        lines.append(
            [
                *(aim.task, f"{aim.ratio:.1%}", each.method + (" (best)" if aim.method is None else "")),
                *(f"-{aim.points:g} points", gap(each, dense, task)),
                ("yes" if reached else "no") if complete else "not all runs are there",
            ]
        )
    return markdown(("task", "ratio", "method", "aim", "measured", "reached"), lines)


def parts(rows: Sequence[Row], tasks: Mapping[str, Task], picture: str = "") -> Iterator[tuple[str, str]]:
    """Mark and what belongs there; ``picture`` is its address seen from the page."""
    missing = markdown((" ",), [[f"not measured yet: `{COMMAND}`"]])
    yield "methods-picture", f"![accuracy or loss against bytes sent, by task]({picture})" if picture else ""
    for name, task in tasks.items():
        yield f"methods-{name}", table(rows, name, task) or missing
    yield "methods-aims", aims(rows, tasks) or missing
    yield "methods-best", best(rows, tasks) or missing


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

    panels = {
        name: shown
        for name, task in tasks.items()
        if (shown := [each for each in results(rows, name, task) if not math.isnan(each.mean + each.sent)])
    }
    if not panels:
        return False
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5.2 * len(panels), 4.6), squeeze=False, layout="constrained"
    )
    every = dict.fromkeys(each.method for found in panels.values() for each in found)
    styles = {method: i for i, method in enumerate(every)}
    handles: dict[str, Any] = {}
    for panel, (name, found) in zip(axes[0], panels.items(), strict=True):
        accuracy = by_accuracy(tasks[name])
        for method in dict.fromkeys(each.method for each in found):
            mine = sorted((each for each in found if each.method == method), key=lambda each: each.sent)
            i = styles[method]  # a method looks alike in all panels
            handles[method] = panel.errorbar(
                [each.sent / 1e6 for each in mine],
                [each.mean for each in mine],
                [0.0 if math.isnan(each.deviation) else each.deviation for each in mine],
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
        values = sorted(each.mean for each in found)  # what failed wholly would hide all differences
        if accuracy:
            panel.set_ylim(bottom=max(values[len(values) // 4] - 3, values[0] - 0.3))
        else:
            panel.set_ylim(top=min(values[3 * len(values) // 4] * 1.15, values[-1] * 1.02))
    axes[0][-1].legend(
        handles.values(), handles.keys(), fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1)
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
