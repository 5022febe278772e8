"""How a step and its traffic grow: hosts by rates by methods, on the shaped network of the lab.

Every (hosts, rate) is a lab of its own, measured before it is used: where the machine does not hold the
rate on all links at once, no figures are reported; the CSV then has one row that says why. One row a
method and repeat, written at once; started again, it goes on where it was stopped. Compute is emulated.

A cell may take `--budget` seconds or so. Where a step is slow, fewer steps of each repeat count; only if
even one a repeat is too much are there fewer repeats.

`--dilate 10` lets few cores stand for many hosts: a tenth of the elements on links of a tenth of the rate
take the same time on the wire, and a tenth of the CPU. Those rows go to a file of their own; in them
`elements`, `rate` and `rate_bits` are what really ran, and `dilation` says what to multiply both with.

    python experiments/scalability_analysis.py --hosts 2,4,8,16 --rates 100mbit,1gbit,10gbit   # as root
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from origin import origin
from pages import ROOT
from rows import append as grow
from rows import read

from compressed_ddp.lab import Lab, LabError, LaunchFailed, Loopback, Network, check, missing
from compressed_ddp.lab.bench import duration, short
from compressed_ddp.lab.emulate import model_shapes
from compressed_ddp.lab.measure import Plan
from compressed_ddp.lab.methods import METHODS, pick
from compressed_ddp.lab.progress import BlockProgress
from compressed_ddp.lab.session import COLUMNS as MEASURED
from compressed_ddp.lab.session import link_share, measure, place
from compressed_ddp.lab.shaping import parse_rate, rate_code
from compressed_ddp.lab.summary import table
from compressed_ddp.models import MODELS

METHODS_HERE = "none,plain,fp16,powersgd-1,powersgd-4,writeup-*,ours-allgather-int8,ours-sharded-int8"
ORIGIN = ("command", "commit", "version", "machine")
COLUMNS = (*ORIGIN, *MEASURED, "dilation")
GROWTH = ("ours-allgather-int8", "ours-sharded-int8")
BLOCK = 2.0
"""Seconds that building, attaching and closing take, about."""

Row = dict[str, Any]
Key = tuple[str, str, str, str]


class Cell(NamedTuple):
    """A lab: ``rate`` is None on loopback."""

    hosts: int
    rate: str | None


def append(path: Path, rows: list[Row]) -> None:
    """Add rows, figures shortened."""
    grow(path, COLUMNS, map(short, rows))


def key(row: Row) -> Key:
    """What tells a method's rows from others', as text: as a CSV has it."""
    hosts, rate, method, ratio = (row[name] for name in ("hosts", "rate", "method", "ratio"))
    return str(hosts), rate or "", method or "", "" if ratio in (None, "") else f"{float(ratio):g}"


# --- planning ------------------------------------------------------------------------------


def guess(method: str, plan: Plan, cell: Cell) -> tuple[float, float]:
    """About how many seconds a step takes, and one of the first steps, to plan with."""
    elements = plan.elements or sum(shape.numel() for shape in model_shapes(plan.model))
    rate = 10e9 if cell.rate is None else parse_rate(cell.rate)
    work = plan.compute + 1.5e-8 * elements * max(1.0, cell.hosts / (os.cpu_count() or 1))
    ring = 1.1 * 8 * 8 * elements * (cell.hosts - 1) / cell.hosts / rate
    share = {"plain": 1.0, "writeup-dense": 1.0, "fp16": 0.5, "bf16": 0.5, "none": 0.0}.get(method, 0.05)
    first = ring if METHODS[method].low_rank else share * ring  # it begins after two dense steps
    return work + share * ring, work + first


def fit(plan: Plan, cell: Cell, budget: float) -> Plan:
    """The plan with fewer steps, and if need be fewer repeats, so that it takes about ``budget`` seconds."""
    guesses = [guess(name, plan, cell) for name in pick(plan.methods)]
    fixed = sum(BLOCK + plan.warm_up * first for _, first in guesses)
    once = fixed + sum(step for step, _ in guesses)
    repeats = max(1, min(plan.repeats, int(budget / once)))
    spare = max(0.1, (budget / repeats - fixed) / len(guesses))
    return dataclasses.replace(plan, repeats=repeats, block_seconds=spare)


def plans(options: argparse.Namespace, cell: Cell) -> Iterator[Plan]:
    """A plan for each ratio; methods without one are in the first alone."""
    names = pick(options.methods.split(","))
    elements = options.elements
    if options.dilate != 1:
        whole = elements or sum(shape.numel() for shape in model_shapes(options.model))
        elements = round(whole / options.dilate)
    for at, ratio in enumerate(options.ratios):
        chosen = tuple(name for name in names if at == 0 or METHODS[name].sparse)
        if chosen:
            plan = Plan(
                *(chosen, options.model, elements, ratio, options.compute, options.steps),
                *(options.warm_up, options.repeats),
            )
            yield fit(plan, cell, options.budget)


def cells(options: argparse.Namespace) -> list[Cell]:
    """Every lab; the fast and small ones first, so that early rows say something."""
    if options.loopback:
        return [Cell(hosts, None) for hosts in options.hosts]
    rates = sorted((parse_rate(rate) / options.dilate for rate in options.rates), reverse=True)
    return [Cell(hosts, rate_code(rate)) for rate in rates for hosts in options.hosts]


def unfinished(plan: Plan, cell: Cell, rows: list[Row]) -> Plan | None:
    """What of ``plan`` is still to be measured; None if nothing."""
    left = []
    for name in pick(plan.methods):
        ratio = f"{plan.ratio:g}" if METHODS[name].sparse else ""
        mine = [row for row in rows if key(row) == (str(cell.hosts), cell.rate or "", name, ratio)]
        if len(mine) < plan.repeats and not any(row["failed"] for row in mine):
            left.append(name)
    return dataclasses.replace(plan, methods=tuple(left)) if left else None


def drop(path: Path, cell: Cell, left: list[Plan]) -> None:
    """Take rows out that will be measured again, and the refusal of this lab."""
    again = {
        (name, f"{plan.ratio:g}" if METHODS[name].sparse else "") for plan in left for name in plan.methods
    }
    mine = (str(cell.hosts), cell.rate or "")
    rows = read(path)
    kept = [row for row in rows if key(row)[:2] != mine or (key(row)[2] and key(row)[2:] not in again)]
    if len(kept) < len(rows):
        path.unlink()
        append(path, kept)


# --- measuring -----------------------------------------------------------------------------


def run(cell: Cell, left: list[Plan], about: Row, path: Path) -> None:
    """Measure one lab; rows go to the file as they come."""
    network: Network = Loopback(cell.hosts) if cell.rate is None else Lab(cell.hosts, cell.rate)
    with network:
        try:
            share = None if network.rate is None else link_share(check(network), network.rate)
        except LabError as error:
            say(f"{network.describe()}: not reported\n{error}")
            append(path, [about | place(network, left[0]) | {"failed": str(error).splitlines()[0]}])
            return
        dense: list[Row] = []
        for plan in left:
            say(f"{network.describe()}, ratio {plan.ratio:g}: {plan.repeats} repeats of {len(plan.methods)}")
            try:
                with BlockProgress(plan) as progress:

                    def tell(row: Row, progress: BlockProgress = progress) -> None:
                        append(path, [about | row])
                        progress(row)

                    rows = measure(network, plan, share, tell)
            except LaunchFailed as error:
                say(f"a process died, on with the next: {error}")
                died = {"ratio": plan.ratio, "failed": str(error).splitlines()[0]}
                append(path, [about | place(network, plan, share) | died])
                continue
            shown = table([*dense, *rows], plan, network.rate)
            print(f"\n{network.describe()}, ratio {plan.ratio:g}\n\n{shown}\n")
            dense += [row for row in rows if not METHODS[row["method"]].sparse]
            sys.stdout.flush()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- telling -------------------------------------------------------------------------------


def growth(rows: list[Row]) -> str:
    """Bytes a host and step by number of hosts, without what the harness itself exchanges (`none`)."""
    sent: dict[Key, list[float]] = {}
    for row in rows:
        if not row["failed"] and row["wire_sent"]:
            sent.setdefault(key(row), []).append(float(row["wire_sent"]))
    bytes_of = {each: statistics.median(found) for each, found in sent.items()}
    hosts = sorted({int(each[0]) for each in bytes_of})
    lines = ["MB a host and step at the interface, and against the fewest hosts:"]
    for rate, method, ratio in sorted({each[1:] for each in bytes_of if each[2] in (*GROWTH, "plain")}):
        found = {
            n: bytes_of[str(n), rate, method, ratio] - bytes_of.get((str(n), rate, "none", ""), 0.0)
            for n in hosts
            if (str(n), rate, method, ratio) in bytes_of
        }
        first = found[min(found)]
        figures = ", ".join(f"{n}: {moved / 1e6:.3f} ({moved / first:.2f})" for n, moved in found.items())
        lines.append(f"  {rate:<8} {method:<20} {ratio:<6} {figures}")
    return "\n".join(lines) if len(lines) > 1 else "no bytes at interfaces: no growth to show"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def ratios(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, plan = parser.add_argument, Plan()
    add("--hosts", type=numbers, default=[2, 4, 8, 16], help="with commas between (default: 2,4,8,16)")
    add("--rates", default="100mbit,1gbit,10gbit", help="with commas between (default: %(default)s)")
    add("--methods", default=METHODS_HERE, help="names and patterns (default: %(default)s)")
    add(
        "--ratios", type=ratios, default=[0.01], help="of sparse methods, with commas between (default: 0.01)"
    )
    add("--model", default=plan.model, choices=sorted(MODELS), help="whose shapes (default: %(default)s)")
    add("--elements", type=int, help="scale the model to so many")
    add("--dilate", type=float, default=1.0, help="divide elements and rates by this (default: 1)")
    add("--compute", type=duration, default=plan.compute, help="emulated (default: 50ms)")
    add(
        "--steps", type=int, default=plan.steps, help="that count in a repeat, at most (default: %(default)s)"
    )
    add("--warm-up", type=int, default=plan.warm_up, help="steps before them (default: %(default)s)")
    add("--repeats", type=int, default=plan.repeats, help="of every method (default: %(default)s)")
    add("--budget", type=float, default=1800.0, help="seconds for a lab and ratio, about (default: 1800)")
    add("--loopback", action="store_true", help="no lab, no rates: to try it out")
    add("--out", type=Path, help="default: results/scalability_analysis.csv, or scalability_dilated.csv")
    options = parser.parse_args(arguments)
    options.rates = options.rates.split(",")
    if options.out is None:
        name = "scalability_analysis" if options.dilate == 1 else "scalability_dilated"
        options.out = ROOT / "results" / f"{name}.csv"
    lacking = missing()
    if lacking and not options.loopback:
        parser.error(f"no lab here: {lacking}. --loopback goes without one, and says nothing about networks")
    try:
        for cell in cells(options):
            list(plans(options, cell))
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> None:
    options = parse()
    about = {**origin(), "dilation": f"{options.dilate:g}"}
    for cell in cells(options):
        left = [
            rest
            for plan in plans(options, cell)
            if (rest := unfinished(plan, cell, read(options.out))) is not None
        ]
        if left:
            drop(options.out, cell, left)
            run(cell, left, about, options.out)
        else:
            say(f"{cell.hosts} hosts, {cell.rate}: measured already")
    print(growth(read(options.out)))
    print(f"\nrows in {options.out}")


if __name__ == "__main__":
    main()
