"""How long selecting and packing take on a CPU, beside torch's operations and the memory's speed.

The unit is one pass: torch's own `residual.add_(gradient)`, which reads two arrays and writes one.
Nobody who keeps a residual can do with less. In every setting each method takes turns with the
unit, so that a disturbance of the machine meets both; a figure is the best of all turns (the median
is in the CSV beside it), in milliseconds and in passes. Restoring what a method overwrites is not
timed. `read` and `take_ in place`'s look at the sum use one thread however many there are.

    python experiments/benchmark_compression.py      # writes results/benchmark_compression.csv and .png
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Read when torch is loaded. Its idle threads shall sleep: where one waits in a loop on a core that
# the other needs, both lose milliseconds (the scheduler's), and every method after them does too.
os.environ["OMP_NUM_THREADS"] = "2"
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["COMPRESSED_DDP_KERNELS"] = "native"

import torch
from origin import origin
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn

from compressed_ddp.compression import TopKCompressor
from compressed_ddp.kernels import CodedEntries, _native, native, reference
from compressed_ddp.layout import BucketLayout, Partition, partition
from compressed_ddp.types import Payload, Stamp

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
COLUMNS = (
    *("kind", "method", "distribution", "elements", "ratio", "entries", "threads"),
    *("calls", "best_ms", "median_ms", "passes", "median_passes", "gb_per_s", "index_bits", "entropy_bits"),
    *("command", "commit", "version", "machine"),
)

Data = tuple[Tensor, Tensor]  # residual and gradient
Row = dict[str, Any]


class Effort(NamedTuple):
    """How often a setting's methods are called: in rounds, in each some times in a row."""

    rounds: int
    slow_rounds: int  # for methods of dozens of passes
    repeats: int = 1


EFFORT = {
    25_000: Effort(60, 30, 5),
    1_000_000: Effort(25, 6, 2),
    6_553_600: Effort(10, 3, 2),  # DDP's bucket
    10_000_000: Effort(8, 2, 2),
    25_600_000: Effort(7, 2, 2),
}
BUDGET = 20.0  # seconds after which a setting's last rounds are left out, but for the slow ones
QUICK = {4_000: Effort(2, 1), 25_000: Effort(2, 1)}


class Setting(NamedTuple):
    distribution: str
    n: int
    ratio: float


class Method(NamedTuple):
    """``run`` is timed, ``prepare`` before it is not."""

    kind: str
    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    slow: bool = False


# --- data ----------------------------------------------------------------------------------


