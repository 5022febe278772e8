"""Tables of trainings, of kernels and of the cost model, each from one CSV file's rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from ..lab.shaping import parse_rate
from ..metrics import amount
from .figures import is_ours, millions, rate_title, ratio_title
from .grid import NONE, Grid, share
from .sources import Row, Table


def _text(value: float | None, form: str = "{:.1f}") -> str:
    return NONE if value is None else form.format(value)


def tests_of(rows: Iterable[Row]) -> list[Row]:
    """Trainings that were scored on the test set."""
    return [row for row in rows if row["purpose"] == "test"]


def training(table: Table) -> Grid | None:
    """Means over seeds: accuracy, bytes, time, by dataset and ratio; and by network on a lab."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in tests_of(table.rows):
        where = f", {row['hosts']:g} hosts at {row['rate']}" if "hosts" in row else ""
        about = f"{row['dataset']}, {row['model']}, {row['epochs']:g} epochs{where}"
        groups.setdefault((about, row["ratio"]), []).append(row)
    lines = []
    for (about, ratio), mine in groups.items():
        dense = groups.get((about, 1.0), [])
        done = [row for row in mine if row["accuracy"] is not None]
        name = f"{about}, {ratio_title(ratio)}"
        if not done:
            lines.append([name, f"diverged, {len(mine)} of {len(mine)}", *[NONE] * 5])
            continue
        scores = [row["accuracy"] for row in done]
        spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        lost = f"; {len(mine) - len(done)} of {len(mine)} diverged" if len(done) < len(mine) else ""
        bytes_, base = _mean(done, "sent"), _mean(dense, "sent")
        score, of_dense = _mean(done, "accuracy"), _mean(dense, "accuracy")
        less = NONE if ratio == 1 or score is None or of_dense is None else f"{score - of_dense:+.2f}"
        reached = [row for row in done if row["first_to"] is not None]
        lines.append(
            [
                name,
                f"{score:.2f}{spread} %{lost}",
                less,
                amount(None if bytes_ is None else round(bytes_)),
                share(bytes_, base, 100),
                _text(_mean(done, "seconds"), "{:.0f}"),
                f"{_text(_mean(reached, 'first_to'), '{:.0f}')} to {done[0]['target']:g} %"
                if len(reached) == len(done)
                else f"{len(reached)} of {len(done)} reached {done[0]['target']:g} %",
            ]
        )
    head = (
        *("training", "test accuracy", "points against dense", "sent by a worker", "% of dense"),
        *("seconds", "seconds to accuracy"),
    )
    return Grid(_seeds(groups.values()), head, lines) if lines else None


def _seeds(groups: Iterable[Sequence[Row]]) -> str:
    """What figures are of, by how many seeds each of them has."""
    counts = {len({row["seed"] for row in mine}) for mine in groups}
    if max(counts, default=1) == 1:
        return "One seed"
    few, many = min(counts), max(counts)
    if few == many:
        return f"Means over {many} seeds; accuracy ± standard deviation"
    return f"Means over {few} to {many} seeds; accuracy ± standard deviation where there are several"


def _mean(rows: Sequence[Row], column: str) -> float | None:
    values = [row[column] for row in rows if row[column] is not None]
    return statistics.fmean(values) if values else None


