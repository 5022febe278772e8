"""Rows of a run as a table for people: medians, spread, shares, and what is computed from them.

**Computed, not measured: the step on machines with their own cores.** In a lab all hosts share this
machine's cores, so each waits for the CPU work of all. The column says what the same work would take
where every host has a core for compute and one for synchronising, on links of the same rate:

    busy     CPU of a host and step, less that of `none`: the emulation's own
    network  of it, for moving bytes: as much a byte as `plain` spent in the same run
    codec    the rest: selecting, packing, rounding, factorising
    wire     bytes at the interface * 8 / rate

    a bucket's work = codec + rounds * 0.05 ms + max(wire, network)

The wire is shared out over the buckets by their elements; CPU by elements or evenly, whichever makes
the step longer. A bucket is worked on when backward has made it and the one before it is done; the
step ends with the last. Compression is never taken to overlap with
sending, which real runs do in part; moving bytes is, because TCP does. `rounds` are messages that
wait for one another, with a usual Ethernet's 0.05 ms each; the lab itself has no latency of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..metrics import amount
from .measure import Plan, Row
from .methods import METHODS
from .timeline import Bucket, buckets_of, step_seconds

ROUND = 5e-5
"""Seconds from a message to the one that waited for it, on a usual Ethernet."""


@dataclass(frozen=True)
class Summary:
    """One method: medians over the repeats. Milliseconds; None is what cannot be told."""

    method: str
    step: float
    fastest: float
    slowest: float
    compute: float
    cpu: float
    """Of a host and step; without the emulation's own if that was measured too (`none`)."""
    sent: float | None
    """Bytes a host and step: at the interface if it has counters, else at the sockets."""
    codec: float | None = None
    """Of ``cpu``, what moving bytes does not explain: compressing. None of methods that do not compress, and
    where `none` or `plain` was not measured beside it."""
    own_cores: float | None = None
    """Computed: the step on machines with their own cores."""

    @property
    def exposed(self) -> float:
        """How long a step is beyond its compute."""
        return max(0.0, self.step - self.compute)

    @property
    def efficiency(self) -> float:
        """The part of a step that is compute."""
        return self.compute / self.step


def median(rows: Sequence[Row], column: str) -> float:
    """Of a column that all rows have."""
    return float(statistics.median(row[column] for row in rows))


def good_rows(rows: Sequence[Row], method: str) -> list[Row]:
    """The rows of a method that did not fail."""
    return [row for row in rows if row["method"] == method and not row["failed"]]


def own_cores(
    hosts: int, method: str, cpu: float, sent: float, rate: float, buckets: Sequence[Bucket], network: float
) -> float:
    """Seconds of a step on hosts with their own cores, as the module's text says.

    ``cpu``: seconds of a host and step; ``sent``: its bytes; ``network``: CPU seconds a byte.
    """
    moving, wire = network * sent, 8 * sent / rate
    codec = _codec(cpu, sent, network)
    total = sum(bucket.elements for bucket in buckets)
    by_size = [bucket.elements / total for bucket in buckets]
    evenly = [1 / len(buckets)] * len(buckets)
    rounds = ROUND * METHODS[method].rounds(hosts)
    return max(
        step_seconds(
            buckets,
            [rounds + c * codec + max(w * wire, c * moving) for c, w in zip(cpus, by_size, strict=True)],
        )
        for cpus in (by_size, evenly)
    )


def _codec(cpu: float, sent: float, network: float) -> float:
    """CPU that is left when bytes have been moved, at ``network`` a byte."""
    return max(0.0, cpu - network * sent)


def summarise(rows: Sequence[Row], plan: Plan, rate: float | None = None) -> list[Summary]:
    """A summary for each method with rows that did not fail; ``rate`` of the links for what is computed."""
    floor = good_rows(rows, "none")
    idle = median(floor, "cpu_ms") if floor else 0.0
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = good_rows(rows, method)
        if not mine:
            continue
        steps = [row["step_ms"] for row in mine]
        cpu = max(0.0, median(mine, "cpu_ms") - (idle if method != "none" else 0.0))
        found.append(
            Summary(
                *(method, statistics.median(steps), min(steps), max(steps)),
                *(mine[0]["compute_ms"], cpu, sent_bytes(mine)),
            )
        )
    return _with_parts(found, rows[0]["hosts"], plan, rate) if rows else []


def sent_bytes(rows: Sequence[Row]) -> float | None:
    """Bytes a host and step, at the interface or else at the sockets."""
    column = sent_column(rows)
    return None if column is None else median(rows, column)


