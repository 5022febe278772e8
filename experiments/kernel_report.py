"""What the rows of benchmark_compression.py say: a book of them, the targets, the tables and the picture."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

RATIOS = (0.1, 0.01, 0.001)
THREADS = (1, 2)
MESSAGES = 8
PASS = "add_ (one pass)"
MOVED = {PASS: 12, "read": 4, "copy_": 8, "zero_": 4}
"""Bytes an element that the memory moves."""
TAKES = {
    "naive torch": "torch, as usually written",
    "torch.topk": "torch.topk alone",
    "reference": "kernels.reference",
    "native baseline": "native, without SIMD",
    "select": "select alone",
    "take_ in place": "take_, in place",
    "native 4 shards": "native, 4 shards",
    "take_ out=": "take_, with out=",
    "native": "native (in training)",
    "native exact=False": "native, exact=False",
}
"""Ways to select, and what the picture calls them."""

Row = dict[str, Any]


class Book:
    """All rows, by what they are about."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = {
            (row["method"], row["distribution"], row["elements"], row["ratio"], row["threads"]): row
            for row in rows
        }
        self.sizes = sorted({row["elements"] for row in rows})
        self.machine = "; ".join(dict.fromkeys(row["machine"] for row in rows))

    @classmethod
    def read(cls, path: Path) -> Book:
        """The rows of a CSV file that the benchmark wrote."""
        with path.open(newline="") as file:
            rows: list[Row] = list(csv.DictReader(file))
        kinds = {"elements": int, "ratio": float, "threads": int}
        return cls([row | {name: kind(row[name]) for name, kind in kinds.items()} for row in rows])

    def row(
        self, method: str, ratio: float, n: int = 0, *, kind: str = "gaussian", threads: int = 1
    ) -> dict[str, Any]:
        """``n`` is the largest size if it is left out."""
        return self._rows[method, kind, n or self.sizes[-1], ratio, threads]

    def ms(self, *about: Any, **more: Any) -> float:
        return float(self.row(*about, **more)["best_ms"])

    def passes(self, *about: Any, **more: Any) -> float:
        return float(self.row(*about, **more)["passes"])


def print_memory(book: Book) -> None:
    print("\nmemory: GB/s, best\n")
    print(f"| elements | threads | {' | '.join(MOVED)} |\n|---|---|{'---|' * len(MOVED)}")
    for n in book.sizes:
        for threads in THREADS:
            speeds = [book.row(name, 0.01, n, threads=threads)["gb_per_s"] for name in MOVED]
            print(f"| {n:,} | {threads} | {' | '.join(speeds)} |")


class Target(NamedTuple):
    """What was aimed at, what was measured, and whether that is enough (judged before it is rounded)."""

    what: str
    aim: str
    measured: str
    reached: bool


KINDS = ("gaussian", "heavy", "real")


def of_kinds(figures: list[float]) -> str:
    return ", ".join(f"{figure:.2f} {kind}" for figure, kind in zip(figures, KINDS, strict=True))


def targets(book: Book) -> Iterator[Target]:
    """In the largest size with one thread, unless it says otherwise."""
    takes = {
        "native": "native take",
        "take_ out=": "`take_` with `out=`",
        "take_ in place": "`take_` in place",
    }
    for method, title in takes.items():
        for ratio, most in ((0.01, 1.5), (0.001, 1.3), (0.1, 2.2)):
            found = [book.passes(method, ratio, kind=kind) for kind in KINDS]
            yield Target(
                f"{title} at {ratio}, passes", f"at most {most}", of_kinds(found), max(found) <= most
            )
    take = book.ms("native", 0.01)
    found = [
        book.ms("native", 0.01, kind=kind) / book.ms("native", 0.01, kind=kind, threads=2) for kind in KINDS
    ]
    own = book.ms(PASS, 0.01) / book.ms(PASS, 0.01, threads=2)
    cell = f"{of_kinds(found)} (`add_` itself: {own:.2f} gaussian)"
    yield Target("native take at 0.01, 2 threads against 1", "at least 1.4", cell, min(found) >= 1.4)
    naive = book.ms("naive torch", 0.01)
    cell = f"{naive / take:.1f} (one pass would be {naive / book.ms(PASS, 0.01):.1f})"
    yield Target("naive torch / native take at 0.01", "at least 60", cell, naive / take >= 60)
    yield from codec_targets(book, take)
    small = book.row("take_ out=", 0.01, 25_000)
    best, median = (float(small[name]) * 1e3 for name in ("best_ms", "median_ms"))
    what = "`take_` of 25,000 elements at 0.01, microseconds"
    yield Target(what, "below 60", f"{best:.0f} (median {median:.0f})", best < 60)