def feedback(table: Table) -> Grid | None:
    """What became of the gradients, and of accuracy, by residual and ratio; means over seeds."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in table.rows:
        groups.setdefault((row["method"], row["ratio"]), []).append(row)
    lines = []
    for (method, ratio), mine in groups.items():
        scores = [row["accuracy"] for row in mine]
        spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        name = "dense" if ratio == 1 else f"{method}, {ratio_title(ratio)}"
        columns = ("late", "lost", "held")
        shares = [_small(100 * statistics.fmean(row[column] for row in mine)) for column in columns]
        lines.append([name, f"{statistics.fmean(scores):.2f}{spread} %", *shares])
    first = table.rows[0]
    caption = (
        f"{first['model']} on {first['dataset']}, {first['workers']:g} workers, {first['steps']:g} steps; "
        "means over seeds, as a share of the length of the true gradients' sum"
    )
    head = ("residual", "test accuracy", "not applied, %", "of it owed by nobody, %", "held by a worker, %")
    return Grid(caption, head, lines)


def _small(percent: float) -> str:
    return "< 0.001" if 0 < percent < 0.001 else f"{percent:.1f}"


KERNELS = {
    "torch.topk": "torch.topk alone",
    "naive torch": "torch, as usually written",
    "select": "select alone",
    "native": "take: select and new residual",
    "take_ in place": "take_, in place",
    "encode": "encode",
    "decode": "decode",
}


def kernels(table: Table) -> Grid | None:
    """Million elements a second by ratio, the largest size, one thread; and the roof."""
    rows = [row for row in table.rows if (row["distribution"], row["threads"]) == ("gaussian", 1)]
    if not rows:
        return None
    size = max(row["elements"] for row in rows)
    speed = {(r["method"], r["ratio"]): size / r["best_ms"] / 1e3 for r in rows if r["elements"] == size}
    ratios = sorted({ratio for _, ratio in speed}, reverse=True)
    roof = {"add_ (one pass)": "roof: one pass, residual.add_(gradient)"}
    lines = [
        [name, *(_text(speed.get((method, ratio)), "{:,.0f}") for ratio in ratios)]
        for method, name in (KERNELS | roof).items()
        if any((method, ratio) in speed for ratio in ratios)
    ]
    head = ("million elements a second at", *(ratio_title(ratio) for ratio in ratios))
    return Grid(f"{millions(size)} elements, one thread, best of all calls", head, lines)


def model_check(table: Table) -> Grid:
    """How well the cost model predicts, apart for runs that it was not fitted on; and ours by rate."""
    groups = {
        name: [row for row in table.rows if is_held_out(row) == wanted]
        for name, wanted in (("fitted on", False), ("held out", True))
    }
    ours = [row for row in table.rows if is_ours(row["method"])]
    for rate in sorted({row["rate"] for row in ours}, key=parse_rate):
        groups[f"ours at {rate_title(parse_rate(rate))}"] = [row for row in ours if row["rate"] == rate]
    lines = []
    for name, mine in groups.items():
        errors = [100 * (row["predicted_ms"] / row["measured_ms"] - 1) for row in mine]
        if errors:
            sizes = [abs(error) for error in errors]
            far = [f"{statistics.median(sizes):.1f}", f"{max(sizes):.1f}"]
            lines.append([name, str(len(mine)), *far, f"{min(errors):+.1f} to {max(errors):+.1f}"])
    head = (
        *("lab runs", "how many", "median error, %", "largest error, %"),
        "from too fast (-) to too slow (+), %",
    )
    return Grid("Step times that the cost model predicts, against the lab", head, lines)


def is_held_out(row: Row) -> bool:
    return str(row["held_out"]).lower() in ("true", "1", "yes")


def model_parameters(table: Table) -> Grid:
    lines = [[row["name"], f"{row['value']:.4g}", row["unit"]] for row in table.rows]
    return Grid("What was fitted", ("parameter", "value", "unit"), lines)


def break_even(table: Table) -> Grid | None:
    """By number of workers: the fastest rate of the map at which the best of ours is faster than dense."""
    lines = []
    for workers in sorted({row["workers"] for row in table.rows}):
        mine = [row for row in table.rows if row["workers"] == workers and is_ours(row["method"])]
        gains = _gains(mine)
        if not gains:
            continue
        alone = _gains(row for row in mine if row["method"] == "ours-allgather-int8")
        lines.append(
            [
                f"{workers:,.0f} workers",
                _last(gains),
                _most(gains, "{:.1f}"),
                f"{gains[max(gains)]:.2f} at {rate_title(max(gains))}",
                _most(alone, "{:.2f}"),
            ]
        )
    head = (
        *(
            "the better of all-gather and sharded",
            "wins at the map's rates up to: times faster (the next one)",
        ),
        *("most, times faster", "at the fastest network, times", "all-gather alone: most, times"),
    )
    return Grid("Computed by the cost model, not measured", head, lines) if lines else None


def _gains(rows: Iterable[Row]) -> dict[float, float]:
    """By rate, how many times faster than dense the best is."""
    gains: dict[float, float] = {}
    for row in rows:
        gains[row["rate_bits"]] = max(row["gain"], gains.get(row["rate_bits"], 0.0))
    return gains


def _most(gains: dict[float, float], form: str) -> str:
    best = max(gains, key=lambda rate: gains[rate], default=None)
    return NONE if best is None else f"{form.format(gains[best])} at {rate_title(best)}"


def _last(gains: dict[float, float]) -> str:
    """The fastest rate that wins, and the one after it: where between them it ends, the map does not say."""
    last = max((rate for rate, gain in gains.items() if gain > 1), default=None)
    if last is None:
        return "nowhere"
    after = min((rate for rate in gains if rate > last), default=None)
    words = f"{rate_title(last)}: {gains[last]:.2f}"
    return words if after is None else f"{words} ({rate_title(after)}: {gains[after]:.2f})"
