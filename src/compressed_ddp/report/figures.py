"""What the rows say: settings of the lab, medians, names and amounts for people."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .sources import Row

PLAIN = "plain"
SHOWN = (
    *("none", PLAIN, "fp16", "bf16", "powersgd-1", "powersgd-2", "powersgd-4", "writeup-dense"),
    *("writeup-sparse", "ours-powersgd-1", "ours-allgather-int8", "ours-sharded-int8"),
)
"""Methods that pictures show; tables have all of them."""

USUAL_RATIO = 0.01


class Setting(NamedTuple):
    """Rows that may be compared with each other.

    A dilated run of a tenth of the elements at a tenth of the rate stands for a whole one: ``elements`` and
    ``rate_bits`` are those that it stands for.
    """

    model: str
    elements: int
    hosts: int
    rate_bits: float
    """0 without shaping."""
    compute_ms: float
    dilation: float

    @property
    def rate(self) -> str:
        return rate_title(self.rate_bits) if self.rate_bits else "no limit"

    def __str__(self) -> str:
        dilated = f", dilated {self.dilation:g} times" if self.dilation != 1 else ""
        return f"{self.hosts} hosts at {self.rate}, {millions(self.elements)} elements{dilated}"


def setting_of(row: Row) -> Setting:
    dilation = row["dilation"] or 1.0
    return Setting(
        row["model"],
        round((row["elements"] or 0) * dilation),
        int(row["hosts"]),
        (row["rate_bits"] or 0.0) * dilation,
        row["compute_ms"] or 0.0,
        dilation,
    )


def refused(rows: Iterable[Row]) -> dict[Setting, str]:
    """Labs that gave no figures, and why."""
    return {setting_of(row): row["failed"] for row in rows if row["failed"] and not row["method"]}


def good(rows: Iterable[Row]) -> list[Row]:
    """Those that have a step time, at the usual ratio where there is one."""
    return [
        row
        for row in rows
        if not row["failed"] and row["step_ms"] is not None and row["ratio"] in (None, USUAL_RATIO)
    ]


def whole_model(rows: Iterable[Row]) -> tuple[list[Row], list[int]]:
    """Good rows of the largest model at one rate, and with how many hosts: the rate that most numbers of
    hosts were measured at, 1 Gbit/s (what a dilated run stands for) among equals."""
    found = good(rows)
    largest = max((row["elements"] for row in found), default=None)
    by_rate: dict[float, list[Row]] = {}
    for row in found:
        if row["elements"] == largest:
            by_rate.setdefault(setting_of(row).rate_bits, []).append(row)

    def hosts(rate: float) -> list[int]:
        return sorted({int(row["hosts"]) for row in by_rate[rate]})

    if not by_rate:
        return [], []
    rate = max(by_rate, key=lambda each: (len(hosts(each)), each == 1e9))
    return by_rate[rate], hosts(rate)


def settings(rows: Iterable[Row]) -> list[Setting]:
    """All settings: the largest model first, then by rate and hosts."""
    found = {setting_of(row) for row in rows}
    return sorted(found, key=lambda s: (-s.elements, s.rate_bits, s.hosts, s.compute_ms, s.dilation))


def headline(rows: Iterable[Row], rate: float | None = None) -> Setting | None:
    """Eight hosts at 1 Gbit/s with the whole model, or what comes nearest; at ``rate`` if one is given."""
    found = [each for each in settings(rows) if rate in (None, each.rate_bits)]
    return max(found, key=lambda s: (s.elements, s.rate_bits == 1e9, s.hosts == 8, s.hosts), default=None)


def by_rate(rows: Iterable[Row]) -> list[Setting]:
    """One setting a rate, with the whole model: eight hosts, or as many as there are."""
    found = settings(rows)
    largest = [s for s in found if s.elements == found[0].elements]
    best: dict[float, Setting] = {}
    for each in largest:
        have = best.get(each.rate_bits)
        if have is None or (each.hosts == 8, each.hosts) > (have.hosts == 8, have.hosts):
            best[each.rate_bits] = each
    return [best[rate] for rate in sorted(best)]


def of(rows: Iterable[Row], setting: Setting, method: str | None = None) -> list[Row]:
    return [row for row in rows if setting_of(row) == setting and (method is None or row["method"] == method)]


def median(rows: Sequence[Row], column: str) -> float | None:
    """Over the rows that have it; None where none does."""
    values = [row[column] for row in rows if row[column] is not None]
    return statistics.median(values) if values else None


def sent(rows: Sequence[Row]) -> float | None:
    """Bytes a step and host: at the interface, or at the sockets where no interface was read."""
    wire = median(rows, "wire_sent")
    return median(rows, "socket_sent") if wire is None else wire


def title(method: str) -> str:
    """A method's name for people."""
    kind, *rest = method.split("-")
    if kind == "powersgd":
        return f"torch PowerSGD, rank {rest[0]}"
    if kind == "ours" and rest and rest[0] == "powersgd":
        return f"ours: PowerSGD, rank {rest[1]}"
    if kind == "ours" and len(rest) == 2:
        return f"ours: {'all-gather' if rest[0] == 'allgather' else rest[0]}, {rest[1]}"
    known = {
        "none": "no communication (floor)",
        PLAIN: "plain DDP, fp32",
        "fp16": "torch fp16 hook",
        "bf16": "torch bf16 hook",
        "writeup-dense": "write-up: decompressed first",
        "writeup-sparse": "write-up: 12-byte entries",
    }
    return known.get(method, method)


def is_ours(method: str) -> bool:
    return method.startswith("ours")


def millions(elements: float) -> str:
    return f"{elements / 1e6:.3g} M" if elements >= 1e6 else f"{elements / 1e3:.3g} k"


def ratio_title(ratio: float) -> str:
    return "dense" if ratio == 1 else f"{100 * ratio:g} %"


def rate_title(bits: float) -> str:
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size:
            return f"{bits / size:g} {unit}"
    return f"{bits / 1e3:g} kbit/s"