def sent_column(rows: Sequence[Row]) -> str | None:
    """Where bytes were counted best."""
    for column in ("wire_sent", "socket_sent"):
        if rows and all(row.get(column) is not None for row in rows):
            return column
    return None


def _with_parts(found: list[Summary], hosts: int, plan: Plan, rate: float | None) -> list[Summary]:
    """``found`` with what follows from what `plain` spends on a byte, if that is known."""
    by_name = {each.method: each for each in found}
    plain = by_name.get("plain")
    if plain is None or not plain.sent or "none" not in by_name:
        return found
    network = plain.cpu / plain.sent
    found = [
        each
        if each.sent is None or each.method in ("none", "plain")
        else replace(each, codec=_codec(each.cpu, each.sent, network))
        for each in found
    ]
    if rate is None:
        return found
    several, single = (
        buckets_of(plan.model, plan.elements, plan.bucket_mb, plan.compute, one=one) for one in (False, True)
    )
    result = []
    for each in found:
        seconds = None
        # Rows of a file may name a method that is no more.
        if each.sent is not None and each.method != "none" and each.method in METHODS:
            buckets = single if METHODS[each.method].one_bucket else several
            cpu = 1e-3 * each.cpu
            seconds = own_cores(hosts, each.method, cpu, each.sent, rate, buckets, 1e-3 * network)
        result.append(replace(each, own_cores=None if seconds is None else 1e3 * seconds))
    return result


def table(rows: Sequence[Row], plan: Plan, rate: float | None = None) -> str:
    """Every method on a line, for people; below it what the columns mean."""
    found = {each.method: each for each in summarise(rows, plan, rate)}
    plain = found.get("plain")
    computed = any(each.own_cores is not None for each in found.values())
    head = f"{'method':<22}{'step ms':>9}{'spread':>16}{'times':>7}{'effic.':>8}{'sent':>11}{'% plain':>9}"
    head += f"{'cpu ms':>8}{'codec ms':>10}{'exposed':>9}" + (
        f" | {'computed ms':>11}{'times':>7}" if computed else ""
    )
    lines = [head]
    for name in dict.fromkeys(row["method"] for row in rows):
        if name in found:
            lines.append(_line(found[name], plain, computed))
        else:
            reason = next(row["failed"] for row in rows if row["method"] == name)
            lines.append(f"{name:<22}failed: {reason[:100]}")
    return "\n".join([*lines, "", *_legend(rows, found, computed)] if found else lines)


def _line(each: Summary, plain: Summary | None, computed: bool) -> str:
    times = f"{plain.step / each.step:.2f}" if plain else ""
    sent = "" if each.sent is None else amount(round(each.sent))
    share = f"{100 * each.sent / plain.sent:.2f}" if plain and plain.sent and each.sent is not None else ""
    line = f"{each.method:<22}{each.step:>9.1f}{f'{each.fastest:.1f}-{each.slowest:.1f}':>16}{times:>7}"
    codec = "-" if each.codec is None else f"{each.codec:.1f}"
    line += (
        f"{100 * each.efficiency:>6.1f} %{sent:>11}{share:>9}{each.cpu:>8.1f}{codec:>10}{each.exposed:>9.1f}"
    )
    if computed:
        own, faster = "", ""
        if each.own_cores is not None:
            own = f"{each.own_cores:.1f}"
            faster = f"{plain.own_cores / each.own_cores:.2f}" if plain and plain.own_cores else ""
        line += f" | {own:>11}{faster:>7}"
    return line.rstrip()


def _legend(rows: Sequence[Row], found: dict[str, Summary], computed: bool) -> list[str]:
    repeats = max((len(good_rows(rows, name)) for name in found), default=0)
    where = {
        "wire_sent": "at the interface, all headers included",
        "socket_sent": "at the sockets, no headers",
        None: "not counted here",
    }[sent_column([row for row in rows if not row["failed"]])]
    emulation = ", without the emulation's own" if "none" in found else ""
    lines = [
        f"step: median of {repeats} repeats, and the fastest and slowest; times: faster than plain;",
        f"effic.: compute / step; sent: bytes a host and step, {where};",
        f"cpu: of a host and step{emulation}; codec: of it, what moving bytes as plain does would not take;",
        "exposed: step less compute.",
    ]
    if computed:
        lines.append(
            "COMPUTED from these figures, not measured: the step on hosts that do not share this machine's "
            "cores."
        )
    return lines
