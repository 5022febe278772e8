"""What results/ say about the write-up's claims: a cell of text from one file's rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from compressed_ddp.lab.costs import VALUE_BITS
from compressed_ddp.lab.summary import Summary
from compressed_ddp.metrics import amount
from compressed_ddp.report import Table
from compressed_ddp.report.figures import PLAIN, good, settings
from compressed_ddp.report.lab_tables import summaries
from compressed_ddp.report.tables import tests_of

Measure = Callable[[Table], "str | None"]
"""From a file's rows; None where they have nothing on it."""

ALLGATHER, SHARDED = "ours-allgather-int8", "ours-sharded-int8"
TOPK, NAIVE, OURS = "torch.topk", "naive torch", "native"
NO_FEEDBACK, WRITE_UPS, FEEDBACK = "no error feedback", "write-up's residual", "error feedback"


class LabView(NamedTuple):
    """Eight hosts at 1 Gbit/s with the whole model: medians by method."""

    step: dict[str, float]
    sent: dict[str, float]
    exposed: dict[str, float]
    """Step less compute."""
    own_cores: dict[str, float]
    """The same, computed for hosts with cores of their own."""
    compute: float


def lab_view(table: Table) -> LabView | None:
    rows = good(table.rows)
    places = [s for s in settings(rows) if (s.hosts, s.rate_bits) == (8, 1e9)]
    if not places:
        return None
    place = places[0]  # the largest model
    found = summaries(rows, place)

    def column(pick: Callable[[Summary], float | None]) -> dict[str, float]:
        values = {name: pick(each) for name, each in found.items()}
        return {name: value for name, value in values.items() if value is not None}

    return LabView(
        column(lambda each: each.step),
        column(lambda each: each.sent),
        column(lambda each: each.exposed),
        column(lambda each: None if each.own_cores is None else each.own_cores - each.compute),
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


def communication(lab: LabView) -> str:
    best = min((ALLGATHER, SHARDED), key=lambda name: lab.exposed[name])
    its, ours = (lab.exposed[PLAIN] / lab.exposed[name] for name in ("writeup-dense", best))
    computed = lab.own_cores[PLAIN] / min(lab.own_cores[name] for name in (ALLGATHER, SHARDED))
    return (
        f"step less compute, plain DDP's by the method's: its method {its:.1f}, ours {ours:.1f}; computed "
        f"for hosts with their own cores: ours {computed:.1f}"
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
    if size is None or (TOPK, size) not in ms:
        return None
    alone, whole = (ms[method, size] / ms[OURS, size] for method in (TOPK, NAIVE))
    return (
        f"torch.topk alone takes {alone:.1f} times as long as a kernel of one pass that does all of it, the "
        f"whole way in torch {whole:.0f} times"
    )


def phases(table: Table) -> str | None:
    ms = kernel_ms(table)
    size = max((n for method, n in ms if method == NAIVE), default=None)
    if size is None:
        return None
    ours = [ms[method, size] for method in (OURS, "encode", "decode")]
    return (
        f"{size / 1e6:.3g} M: its steps in torch {ms[NAIVE, size]:,.0f} ms; ours {ours[0]:.1f} for residual, "
        f"choice and new residual at once, {ours[1]:.1f} to encode, {ours[2]:.1f} to decode a message"
    )


def entry_bits(table: Table) -> str | None:
    found = {
        row["elements"]: row["index_bits"]
        for row in table.rows
        if row["ratio"] == 0.01 and row["index_bits"] is not None
    }
    value = VALUE_BITS["int8"]
    return (
        f"{found[max(found)]:.2f} bits for the index, {value:g} for the value with its share of a scale"
        if found
        else None
    )


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
        first = {row["model"]: row for row in reversed(tests_of(table.rows)) if row["dataset"] == dataset}
        cells = []
        for model, row in reversed(first.items()):
            # Longer trainings of it are another matter: the ones that have a dense one beside them.
            alike = tuple(each for each in table.rows if each["epochs"] == row["epochs"])
            by = _means(replace(table, rows=alike), dataset, "seconds", str(model))
            dense = by.pop(1.0, None)
            if dense and by:
                times = ", ".join(f"{dense / value:.2f}" for value in by.values())
                cells.append(f"{times} ({model}, {row['hosts']:g} hosts at {row['rate']})")
        return "; ".join(cells) or None

    return measure


def trade_off(datasets: tuple[str, ...]) -> Measure:
    """Bytes saved and points lost by ratio."""

    def measure(table: Table) -> str | None:
        cells = []
        for dataset in datasets:
            if not any(row["dataset"] == dataset for row in tests_of(table.rows)):
                return None
            sent, score = (_means(table, dataset, column) for column in ("sent", "accuracy"))
            saved = [f"{100 - 100 * sent[ratio] / sent[1.0]:.1f}" for ratio in sent if ratio < 1]
            points = [f"{score[1.0] - score[ratio]:.1f}" for ratio in score if ratio < 1]
            cells.append(f"{dataset}: {', '.join(saved)} % saved, {', '.join(points)} points lost")
        return "; ".join(cells)

    return measure


def accuracy_lost(datasets: tuple[str, ...]) -> Measure:
    """Points at 1 %, by dataset."""

    def measure(table: Table) -> str | None:
        cells = []
        for dataset in datasets:
            if not any(row["dataset"] == dataset for row in tests_of(table.rows)):
                return None
            score = _means(table, dataset, "accuracy")
            cells.append(f"{score[1.0] - score[0.01]:.2f} points on {dataset} ({_model(table, dataset)})")
        return ", ".join(cells)

    return measure


def the_sum(table: Table) -> str | None:
    """How far what was applied is from the true sum at 1 %."""
    cells = []
    for name in (FEEDBACK, WRITE_UPS, NO_FEEDBACK):
        late, lost = (100 * _feedback(table, name, 0.01, column) for column in ("late", "lost"))
        cells.append(f"{name} {late:.0f} % missing at the end, {lost:.0f} % owed by nobody")
    return f"digits at 1 %: {'; '.join(cells)}"


def feedback_scores(table: Table) -> str | None:
    """Accuracy by residual at 1 and 0.1 %."""
    cells = [f"dense {_feedback(table, 'dense', 1.0, 'accuracy'):.1f} %"]
    for name in (NO_FEEDBACK, WRITE_UPS, FEEDBACK):
        scores = [f"{_feedback(table, name, ratio, 'accuracy'):.1f}" for ratio in (0.01, 0.001)]
        cells.append(f"{name} {' and '.join(scores)} %")
    return "digits at 1 and 0.1 %: " + ", ".join(cells)


def _feedback(table: Table, method: str, ratio: float, column: str) -> float:
    mine = [row[column] for row in table.rows if (row["method"], row["ratio"]) == (method, ratio)]
    return statistics.fmean(mine)


def _model(table: Table, dataset: str) -> str:
    return next(row["model"] for row in table.rows if row["dataset"] == dataset)


def _means(table: Table, dataset: str, column: str, model: str = "") -> dict[float, float]:
    """A column's mean over the seeds by ratio, where it is known."""
    known = {
        ratio: [row[column] for row in rows if row[column] is not None]
        for ratio, rows in _by_ratio(table, dataset, model)
    }
    return {ratio: statistics.fmean(values) for ratio, values in known.items() if values}


def _by_ratio(table: Table, dataset: str, model: str = "") -> list[tuple[float, list[dict[str, object]]]]:
    """Test runs of ``model``, or of the first in the file, from dense to the smallest ratio."""
    rows = [row for row in tests_of(table.rows) if row["dataset"] == dataset]
    rows = [row for row in rows if row["model"] == (model or rows[0]["model"])]
    ratios = sorted({row["ratio"] for row in rows}, reverse=True)
    return [(ratio, [row for row in rows if row["ratio"] == ratio]) for ratio in ratios]
