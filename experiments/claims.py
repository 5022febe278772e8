"""The original write-up's claims, one by one: what it says, what our results say, and why they differ.

What was measured is computed from the files in results/; a claim whose file is not there yet says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from compressed_ddp.metrics import amount
from compressed_ddp.report import SOURCES, Table
from compressed_ddp.report.figures import PLAIN, good, median, of, sent, settings
from compressed_ddp.report.grid import Grid
from compressed_ddp.report.tables import tests_of

Found = Mapping[str, Table]
Measure = Callable[[Table], "str | None"]
ALLGATHER, SHARDED = "ours-allgather-int8", "ours-sharded-int8"
NAIVE, OURS = "naive torch", "native"


class Claim(NamedTuple):
    """One row."""

    says: str
    source: str
    measure: Measure
    """From the file's rows; None where they have nothing on it."""
    why: str


class LabView(NamedTuple):
    """Eight hosts at 1 Gbit/s with the whole model: medians by method."""

    step: dict[str, float]
    sent: dict[str, float]
    compute: float


def lab_view(table: Table) -> LabView | None:
    rows = good(table.rows)
    places = [s for s in settings(rows) if (s.hosts, s.rate_bits) == (8, 1e9)]
    if not places:
        return None
    place = places[0]  # the largest model
    methods = {row["method"] for row in of(rows, place)}
    by = {name: of(rows, place, name) for name in methods}
    steps = {name: median(mine, "step_ms") for name, mine in by.items()}
    bytes_ = {name: sent(mine) for name, mine in by.items()}
    return LabView(
        {name: value for name, value in steps.items() if value is not None},
        {name: value for name, value in bytes_.items() if value is not None},
        place.compute_ms,
    )


def on_lab(measure: Callable[[LabView], str]) -> Measure:
    """``measure`` where all methods that it asks for were run."""

    def safe(table: Table) -> str | None:
        view = lab_view(table)
        try:
            return None if view is None else measure(view)
        except KeyError:
            return None

    return safe


def plain_step(lab: LabView) -> str:
    ms = lab.step[PLAIN]
    return f"plain DDP: {ms:,.0f} ms a step, efficiency {100 * lab.compute / ms:.1f} %"


def plain_bytes(lab: LabView) -> str:
    return f"{amount(round(lab.sent[PLAIN]))} sent by each host in a step"


def entries_bytes(lab: LabView) -> str:
    mine = lab.sent["writeup-sparse"]
    return f"{amount(round(mine))} sent by each host, {100 * mine / lab.sent[PLAIN]:.1f} % of plain DDP"


def dense_bytes(lab: LabView) -> str:
    share = 100 * lab.sent["writeup-dense"] / lab.sent[PLAIN]
    times = lab.step[PLAIN] / lab.step["writeup-dense"]
    return f"{share:.1f} % of plain DDP's bytes; its step is {times:.2f} times as fast"


def our_bytes(lab: LabView) -> str:
    shares = [f"{100 * lab.sent[name] / lab.sent[PLAIN]:.2f} %" for name in (SHARDED, ALLGATHER)]
    return f"{shares[0]} of plain DDP's bytes sharded, {shares[1]} by all-gather"


def speed_up(lab: LabView) -> str:
    written = lab.step[PLAIN] / lab.step["writeup-sparse"]
    best = min(lab.step[ALLGATHER], lab.step[SHARDED])
    return (
        f"its entries: {written:.1f} times as fast as plain DDP; ours: {lab.step[PLAIN] / best:.1f} times "
        f"({best:,.0f} ms), efficiency {100 * lab.compute / best:.0f} %"
    )


def kernel_ms(table: Table) -> dict[tuple[str, float], float]:
    """Milliseconds by method and size, ratio 0.01, one thread."""
    return {
        (row["method"], row["elements"]): row["best_ms"]
        for row in table.rows
        if (row["distribution"], row["ratio"], row["threads"]) == ("gaussian", 0.01, 1)
    }


