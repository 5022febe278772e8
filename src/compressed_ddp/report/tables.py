"""The tables of the report and of the documents, each from one CSV file's rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from ..metrics import amount
from .figures import (
    PLAIN,
    by_rate,
    good,
    headline,
    is_ours,
    median,
    millions,
    of,
    rate_title,
    ratio_title,
    refused,
    sent,
    settings,
    title,
    whole_model,
)
from .grid import Grid
from .sources import Row, Table

NONE = "-"


def _text(value: float | None, form: str = "{:.1f}") -> str:
    return NONE if value is None else form.format(value)


def _share(part: float | None, whole: float | None, form: str = "{:.2f}") -> str:
    return NONE if part is None or not whole else form.format(part / whole)


def _methods(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def steps(table: Table) -> Grid | None:
    """All methods in the headline's setting."""
    rows = good(table.rows)
    setting = headline(rows)
    if setting is None:
        return None
    mine = of(rows, setting)
    plain = of(mine, setting, PLAIN)
    plain_ms, plain_sent = median(plain, "step_ms"), sent(plain)
    lines: list[list[str]] = []
    strong = set()
    for method in _methods(mine):
        each = of(mine, setting, method)
        ms, bytes_ = median(each, "step_ms"), sent(each)
        times = [row["step_ms"] for row in each]
        if is_ours(method):
            strong.add(len(lines))
        lines.append(
            [
                title(method),
                f"{_text(ms)} ({min(times):.1f} to {max(times):.1f})",
                _share(plain_ms, ms),
                _share(100 * setting.compute_ms, ms, "{:.1f}"),
                _text(median(each, "cpu_ms")),
                _text(median(each, "exposed_ms")),
                amount(None if bytes_ is None else round(bytes_)),
                _share(None if bytes_ is None else 100 * bytes_, plain_sent),
            ]
        )
    failed = [row["method"] for row in of(table.rows, setting) if row["failed"] and row["method"]]
    blank = [NONE] * 6
    lines += [
        [title(name), "does not run here", *blank]
        for name in dict.fromkeys(failed)
        if name not in _methods(mine)
    ]
    head = (
        *("method", "step, ms (least to most)", "times faster", "efficiency, %", "CPU, ms", "exposed, ms"),
        *("sent by a host", "% of plain"),
    )
    caption = (
        f"{setting.model}, {setting}, {setting.compute_ms:g} ms of emulated compute; medians of "
        f"{len(plain) or 1} repeats; a step is as long as its slowest host's; efficiency is compute by step"
    )
    return Grid(caption, head, lines, frozenset(strong))


def _best(rows: Sequence[Row], mine: Callable[[str], bool]) -> tuple[float, str] | None:
    """The fastest of some methods: milliseconds and name."""
    found = []
    for method in filter(mine, _methods(rows)):
        ms = median([row for row in rows if row["method"] == method], "step_ms")
        if ms is not None:
            found.append((ms, method))
    return min(found, default=None)


def everywhere(table: Table) -> Grid | None:
    """Every setting: plain DDP, the best of torch's hooks, ours by each collective; losing ones too."""
    rows, lines = good(table.rows), []
    ways = [name for name in ("ours-allgather-int8", "ours-sharded-int8") if name in _methods(rows)]
    for setting in settings(rows):
        mine = of(rows, setting)
        plain = median(of(mine, setting, PLAIN), "step_ms")
        hook = _best(mine, lambda name: name in ("fp16", "bf16") or name.startswith("powersgd"))
        ours = {name: median(of(mine, setting, name), "step_ms") for name in ways}
        known = {name: ms for name, ms in ours.items() if ms is not None}
        if plain is None or not known:
            continue
        best = min(plain, hook[0] if hook else plain)
        winning = [title(name).removeprefix("ours: ") for name, ms in known.items() if ms < best]
        lines.append(
            [
                str(setting),
                f"{plain:.1f}",
                NONE if hook is None else f"{hook[0]:.1f} ({title(hook[1])})",
                *(NONE if ms is None else f"{ms:.1f} ({plain / ms:.2f})" for ms in ours.values()),
                "loses" if not winning else "wins" if len(winning) == len(known) else f"{winning[0]} wins",
            ]
        )
    width = 4 + len(ways)
    for setting, why in refused(table.rows).items():
        told = f"{setting.hosts} hosts at {setting.rate}: not reported, {why.rstrip(':')}"
        lines.append([told, *[NONE] * (width - 1)])
    head = (
        *("setting", "plain DDP, ms", "best torch hook, ms"),
        *(f"{title(name)}, ms (times faster than plain)" for name in ways),
        "against the best of the others",
    )
    return Grid("Every setting that was measured", head, lines) if lines else None


def traffic(table: Table) -> Grid | None:
    """Bytes a step and host by number of hosts, the whole model."""
    rows, hosts = whole_model(table.rows)
    if not rows:
        return None
    lines = []
    for method in _methods(rows):
        by_hosts = [
            sent([row for row in rows if row["method"] == method and row["hosts"] == n]) for n in hosts
        ]
        if method == "none" or not any(by_hosts):
            continue
        cells = [NONE if value is None else amount(round(value)) for value in by_hosts]
        known = dict(zip(hosts, by_hosts, strict=True))
        lines.append([title(method), *cells, _growth(known.get(4), known.get(16))])
    head = ("method", *(f"{n} hosts" for n in hosts), "4 to 16 hosts")
    return Grid(f"Sent by a host in a step, {millions(rows[0]['elements'])} elements", head, lines)


def _growth(before: float | None, after: float | None) -> str:
    return f"{100 * (after / before - 1):+.0f} %" if before and after else NONE


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
                _share(None if bytes_ is None else 100 * bytes_, base),
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
    return Grid("Means over seeds; accuracy ± standard deviation", head, lines) if lines else None


def _mean(rows: Sequence[Row], column: str) -> float | None:
    values = [row[column] for row in rows if row[column] is not None]
    return statistics.fmean(values) if values else None


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
    """How well the cost model predicts, apart for runs that it was not fitted on."""
    lines = []
    for name, wanted in (("fitted on", False), ("held out", True)):
        mine = [row for row in table.rows if is_held_out(row) == wanted]
        errors = [abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in mine]
        if errors:
            lines.append(
                [name, str(len(errors)), f"{100 * statistics.median(errors):.1f}", f"{100 * max(errors):.1f}"]
            )
    head = ("lab runs", "how many", "median error, %", "largest error, %")
    return Grid("Step times that the cost model predicts, against the lab", head, lines)


def is_held_out(row: Row) -> bool:
    return str(row["held_out"]).lower() in ("true", "1", "yes")


def model_parameters(table: Table) -> Grid:
    lines = [[row["name"], f"{row['value']:.4g}", row["unit"]] for row in table.rows]
    return Grid("What was fitted", ("parameter", "value", "unit"), lines)


def break_even(table: Table) -> Grid | None:
    """By number of workers: up to which rate the best of ours is faster than dense."""
    lines = []
    for workers in sorted({row["workers"] for row in table.rows}):
        gains: dict[float, float] = {}
        for row in table.rows:
            if row["workers"] == workers and is_ours(row["method"]):
                gains[row["rate_bits"]] = max(row["gain"], gains.get(row["rate_bits"], 0.0))
        if not gains:
            continue
        winning = [rate for rate, gain in gains.items() if gain > 1]
        best = max(gains, key=lambda rate: gains[rate])
        lines.append(
            [
                f"{workers:,.0f} workers",
                rate_title(max(winning)) if winning else "nowhere",
                f"{gains[best]:.1f} at {rate_title(best)}",
                f"{gains[max(gains)]:.2f} at {rate_title(max(gains))}",
            ]
        )
    head = ("", "wins up to", "most, times faster", "at the fastest network, times")
    return Grid("Computed by the cost model, not measured", head, lines) if lines else None


def rates_shown(table: Table) -> str:
    """What the pictures of step times are about, in words."""
    return "; ".join(str(setting) for setting in by_rate(good(table.rows)))