def make(setting: Setting, hidden: int) -> Data:
    """A residual and a gradient of ``setting.n`` elements."""
    n = setting.n
    generator = torch.Generator().manual_seed(0)
    if setting.distribution == "real":
        residual, gradient = (torch.cat([x] * -(-n // x.numel())) for x in trained(setting.ratio, hidden))
        return residual[:n].clone(), gradient[:n].clone()
    residual, gradient = (torch.randn(n, generator=generator) for _ in range(2))
    if setting.distribution == "heavy":  # Student's t with two degrees of freedom
        for x in (residual, gradient):
            x /= torch.empty(n).exponential_(generator=generator).sqrt_()
    return residual, gradient


@functools.lru_cache(maxsize=1)
def trained(ratio: float, hidden: int, steps: int = 30) -> Data:
    """Of a network that was trained on digits with Top-K and error feedback: its last step's."""
    torch.manual_seed(0)
    images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    images = images.float() / 16
    layers = [nn.Linear(64, hidden), nn.ReLU()]
    layers += [layer for _ in range(2) for layer in (nn.Linear(hidden, hidden), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(hidden, 10))
    weights = list(net.parameters())
    residual = torch.zeros(sum(weight.numel() for weight in weights))
    compressor = TopKCompressor(ratio)
    losses = []
    for step in range(steps):
        batch = torch.arange(step * 64, (step + 1) * 64) % len(labels)
        loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
        gradient = torch.cat([g.view(-1) for g in torch.autograd.grad(loss, weights)])
        losses.append(loss.item())
        if step < steps - 1:
            update = compressor.decompress(*compressor.take_(residual, gradient))
            with torch.no_grad():
                at = 0
                for weight in weights:
                    weight.sub_(update[at : at + weight.numel()].view_as(weight), alpha=0.2)
                    at += weight.numel()
    what = f"{residual.numel():,} parameters, {steps} steps at ratio {ratio}"
    print(f"real: {what}, loss {losses[0]:.2f} to {losses[-1]:.2f}", flush=True)
    return residual, gradient


# --- methods -------------------------------------------------------------------------------


def naive(residual: Tensor, gradient: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Top-K with error feedback as it is usually written: values, indices, the new residual."""
    corrected = gradient + residual
    indices = torch.topk(corrected.abs(), k).indices
    values = corrected[indices]
    sent = torch.zeros_like(corrected)
    sent[indices] = values
    return values, indices, corrected - sent


def memory_methods(gradient: Tensor, out: Tensor) -> Iterator[Method]:
    yield Method("memory", "read", lambda: native.finite_sum(None, gradient))
    yield Method("memory", "copy_", lambda: out.copy_(gradient))
    yield Method("memory", "zero_", lambda: out.zero_())


def take_methods(setting: Setting, data: Data, out: Tensor, work: Tensor) -> Iterator[Method]:
    """From a residual and a gradient to the chosen entries and a new residual."""
    residual, gradient = data
    n = setting.n
    compressor = TopKCompressor(setting.ratio)
    k = compressor.quota(n)
    whole = Partition.whole(n, k)
    dealt = partition(BucketLayout(("weight",), (torch.Size([n]),)), 4, compressor.quota)
    corrected = residual + gradient
    magnitude = corrected.abs()
    stamp = Stamp()
    runs: dict[str, Callable[[], object]] = {
        "naive torch": lambda: naive(residual, gradient, k),
        "torch.topk": lambda: torch.topk(magnitude, k),  # finds them, does nothing else
        "reference": lambda: reference.take_topk(residual, gradient, out, whole),
        "native baseline": lambda: native.take_topk(residual, gradient, out, whole),
        "select": lambda: compressor.select(corrected, k, stamp),  # the sum is there already
        "take_ in place": lambda: compressor.take_(work, gradient),
        "native 4 shards": lambda: native.take_topk(residual, gradient, out, dealt),
        "take_ out=": lambda: compressor.take_(residual, gradient, out=out),
        "native": lambda: native.take_topk(residual, gradient, out, whole),  # what training calls
        "native exact=False": lambda: native.take_topk(residual, gradient, out, whole, exact=False),
    }
    before: dict[str, Callable[[], object]] = {
        "native baseline": lambda: _native.allow_simd(0),
        "take_ in place": lambda: work.copy_(residual),
    }
    for name in TAKES:
        slow = name in ("naive torch", "torch.topk", "reference")
        yield Method("take", name, runs[name], before.get(name, lambda: None), slow)


def codec_methods(setting: Setting, out: Tensor) -> Iterator[Method]:
    """From the chosen entries to a message, and from messages to their sum."""
    n = setting.n
    compressor = TopKCompressor(setting.ratio)
    codec, k = compressor.codec, compressor.quota(n)
    whole = Partition.whole(n, k)
    flat = torch.empty(n)
    taken = [Payload(flat, flat, flat.shape)]  # what the next message is made of

    def take() -> None:
        [(values, indices)], _ = native.take_topk(None, flat, out, whole)
        taken[0] = Payload(values, indices, flat.shape)

    messages = []
    for sender in range(MESSAGES):
        flat.normal_(generator=torch.Generator().manual_seed(100 + sender))
        take()
        messages.append(codec.encode(taken[0], k=k).message)

    def add_up() -> None:  # as Packer.sum_ does
        opened = [codec.open(message, numel=n, k=k) for message in messages]
        coded = [CodedEntries(0, each.indices, each.values, n, k, k) for each in opened]
        native.sum_coded_(out, whole, coded, codec.values.code, 1 / MESSAGES)

    # In training, too, encoding follows taking: entries are not far away in the caches.
    yield Method("codec", "encode", lambda: codec.encode(taken[0], k=k), take)
    yield Method("codec", "decode", lambda: codec.decode(messages[0], numel=n, k=k))
    yield Method("codec", f"zero, decode, add {MESSAGES}", add_up)


def entropy_bits(n: int, k: int) -> float:
    """Bits an entry that name one of all sets of ``k`` among ``n``."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2) / k


# --- measuring -----------------------------------------------------------------------------


def measure(methods: list[Method], unit: Method, effort: Effort) -> dict[tuple[str, int], list[float]]:
    """Seconds of every call, by method and number of threads; the unit after every method."""
    seconds: dict[tuple[str, int], list[float]] = {}
    start = time.perf_counter()
    for number in range(effort.rounds):
        if number >= effort.slow_rounds and time.perf_counter() - start > BUDGET:
            break
        for threads in THREADS:
            torch.set_num_threads(threads)
            for method in methods:
                if method.slow and number >= effort.slow_rounds:
                    continue
                for turn in (method, unit):
                    calls = seconds.setdefault((turn.name, threads), [])
                    calls += [call(turn) for _ in range(effort.repeats)]
    return seconds


def call(method: Method) -> float:
    method.prepare()
    start = time.perf_counter()
    result = method.run()
    spent = time.perf_counter() - start
    _native.allow_simd(2)
    del result  # not in the time: who called still has a use for it
    return spent


def rows_of(setting: Setting, effort: Effort, hidden: int) -> list[Row]:
    """One setting with all its methods."""
    n, ratio = setting.n, setting.ratio
    torch.set_num_threads(THREADS[-1])
    residual, gradient = make(setting, hidden)
    out, work = torch.empty(n), residual.clone()
    unit = Method("memory", PASS, lambda: work.add_(gradient))
    methods = list(take_methods(setting, (residual, gradient), out, work))
    if setting.distribution == "gaussian":
        methods += [*memory_methods(gradient, out), *codec_methods(setting, out)]
    seconds = measure(methods, unit, effort)
    k = TopKCompressor(ratio).quota(n)
    rows = []
    for threads in THREADS:
        one_best, one_median = figures(seconds[PASS, threads])
        for method in (unit, *methods):
            calls = seconds[method.name, threads]
            best, median = figures(calls)
            row = dict.fromkeys(COLUMNS, "") | {
                **{"kind": method.kind, "method": method.name, "distribution": setting.distribution},
                **{"elements": n, "ratio": ratio, "entries": k, "threads": threads, "calls": len(calls)},
                **{"best_ms": f"{best * 1e3:.4f}", "median_ms": f"{median * 1e3:.4f}"},
                **{"passes": f"{best / one_best:.3f}", "median_passes": f"{median / one_median:.3f}"},
            }
            if method.name in MOVED:
                row["gb_per_s"] = f"{MOVED[method.name] * n / best / 1e9:.1f}"
            if method.name == "encode":
                row["index_bits"] = f"{reference.ef_nbytes(n, k) * 8 / k:.3f}"
                row["entropy_bits"] = f"{entropy_bits(n, k):.3f}"
            rows.append(row)
    return rows


def figures(calls: list[float]) -> tuple[float, float]:
    return min(calls), statistics.median(calls)


def plan(sizes: list[int]) -> list[Setting]:
    """Gaussian data in all sizes, other kinds in the two largest; trained networks one at a time."""
    kinds = {"gaussian": sizes, "heavy": sizes[-2:], "real": sizes[-2:]}
    return [Setting(kind, n, ratio) for ratio in RATIOS for kind, ns in kinds.items() for n in ns]


# --- telling -------------------------------------------------------------------------------


class Book:
    """All rows, by what they are about."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = {
            (row["method"], row["distribution"], row["elements"], row["ratio"], row["threads"]): row
            for row in rows
        }
        self.sizes = sorted({row["elements"] for row in rows})

    def row(
        self, method: str, ratio: float, n: int = 0, *, kind: str = "gaussian", threads: int = 1
    ) -> dict[str, Any]:
        """``n`` is the largest size if it is left out."""
        return self._rows[method, kind, n or self.sizes[-1], ratio, threads]

    def ms(self, *about: Any, **more: Any) -> float:
        return float(self.row(*about, **more)["best_ms"])

    def passes(self, *about: Any, **more: Any) -> float:
        return float(self.row(*about, **more)["passes"])


def print_setting(setting: Setting, rows: list[Row]) -> None:
    print(f"\n{setting.distribution}, n = {setting.n:,}, ratio {setting.ratio}: best, and passes")
    print(f"{'':<22}" + "".join(f"{f'{threads} thread(s)':>24}" for threads in THREADS))
    for name in dict.fromkeys(row["method"] for row in rows):
        cells = [row for row in rows if row["method"] == name]
        print(f"{name:<22}" + "".join(f"{row['best_ms']:>13} ms {row['passes']:>8}" for row in cells))
    sys.stdout.flush()


def print_memory(book: Book) -> None:
    print("\nmemory: GB/s, best\n")
    print(f"| elements | threads | {' | '.join(MOVED)} |\n|---|---|{'---|' * len(MOVED)}")
    for n in book.sizes:
        for threads in THREADS:
            speeds = [book.row(name, 0.01, n, threads=threads)["gb_per_s"] for name in MOVED]
            print(f"| {n:,} | {threads} | {' | '.join(speeds)} |")


def targets(book: Book) -> Iterator[tuple[str, str, str]]:
    """What was aimed at in the largest size with one thread, and what was reached."""
    kinds = ("gaussian", "heavy", "real")
    for ratio, most in ((0.01, 1.5), (0.001, 1.3), (0.1, 2.2)):
        found = [book.passes("native", ratio, kind=kind) for kind in kinds]
        cells = [f"{passes:.2f} {kind}" for passes, kind in zip(found, kinds, strict=True)]
        yield f"native take at {ratio}, passes", f"at most {most}", ", ".join(cells)
    take = book.ms("native", 0.01)
    found = [
        book.ms("native", 0.01, kind=kind) / book.ms("native", 0.01, kind=kind, threads=2) for kind in kinds
    ]
    cells = [f"{times:.2f} {kind}" for times, kind in zip(found, kinds, strict=True)]
    own = book.ms(PASS, 0.01) / book.ms(PASS, 0.01, threads=2)
    what = "native take at 0.01, 2 threads against 1"
    yield what, "at least 1.4", f"{', '.join(cells)} (add_ itself: {own:.2f} gaussian)"
    naive_ms = book.ms("naive torch", 0.01)
    cell = f"{naive_ms / take:.1f} (one pass would be {naive_ms / book.ms(PASS, 0.01):.1f})"
    yield "naive torch / native take at 0.01", "at least 60", cell
    encode, all_ = book.ms("encode", 0.01), book.ms(f"zero, decode, add {MESSAGES}", 0.01)
    one = f"decode and add one message of {MESSAGES}, zeros included"
    yield f"(encode + {one}) / take at 0.01", "at most 0.25", f"{(encode + all_ / MESSAGES) / take:.2f}"
    bound = 1.5 * book.ms("zero_", 0.01) + 0.5 * book.ms(PASS, 0.01)
    yield (
        f"zero, decode and add {MESSAGES} messages at 0.01, ms",
        f"at most {bound:.1f} (1.5 zero_ + 0.5 add_)",
        f"{all_:.1f}",
    )
    for ratio, bits in ((0.01, 8.7), (0.001, 12.1)):
        row = book.row("encode", ratio)
        cell = f"{row['index_bits']} (least possible: {row['entropy_bits']})"
        yield f"index bits an entry at {ratio}", f"at most {bits}", cell
    small = book.row("take_ out=", 0.01, 25_000)
    cell = f"{float(small['best_ms']) * 1e3:.0f} (median {float(small['median_ms']) * 1e3:.0f})"
    yield "take_ of 25,000 elements at 0.01, microseconds", "below 60", cell


def print_targets(book: Book) -> None:
    print(f"\nn = {book.sizes[-1]:,}, one thread, unless said otherwise\n")
    print("| | target | reached |\n|---|---|---|")
    for line in targets(book):
        print(f"| {' | '.join(line)} |")


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results"), help="folder to write to (default: results)"
    )
    parser.add_argument("--quick", action="store_true", help="few small settings: that it works, no figures")
    arguments = parser.parse_args()
    efforts, hidden = (QUICK, 64) if arguments.quick else (EFFORT, 3584)
    start, about = time.perf_counter(), origin()
    about["machine"] += f", {native.isa()}"
    if hasattr(os, "getloadavg"):
        print(f"load before: {os.getloadavg()[0]:.1f}; much above 0 means disturbed figures")
    rows: list[Row] = []
    for setting in plan(sorted(efforts)):
        found = rows_of(setting, efforts[setting.n], hidden)
        print_setting(setting, found)
        rows += [row | about for row in found]
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "benchmark_compression.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    book = Book(rows)
    draw(book, path.with_suffix(".png"))
    print_memory(book)
    print_targets(book)
    print(f"\nwrote {path} and its picture in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
