"""Tables of what the lab measured: step times, and bytes by number of hosts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..lab.measure import Plan
from ..lab.methods import METHODS
from ..lab.summary import Summary, summarise
from ..metrics import amount
from .figures import (
    PLAIN,
    Setting,
    good,
    headline,
    is_ours,
    median,
    millions,
    of,
    refused,
    sent,
    settings,
    title,
    whole_model,
)
from .grid import NONE, Grid, Notes, share
from .sources import Row, Table

COMPUTED = "COMPUTED, own cores: step, ms (times faster)"


def _methods(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def summaries(rows: Sequence[Row], setting: Setting) -> dict[str, Summary]:
    """What the lab itself says about the good rows of a setting, by method: docs/lab.md has the columns.

    The step on hosts with cores of their own is computed from whole runs alone: a dilated one has but a
    part of the CPU work that it stands for.
    """
    mine = of(rows, setting)
    plan = Plan(model=setting.model, elements=setting.elements, compute=setting.compute_ms / 1e3)
    rate = setting.rate_bits if setting.dilation == 1 else 0.0
    return {each.method: each for each in summarise(mine, plan, rate or None)}


def comparable(method: str, setting: Setting) -> bool:
    """Whether a dilated run of it stands for the whole one: bytes of low-rank methods do not shrink alike."""
    low_rank = method in METHODS and METHODS[method].low_rank
    return setting.dilation == 1 or not low_rank


def note_of(rows: Iterable[Row]) -> str:
    """What the file says must be known about some rows, each thing once."""
    return "; ".join(dict.fromkeys(part for row in rows if row["note"] for part in row["note"].split("; ")))


def steps(table: Table, rate: float | None = None) -> Grid | None:
    """All methods in the headline's setting; in that of another ``rate``, if there are rows of it."""
    rows = good(table.rows)
    setting = headline(rows, rate)
    if setting is None:
        return None
    mine = of(rows, setting)
    found, notes = summaries(mine, setting), Notes()
    plain = found.get(PLAIN)
    computed = any(each.own_cores is not None for each in found.values())
    lines: list[list[str]] = []
    strong = set()
    for method, each in found.items():
        if is_ours(method):
            strong.add(len(lines))
        line = [
            title(method) + notes.mark(note_of(of(mine, setting, method))),
            f"{each.step:.1f} ({each.fastest:.1f} to {each.slowest:.1f})",
            share(plain.step if plain else None, each.step),
            f"{100 * each.efficiency:.1f}",
            f"{each.cpu:.1f}",
            NONE if each.codec is None else f"{each.codec:.1f}",
            f"{each.exposed:.1f}",
            amount(None if each.sent is None else round(each.sent)),
            share(each.sent, plain.sent if plain else None, 100),
        ]
        lines.append([*line, own_cores(each, plain)] if computed else line)
    head = [
        *("method", "step, ms (least to most)", "times faster", "efficiency, %", "CPU, ms"),
        *(
            "compression CPU, ms",
            "exposed, ms",
            "sent by a host",
            "% of plain",
            *([COMPUTED] if computed else []),
        ),
    ]
    failed = {
        row["method"]: row["failed"] for row in of(table.rows, setting) if row["failed"] and row["method"]
    }
    lines += [
        [title(name) + notes.mark(_reason(why)), "does not run here", *[NONE] * (len(head) - 2)]
        for name, why in failed.items()
        if name not in found
    ]
    return Grid(_caption(setting, mine, found, computed), head, lines, frozenset(strong), notes.lines())


def slow_steps(table: Table) -> Grid | None:
    """All methods at 100 Mbit/s."""
    return steps(table, 1e8)


def own_cores(each: Summary, plain: Summary | None, step: str = "{:.1f}", times: str = "{:.2f}") -> str:
    """The computed step, and how many times faster than plain DDP's."""
    if each.own_cores is None:
        return NONE
    faster = share(plain.own_cores if plain else None, each.own_cores, form=times)
    return f"{step.format(each.own_cores)} ({faster})"


def _caption(setting: Setting, rows: Sequence[Row], found: dict[str, Summary], computed: bool) -> str:
    repeats = max(len(of(rows, setting, method)) for method in found)
    floor = " less that without communication" if "none" in found else ""
    words = (
        f"{setting.model}, {setting}, {setting.compute_ms:g} ms of emulated compute; medians of {repeats} "
        "repeats. A step is as long as its slowest host's; efficiency: compute by step; exposed: step less "
        f"compute; CPU: of a host and step{floor}; compression CPU: of that, what remains when bytes are "
        "moved at plain DDP's price a byte"
    )
    return words + ("; computed, not measured: hosts that share no cores" if computed else "")


def _fastest(rows: Sequence[Row], names: Iterable[str]) -> tuple[float, str] | None:
    """The fastest of some methods: milliseconds and name."""
    found = []
    for method in names:
        ms = median([row for row in rows if row["method"] == method], "step_ms")
        if ms is not None:
            found.append((ms, method))
    return min(found, default=None)


