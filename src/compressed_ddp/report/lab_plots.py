"""Pictures of what the lab measured: step times by method, and bytes by number of hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .figures import (
    PLAIN,
    SHOWN,
    Setting,
    by_rate,
    good,
    is_ours,
    median,
    millions,
    of,
    sent,
    settings,
    title,
    whole_model,
)
from .sources import Table
from .style import INK, PHASES, family_colour, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHORT = ("none", "ours-allgather-int8", "ours-sharded-int8")
"""Their bars are but a few points wide where plain DDP's is beside them."""
WORK = ("select", "encode", "wait", "decode")


def step_times(table: Table) -> Figure | None:
    """For each rate: emulated compute and what comes on top of it, with what the worker thread did under it.

    Below, those of ours that are short beside the others once more, and the floor, at a scale of their own.
    """
    rows = good(table.rows)
    panels = by_rate(rows) if rows else []
    methods = [name for name in SHOWN if any(row["method"] == name for row in rows)]
    if not panels or not methods:
        return None
    short = [name for name in methods if name in SHORT]
    parts = [methods, short] if set(short) - {"none"} else [methods]
    figure = new_figure(4.4 + 2.9 * len(panels), 0.5 + sum(1.0 + 0.46 * len(part) for part in parts))
    heights = [len(part) + 0.2 for part in parts]
    every = figure.subplots(len(parts), len(panels), sharey="row", squeeze=False, height_ratios=heights)
    for line, part in zip(every, parts, strict=True):
        for axes, setting in zip(line, panels, strict=True):
            _bars(axes, rows, setting, part)
            what = "" if part is methods else ": ours alone"
            axes.set_title(f"{setting.rate}, {setting.hosts} hosts{what}")
        line[0].set_yticks(range(len(part)), [title(name) for name in part])
        line[0].set_ylim(len(part) - 0.4, -0.6)
        for label, method in zip(line[0].get_yticklabels(), part, strict=True):
            label.set_fontweight("bold" if is_ours(method) else "normal")
    for axes in every[-1]:
        axes.set_xlabel("milliseconds a step")
    names = {"compute": "compute (emulated)", "exposed": "what the method adds to it"}
    figure.legend(
        handles=[_patch(PHASES[name], names.get(name, f"{name}, beside compute")) for name in PHASES],
        loc="outside lower center",
        ncols=3,
    )
    return figure


def _bars(axes: Any, rows: list[dict[str, Any]], setting: Setting, methods: list[str]) -> None:
    """The steps of ``methods`` in a setting, from zero to the longest of them."""
    longest = 0.0
    for at, method in enumerate(methods):
        mine = of(rows, setting, method)
        ms = median(mine, "step_ms")
        if ms is None:
            axes.text(0, at, " not measured", va="center", fontsize=8, style="italic")
            continue
        compute = min(setting.compute_ms, ms)
        axes.barh(at - 0.13, compute, 0.42, color=PHASES["compute"])
        axes.barh(at - 0.13, ms - compute, 0.42, left=compute, color=PHASES["exposed"])
        axes.text(ms, at - 0.13, f" {ms:,.0f}", va="center", fontsize=8.5, color=INK)
        _thread(axes, mine, at + 0.24)
        longest = max(longest, ms)
    axes.set_xlim(0, 1.16 * (longest or 1))
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _thread(axes: Any, rows: list[dict[str, Any]], at: float) -> None:
    """What the thread that synchronises was busy with in the same time."""
    left = 0.0
    for phase in WORK:
        width = median(rows, f"{phase}_ms") or 0.0
        axes.barh(at, width, 0.16, left=left, color=PHASES[phase])
        left += width


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


MARKS = {
    PLAIN: "o",
    "fp16": "v",
    "writeup-dense": "x",
    "writeup-sparse": "D",
    "powersgd-1": "^",
    "ours-allgather-int8": "s",
    "ours-sharded-int8": "P",
}


def bytes_by_hosts(table: Table) -> Figure | None:
    """What a host sends in a step, by number of hosts; the whole model at one rate, medians of repeats."""
    rows, hosts = whole_model(table.rows)
    if not rows:
        return None
    figure = new_figure(8.6, 4.4)
    axes = figure.subplots()
    for method, mark in MARKS.items():
        found = {n: sent([r for r in rows if r["method"] == method and r["hosts"] == n]) for n in hosts}
        points = {n: value / 1e6 for n, value in found.items() if value}
        if not points:
            continue
        style = "--" if method == "ours-allgather-int8" else ":" if method == "writeup-dense" else "-"
        axes.plot(
            list(points),
            list(points.values()),
            style,
            marker=mark,
            # Two pairs of lines lie on each other: what is drawn first must be seen around the other.
            markersize={"powersgd-1": 13, "writeup-dense": 11}.get(method, 7 if is_ours(method) else 5),
            markerfacecolor="none" if method == "powersgd-1" else None,
            linewidth=2.2 if is_ours(method) else 1.3,
            color=family_colour(method),
            label=title(method),
        )
    if not axes.lines:
        return None
    axes.set_xscale("log", base=2)
    axes.set_xticks(hosts, [str(n) for n in hosts])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="hosts", ylabel="MB sent by a host in a step")
    rate = settings(rows)[0].rate
    axes.set_title(f"{rows[0]['model']}, {millions(rows[0]['elements'])} elements, {rate}")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure
