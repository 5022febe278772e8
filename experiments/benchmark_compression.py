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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# Read when torch is loaded. Its idle threads shall sleep: where one waits in a loop on a core that
# the other needs, both lose milliseconds (the scheduler's), and every method after them does too.
os.environ["OMP_NUM_THREADS"] = "2"
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["COMPRESSED_DDP_KERNELS"] = "native"

import torch
from kernel_report import (
    MESSAGES,
    MOVED,
    PASS,
    RATIOS,
    TAKES,
    THREADS,
    Book,
    Row,
    draw,
    print_memory,
    targets_table,
)
from origin import origin
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn

from compressed_ddp.compression import TopKCompressor
from compressed_ddp.kernels import CodedEntries, _native, native, reference
from compressed_ddp.layout import BucketLayout, Partition, partition
from compressed_ddp.types import Payload, Stamp

COLUMNS = (
    *("kind", "method", "distribution", "elements", "ratio", "entries", "threads"),
    *("calls", "best_ms", "median_ms", "passes", "median_passes", "gb_per_s", "index_bits", "entropy_bits"),
    *("command", "commit", "version", "machine"),
)

Data = tuple[Tensor, Tensor]  # residual and gradient


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


def print_setting(setting: Setting, rows: list[Row]) -> None:
    print(f"\n{setting.distribution}, n = {setting.n:,}, ratio {setting.ratio}: best, and passes")
    print(f"{'':<22}" + "".join(f"{f'{threads} thread(s)':>24}" for threads in THREADS))
    for name in dict.fromkeys(row["method"] for row in rows):
        cells = [row for row in rows if row["method"] == name]
        print(f"{name:<22}" + "".join(f"{row['best_ms']:>13} ms {row['passes']:>8}" for row in cells))
    sys.stdout.flush()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results"), help="folder to write to (default: results)"
    )
    parser.add_argument("--quick", action="store_true", help="few small settings: that it works, no figures")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
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
    print(f"\n{targets_table(book)}")
    print(f"\nwrote {path} and its picture in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