def top_k_times(table: Table) -> str | None:
    ms = kernel_ms(table)
    sizes = sorted(n for method, n in ms if method == NAIVE and n >= 1e6)
    cells = [f"{n / 1e6:.3g} M: {ms[NAIVE, n]:,.0f} ms, ours {ms[OURS, n]:.1f} ms" for n in sizes]
    return "; ".join(cells) or None


def top_k_gain(table: Table) -> str | None:
    ms = kernel_ms(table)
    size = max((n for method, n in ms if method == NAIVE), default=None)
    return (
        None
        if size is None
        else f"{ms[NAIVE, size] / ms[OURS, size]:.0f} times slower than a kernel of one pass"
    )


def entry_bits(table: Table) -> str | None:
    found = {
        row["elements"]: row["index_bits"]
        for row in table.rows
        if row["ratio"] == 0.01 and row["index_bits"] is not None
    }
    return f"{found[max(found)]:.2f} bits for the index, 8 for the value" if found else None


def scores(dataset: str) -> Measure:
    """Test accuracy by ratio, means over seeds."""

    def measure(table: Table) -> str | None:
        cells = [f"{score:.2f} %" for score in _means(table, dataset, "accuracy").values()]
        return f"{_model(table, dataset)}: {', '.join(cells)}" if cells else None

    return measure


def shares(dataset: str) -> Measure:
    """Bytes of a worker as a share of dense, by ratio."""

    def measure(table: Table) -> str | None:
        by = _means(table, dataset, "sent")
        dense = by.pop(1.0, None)
        return ", ".join(f"{100 * value / dense:.2f} %" for value in by.values()) if dense and by else None

    return measure


def faster(dataset: str) -> Measure:
    """Seconds of the whole training on the lab: dense by compressed."""

    def measure(table: Table) -> str | None:
        by = _means(table, dataset, "seconds")
        dense = by.pop(1.0, None)
        if not dense or not by:
            return None
        row = next(row for row in table.rows if row["dataset"] == dataset)
        where = f"{row['model']}, {row['hosts']:g} hosts at {row['rate']}"
        return f"{', '.join(f'{dense / value:.2f}' for value in by.values())} ({where})"

    return measure


def _model(table: Table, dataset: str) -> str:
    return next(row["model"] for row in table.rows if row["dataset"] == dataset)


def _means(table: Table, dataset: str, column: str) -> dict[float, float]:
    """A column's mean over the seeds by ratio, where it is known."""
    known = {
        ratio: [row[column] for row in rows if row[column] is not None]
        for ratio, rows in _by_ratio(table, dataset)
    }
    return {ratio: statistics.fmean(values) for ratio, values in known.items() if values}


def _by_ratio(table: Table, dataset: str) -> list[tuple[float, list[dict[str, object]]]]:
    """Test runs of the first model in the file, from dense to the smallest ratio."""
    rows = [row for row in tests_of(table.rows) if row["dataset"] == dataset]
    rows = [row for row in rows if row["model"] == rows[0]["model"]]
    ratios = sorted({row["ratio"] for row in rows}, reverse=True)
    return [(ratio, [row for row in rows if row["ratio"] == ratio]) for ratio in ratios]


