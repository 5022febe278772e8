"""Pictures of trainings, of kernels and of the cost model."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from .figures import is_ours, millions, rate_title, ratio_title, title
from .sources import Row, Table
from .style import FAMILIES, INK, PHASES, SERIES, SOFT, new_figure
from .tables import KERNELS, is_held_out, tests_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOF = "add_ (one pass)"
BREAK_EVEN = "#111518"  # on colours that stay light on dark paper too


def accuracy(table: Table) -> Figure | None:
    """Test accuracy against bytes sent by a worker in the whole training; faint: single seeds."""
    rows = [row for row in tests_of(table.rows) if row["accuracy"] is not None and row["sent"]]
    panels = list(dict.fromkeys((row["dataset"], row["model"]) for row in rows))
    if not panels:
        return None
    figure = new_figure(0.8 + 4.2 * len(panels), 3.9)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        mine = [row for row in rows if (row["dataset"], row["model"]) == panel]
        for at, ratio in enumerate(sorted({row["ratio"] for row in mine}, reverse=True)):
            runs = [row for row in mine if row["ratio"] == ratio]
            colour = SERIES[at % len(SERIES)]
            axes.scatter(
                [r["sent"] / 1e6 for r in runs], [r["accuracy"] for r in runs], 14, colour, alpha=0.45
            )
            x = statistics.fmean(row["sent"] / 1e6 for row in runs)
            y = statistics.fmean(row["accuracy"] for row in runs)
            axes.plot([x], [y], "o", markersize=9, color=colour)
            axes.annotate(
                f"{ratio_title(ratio)}\n{y:.2f} %",
                (x, y),
                textcoords="offset points",
                xytext=(9, 0),
                va="center",
                fontsize=8.5,
                color=INK,
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.margins(x=0.3)
        scores = [row["accuracy"] for row in mine]
        room = max(0.5, max(scores) - min(scores))
        axes.set_ylim(min(scores) - 0.55 * room, max(scores) + 0.25 * room)
        axes.set_title(f"{panel[0]}, {panel[1]}")
        axes.set(xlabel="MB sent by a worker, whole training", ylabel="test accuracy, %")
    return figure


def roofline(table: Table) -> Figure | None:
    """Million elements a second by size, one panel a ratio, under the roof that memory sets."""
    rows = [row for row in table.rows if (row["distribution"], row["threads"]) == ("gaussian", 1)]
    ratios = sorted({row["ratio"] for row in rows}, reverse=True)
    if not any(row["method"] == ROOF for row in rows):
        return None
    figure = new_figure(1.2 + 3.4 * len(ratios), 4.3)
    every = figure.subplots(1, len(ratios), sharey=True, squeeze=False)[0]
    colours = dict(
        zip(
            KERNELS,
            ("#5b8db8", "#c8703d", "#8e6bb0", "#2a9d8f", "#1d6f66", "#8ab17d", "#e0a030"),
            strict=True,
        )
    )
    for axes, ratio in zip(every, ratios, strict=True):
        mine = [row for row in rows if row["ratio"] == ratio]
        sizes = sorted({row["elements"] for row in mine})
        for method in (*KERNELS, ROOF):
            speed = {
                row["elements"]: row["elements"] / row["best_ms"] / 1e3
                for row in mine
                if row["method"] == method
            }
            points = [(n, speed[n]) for n in sizes if n in speed]
            roof = method == ROOF
            if not points:
                continue
            axes.plot(
                *zip(*points, strict=True),
                "-" if roof else "o-",
                markersize=4,
                linewidth=2.4 if roof else 1.6,
                color=PHASES["exposed"] if roof else colours[method],
                label="roof: memory, one add_" if roof else KERNELS[method],
            )
            if roof:
                axes.fill_between(
                    *zip(*points, strict=True), [1e9] * len(points), color=PHASES["exposed"], alpha=0.08
                )
        axes.set_xscale("log")
        axes.set_yscale("log")
        apart = [n for n, after in zip(sizes, [*sizes[1:], math.inf], strict=True) if after > 2 * n]
        axes.set_xticks(apart, [millions(n) for n in apart], fontsize=8.5)
        axes.minorticks_off()
        axes.set_title(f"ratio {ratio_title(ratio)}")
        axes.set_xlabel("elements")
    speeds = [row["elements"] / row["best_ms"] / 1e3 for row in rows if row["method"] in (*KERNELS, ROOF)]
    every[0].set_ylim(0.6 * min(speeds), 1.8 * max(speeds))
    every[0].yaxis.set_major_formatter("{x:,.0f}")
    every[0].set_ylabel("million elements a second")
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def win_map(table: Table) -> Figure | None:
    """Where each of our methods is faster than dense, and by how much; the line is break-even."""
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    methods = [m for m in dict.fromkeys(row["method"] for row in table.rows) if is_ours(m)]
    methods = methods or list(dict.fromkeys(row["method"] for row in table.rows))
    methods = methods[:3]
    colours = LinearSegmentedColormap.from_list("gain", [FAMILIES["writeup"], "#f1efe9", FAMILIES["ours"]])
    powers = [math.log2(row["gain"]) for row in table.rows if row["gain"] > 0]
    least, most = min(-1.0, *powers), max(1.0, *powers)
    norm = TwoSlopeNorm(0, least, most)
    figure = new_figure(1.6 + 3.7 * len(methods), 4.4)
    every = figure.subplots(1, len(methods), sharey=True, squeeze=False)[0]
    mesh: Any = None
    for axes, method in zip(every, methods, strict=True):
        mine = [row for row in table.rows if row["method"] == method and row["gain"] > 0]
        rates, workers, gains = _lattice(mine)
        axes.set_xscale("log")  # before lines are labelled: whether there is room is seen on the paper
        axes.set_yscale("log", base=2)
        mesh = axes.pcolormesh(rates, workers, gains, cmap=colours, norm=norm, shading="nearest")
        if len(rates) > 1 and len(workers) > 1:
            axes.contour(rates, workers, gains, [0.0], colors=BREAK_EVEN, linewidths=2)
            for times in (2, 8):
                lines = axes.contour(
                    rates, workers, gains, [math.log2(times)], colors=BREAK_EVEN, linewidths=0.7
                )
                axes.clabel(lines, fmt=f"{times}x", fontsize=8)
        axes.grid(visible=False)
        ticks = [rate for rate in (1e7, 1e8, 1e9, 1e10, 1e11) if min(rates) <= rate <= max(rates)]
        axes.set_xticks(ticks, [rate_title(rate).replace("bit/s", "") for rate in ticks])
        axes.minorticks_off()
        axes.set_yticks(workers, [f"{n:,.0f}" for n in workers])
        axes.set_title(title(method))
        axes.set_xlabel("bit/s of a link")
    every[0].set_ylabel("workers")
    bar = figure.colorbar(mesh, ax=list(every), shrink=0.9)
    ends = [value for value in range(-12, 13) if least <= value <= most and (value % 2 == 0 or value == -1)]
    bar.set_ticks(ends, labels=[f"{2**value}" if value >= 0 else f"1/{2**-value}" for value in ends])
    bar.set_label("dense step / compressed step")
    return figure


def _lattice(rows: list[Row]) -> tuple[list[float], list[float], list[list[float]]]:
    """Rates, workers, and the logarithm of the gain; nan where there is no row."""
    rates = sorted({row["rate_bits"] for row in rows})
    workers = sorted({row["workers"] for row in rows})
    found = {(row["workers"], row["rate_bits"]): math.log2(row["gain"]) for row in rows}
    return rates, workers, [[found.get((n, rate), math.nan) for rate in rates] for n in workers]


def predictions(table: Table) -> Figure | None:
    """Predicted against measured step times."""
    figure = new_figure(7.2, 4.4)
    axes = figure.subplots()
    for wanted, mark, colour, label in (
        (False, "o", FAMILIES["torch"], "fitted on"),
        (True, "D", FAMILIES["writeup"], "held out"),
    ):
        mine = [row for row in table.rows if is_held_out(row) == wanted]
        axes.scatter(
            [row["measured_ms"] for row in mine],
            [row["predicted_ms"] for row in mine],
            marker=mark,
            s=26,
            color=colour,
            alpha=0.8,
            label=f"{label} ({len(mine)})",
        )
    values = [value for row in table.rows for value in (row["measured_ms"], row["predicted_ms"])]
    ends = [0.8 * min(values), 1.25 * max(values)]
    axes.plot(ends, ends, color=SOFT, linewidth=1)
    axes.fill_between(
        ends, [0.85 * e for e in ends], [1.15 * e for e in ends], color=SOFT, alpha=0.15, label="± 15 %"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(xlabel="measured step, ms", ylabel="predicted step, ms")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.legend()
    return figure