def codec_targets(book: Book, take: float) -> Iterator[Target]:
    """About messages; ``take`` is the time of a selection in milliseconds."""
    encode, all_ = book.ms("encode", 0.01), book.ms(f"zero, decode, add {MESSAGES}", 0.01)
    share = (encode + all_ / MESSAGES) / take
    what = f"(encode + decode and add one message of {MESSAGES}, zeros included) / take at 0.01"
    yield Target(what, "at most 0.25", f"{share:.2f}", share <= 0.25)
    bound = 1.5 * book.ms("zero_", 0.01) + 0.5 * book.ms(PASS, 0.01)
    what = f"zero, decode and add {MESSAGES} messages at 0.01, ms"
    yield Target(what, f"at most {bound:.1f} (1.5 `zero_` + 0.5 `add_`)", f"{all_:.1f}", all_ <= bound)
    for ratio, most in ((0.01, 8.7), (0.001, 12.1)):
        row = book.row("encode", ratio)
        cell = f"{row['index_bits']} (least possible: {row['entropy_bits']})"
        yield Target(
            f"index bits an entry at {ratio}", f"at most {most}", cell, float(row["index_bits"]) <= most
        )


def targets_table(book: Book) -> str:
    """The targets as a table, under the machine's name."""
    lines = [
        f"| {book.machine}: {book.sizes[-1]:,} elements, one thread | target | measured | |",
        "|---|---|---|---|",
    ]
    for what, aim, measured, reached in targets(book):
        lines.append(f"| {what} | {aim} | {measured} | {'reached' if reached else '**missed**'} |")
    return "\n".join(lines)


def draw(book: Book, path: Path) -> None:
    """Passes by method in the largest size, and by size for two methods."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter

    colours = dict(zip(RATIOS, ("#1f4e79", "#2a9d8f", "#e9a23b"), strict=True))
    red, styles = "#c0392b", {"reference": "o--", "native": "s-"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6.8), width_ratios=(3, 2), layout="constrained")
    height = 0.27
    for at, ratio in enumerate(RATIOS):
        places = [height * (at - 1) + i for i in range(len(TAKES))]
        passes = [book.passes(name, ratio) for name in TAKES]
        bars = left.barh(places, passes, height, color=colours[ratio], label=f"ratio {ratio:g}")
        labels = [f"{value:.0f}" if value >= 10 else f"{value:.2f}" for value in passes]
        left.bar_label(bars, labels, padding=3, fontsize=8)
    left.set_yticks(range(len(TAKES)), list(TAKES.values()))
    left.set_ylim(len(TAKES) - 0.5, -0.5)
    left.set_xscale("log")
    left.set_xlim(0.7, 2 * max(book.passes(name, ratio) for name in TAKES for ratio in RATIOS))
    left.set_xlabel("passes over memory")
    left.set_title(f"{book.sizes[-1] / 1e6:g} million elements", fontsize=11)
    left.legend(loc="lower right", frameon=False)

    for ratio in RATIOS:
        for name, style in styles.items():
            passes = [book.passes(name, ratio, n) for n in book.sizes]
            right.plot(book.sizes, passes, style, color=colours[ratio], markersize=5)
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xticks(book.sizes, [f"{n / 1e6:.3g} M" if n >= 1e6 else f"{n // 1000} k" for n in book.sizes])
    right.xaxis.set_minor_formatter(NullFormatter())
    right.set_ylim(0.7)
    right.set_xlabel("elements")
    right.set_ylabel("passes over memory")
    right.set_title("By size", fontsize=11)
    for ratio in RATIOS:
        right.plot([], [], color=colours[ratio], linewidth=5, label=f"ratio {ratio:g}")
    for name, style in styles.items():
        right.plot([], [], style, color="#444444", markersize=5, label=TAKES[name])
    right.legend(frameon=False, fontsize=8.5)

    left.axvline(1, color=red, linewidth=1.3)
    right.axhline(1, color=red, linewidth=1.3)
    for axis in (left.xaxis, right.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="both" if axes is right else "x", color="#e2e2e2", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.suptitle(
        "Top-K with error feedback: time in passes over memory\n"
        "Red: one pass, residual.add_(gradient). Gaussian data, one thread, best of all calls.",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
