"""The runs of the comparison of methods as means over seeds, and how these are written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from method_plan import ACCURACY, DENSE, DENSE_CLIPPED, SEEDS, TEST, Row, Task, chosen


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
    for method_name in task.methods:
        lr = chosen(rows, name, method_name)
        for ratio in task.ratios_of(method_name):
            mine = [
                row
                for row in rows
                if (row["task"], row["method"], row["purpose"]) == (name, method_name, TEST)
                and (float(row["ratio"]), float(row["lr"])) == (ratio, lr)
            ]
            if not mine:
                continue
            good = [row for row in mine if not row["failed"]]
            scores = [float(row[task.score]) for row in good] or [math.nan]
            sent = [float(row["socket_sent"]) for row in good if row["socket_sent"]] or [math.nan]
            deviation = statistics.stdev(scores) if len(scores) > 1 else math.nan
            found.append(
                Result(
                    *(method_name, ratio, lr),
                    *(statistics.fmean(scores), deviation, statistics.fmean(sent)),
                    *(len(good), len(mine) - len(good)),
                )
            )
    return found


def by_accuracy(task: Task) -> bool:
    return task.score == ACCURACY


def score(each: Result, task: Task) -> str:
    """Mean and deviation; in brackets what is missing to three good runs."""
    digits = 2 if by_accuracy(task) else 4
    notes = [f"{each.failed} diverged"] if each.failed else []
    runs = each.runs + each.failed
    notes += [f"{runs} of {len(SEEDS)} runs"] if runs < len(SEEDS) else []
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


def distance(each: Result, found: Sequence[Result], task: Task) -> str:
    """How far from dense; a method that clips also, in brackets, from dense that is clipped too."""
    text = gap(each, dense_of(found), task)
    alike = next((other for other in found if other.method == DENSE_CLIPPED), None)
    if alike is None or each is alike or not task.methods[each.method].clips:
        return text
    return f"{text} ({gap(each, alike, task)})"


def share(each: Result, dense: Result | None) -> str:
    """What was sent, as a share of dense."""
    return "-" if dense is None or math.isnan(each.sent / dense.sent) else f"{each.sent / dense.sent:.2%}"


def dense_of(found: Sequence[Result]) -> Result | None:
    return next((each for each in found if each.method == DENSE), None)


def default(task: Task) -> str:
    """The task's plain method: no settings but ``compress`` beside those of the task."""
    return next(name for name, each in task.methods.items() if each.flags == {"compress": True})


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines)) if lines else ""