LAB, KERNELS = "scalability_analysis", "benchmark_compression"
TRAINING, LAB_TRAINING = "benchmark_training", "lab_training"
CLAIMS: dict[str, tuple[Claim, ...]] = {
    "problem": (
        Claim(
            "ResNet-50, 8 workers, 1 Gbit/s: 50 ms compute, 736 ms communication, efficiency 6 %",
            LAB,
            on_lab(plain_step),
            "a ring sends 179 MB from each host, and 1 Gbit/s needs 1,431 ms for that: 736 would be "
            "twice the line's rate",
        ),
        Claim(
            "8 workers synchronise 800 MB",
            LAB,
            on_lab(plain_bytes),
            "a ring sends 2 (P - 1) / P of the gradient from each host, all at the same time, and headers",
        ),
    ),
    "design": (
        Claim(
            "1 % as 12-byte entries is 3 MB, and saves 97 %",
            LAB,
            on_lab(entries_bytes),
            "every worker must send its entries to all others: the share grows with their number",
        ),
        Claim(
            "an entry needs 12 bytes",
            KERNELS,
            entry_bits,
            "naming 1 % of all elements takes 8.1 bits an entry; what rounding values loses stays in the "
            "residual",
        ),
        Claim(
            "compressing takes 1.2 ms for 1 M, 12.8 ms for 10 M, 38.4 ms for 25 M",
            KERNELS,
            top_k_times,
            "ours is one core of a CPU, theirs may be a GPU; its steps, written in torch, against one pass",
        ),
        Claim(
            "torch.topk is fast enough, kernels of one's own are not needed",
            KERNELS,
            top_k_gain,
            "adding, selecting and subtracting can be one pass over memory",
        ),
    ),
    "revised": (
        Claim(
            "decompressing before the all-reduce is simpler and still saves 97 %",
            LAB,
            on_lab(dense_bytes),
            "a dense tensor of mostly zeros is as long as any other: nothing is saved, and selecting "
            "comes on top",
        ),
        Claim(
            "sending sparse entries needs kernels inside NCCL, and would save 3 times more",
            LAB,
            on_lab(our_bytes),
            "all-gather and all-to-all of small byte messages are enough; fixed sizes, no exchange of "
            "lengths",
        ),
    ),
    "analysis": (
        Claim(
            "MNIST: 98.2 % dense, then 98.0, 97.9 and 97.2 % at 10, 1 and 0.1 %",
            TRAINING,
            scores("mnist"),
            "another rate, batch and number of epochs; its residual loses what the average takes, ours "
            "loses nothing",
        ),
        Claim(
            "MNIST: 10.7, 3.0 and 1.2 % of the bytes",
            TRAINING,
            shares("mnist"),
            "12-byte entries would be 30, 3 and 0.3 % of one message, and its method sends everything; ours "
            "is what sockets sent, the fixed cost of tensors that travel whole included",
        ),
        Claim(
            "MNIST: 1.2, 8.5 and 12.3 times faster",
            LAB_TRAINING,
            faster("mnist"),
            "a small model computes longer than it sends unless the network is slow",
        ),
        Claim(
            "CIFAR-10, ResNet-18: 92.5 % dense, then 92.1, 91.8 and 90.3 %",
            TRAINING,
            scores("cifar10"),
            "not the same training: a smaller model, two fifths of the data, few epochs; compare the "
            "distances",
        ),
        Claim(
            "CIFAR-10: 11.2, 3.0 and 1.2 % of the bytes",
            TRAINING,
            shares("cifar10"),
            "as for MNIST",
        ),
        Claim(
            "CIFAR-10: 1.3, 9.2 and 13.5 times faster",
            LAB_TRAINING,
            faster("cifar10"),
            "as for MNIST; all hosts share two cores here",
        ),
        Claim(
            "a step of 82 instead of 786 ms: 9.6 times faster, efficiency 69 %",
            LAB,
            on_lab(speed_up),
            "24 MB take 192 ms at 1 Gbit/s, not 22; eight hosts on two cores pay for compression four "
            "times over",
        ),
    ),
}


def table(found: Found, name: str) -> str:
    """The claims of a page, as a table for it."""
    rows = []
    for claim in CLAIMS[name]:
        measured = claim.measure(found[claim.source]) if claim.source in found else None
        missing = f"not measured yet: `{SOURCES[claim.source].command}`"
        rows.append([claim.says, measured or missing, f"`{claim.source}.csv`", claim.why])
    return Grid("", ("the write-up", "measured here", "file", "why they differ"), rows).markdown()