def everywhere(table: Table) -> Grid | None:
    """Every setting: plain DDP, the best of torch's hooks, ours by each collective; losing ones too."""
    rows, lines, notes = good(table.rows), [], Notes()
    names = set(_methods(rows))
    ways: list[str] = [name for name in ("ours-allgather-int8", "ours-sharded-int8") if name in names]
    hooks = [name for name in _methods(rows) if name in ("fp16", "bf16") or name.startswith("powersgd")]
    aside = [name for name in hooks if any(not comparable(name, each) for each in settings(rows))]
    for setting in settings(rows):
        mine = of(rows, setting)
        plain = median(of(mine, setting, PLAIN), "step_ms")
        hook = _fastest(mine, [name for name in hooks if comparable(name, setting)])
        ours = {name: median(of(mine, setting, name), "step_ms") for name in ways}
        known = {name: ms for name, ms in ours.items() if ms is not None}
        if plain is None or not known:
            continue
        apart = {name: None if comparable(name, setting) else _fastest(mine, [name]) for name in aside}
        lines.append(
            [
                str(setting),
                f"{plain:.1f}",
                NONE if hook is None else f"{hook[0]:.1f} ({title(hook[1])}{_mark(hook, mine, notes)})",
                *(
                    NONE if each is None else f"{each[0]:.1f}{_mark(each, mine, notes)}"
                    for each in apart.values()
                ),
                *(NONE if ms is None else f"{ms:.1f} ({plain / ms:.2f})" for ms in ours.values()),
                _verdict(
                    known, min(plain, hook[0] if hook else plain), [each for each in apart.values() if each]
                ),
            ]
        )
    head = [
        *("setting", "plain DDP, ms", "best torch hook, ms"),
        *(f"{title(name)}, ms: not comparable" for name in aside),
        *(f"{title(name)}, ms (times faster than plain)" for name in ways),
        "against plain DDP and the best " + ("comparable hook" if aside else "hook"),
    ]
    for setting, why in refused(table.rows).items():
        told = f"{setting.hosts} hosts at {setting.rate}: not reported, {_reason(why)}"
        lines.append([told, *[NONE] * (len(head) - 1)])
    if not lines:
        return None
    return Grid("Every setting that was measured", head, lines, notes=notes.lines())


def _reason(why: str) -> str:
    """Why a row failed, in short: no kind of error before it, nothing in brackets or below it."""
    return re.sub(r"^\w+Error: ", "", why.split("\n")[0]).split(" (")[0].rstrip(":")


def _mark(found: tuple[float, str], rows: Sequence[Row], notes: Notes) -> str:
    return notes.mark(note_of(row for row in rows if row["method"] == found[1]))


def _verdict(ours: dict[str, float], best: float, apart: Sequence[tuple[float, str]]) -> str:
    """Which of ours is faster than ``best``. What stands ``apart`` took too long here, so being faster than
    that says nothing; being slower does."""
    names = {name: title(name).removeprefix("ours: ") for name in ours}
    winning = [names[name] for name, ms in ours.items() if ms < best]
    words = "loses" if not winning else "wins" if len(winning) == len(ours) else f"{winning[0]} wins"
    for step, other in apart:
        slower = [names[name] for name, ms in ours.items() if ms >= step]
        words += f"; {' and '.join(slower)} slower than {title(other)}" if slower else ""
    return words


def traffic(table: Table) -> Grid | None:
    """Bytes a step and host by number of hosts, and their share of plain DDP's; one rate, the whole model."""
    rows, hosts = whole_model(table.rows)
    if not rows:
        return None

    def by_hosts(method: str) -> dict[int, float | None]:
        mine = [row for row in rows if row["method"] == method]
        return {n: sent([row for row in mine if row["hosts"] == n]) for n in hosts}

    plain, lines, notes = by_hosts(PLAIN), [], Notes()
    for method in _methods(rows):
        found = by_hosts(method)
        if method == "none" or not any(found.values()):
            continue
        cells = [
            NONE
            if size is None
            else amount(round(size)) + ("" if method == PLAIN else f" ({share(size, plain[n], 100)} %)")
            for n, size in found.items()
        ]
        mark = notes.mark(note_of(row for row in rows if row["method"] == method))
        lines.append([title(method) + mark, *cells, _growth(found.get(4), found.get(16))])
    head = ("method", *(f"{n} hosts" for n in hosts), "4 to 16 hosts")
    where = settings(rows)[0]
    caption = (
        f"Sent by a host in a step (share of plain DDP's), {millions(where.elements)} elements, "
        f"all at {where.rate}"
    )
    if where.dilation != 1:
        caption += f", dilated {where.dilation:g} times: bytes are those that really went"
    return Grid(caption, head, lines, notes=notes.lines())


def _growth(before: float | None, after: float | None) -> str:
    return f"{100 * (after / before - 1):+.0f} %" if before and after else NONE
