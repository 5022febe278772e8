"""How a step and its traffic grow: hosts by rates by methods, on the shaped network of the lab.

Every (hosts, rate) is a lab of its own, measured before it is used: where the machine does not hold the
rate on all links at once, no figures are reported; the CSV then has one row that says why. One row a
method and repeat, written at once; started again, it goes on with the labs that are not complete. Those
are measured anew as a whole, with all methods and ratios that the file has of them: figures that are
compared are always of one run. Compute is emulated.

A cell may take `--budget` seconds or so. Where a step is slow, fewer steps of each repeat count; only if
even one a repeat is too much are there fewer repeats.

`--dilate 10` lets few cores stand for many hosts: a tenth of the elements on links of a tenth of the rate
take the same time on the wire, and less CPU: what is paid by the byte becomes a tenth, what is paid by the
message does not. Those rows go to a file of their own; in them `elements`, `rate` and `rate_bits` are what
really ran, and `dilation` says what to multiply both with.

    python experiments/scalability_analysis.py --hosts 2,4,8,16 --rates 100mbit,1gbit,10gbit   # as root
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from lab_cells import Cell, Key, Row, cells, elements_of, key, keys_of, plans, unfinished
from origin import origin
from pages import ROOT
from rows import append as grow
from rows import read

from compressed_ddp.lab import Lab, LabError, LaunchFailed, Loopback, Network, check, missing
from compressed_ddp.lab.bench import duration, short
from compressed_ddp.lab.hosts import MOST_HOSTS
from compressed_ddp.lab.measure import Plan
from compressed_ddp.lab.methods import METHODS
from compressed_ddp.lab.progress import BlockProgress
from compressed_ddp.lab.session import COLUMNS as MEASURED
from compressed_ddp.lab.session import link_share, measure, place
from compressed_ddp.lab.shaping import parse_rate
from compressed_ddp.lab.summary import table
from compressed_ddp.models import MODELS

METHODS_HERE = "none,plain,fp16,powersgd-1,powersgd-4,writeup-*,ours-allgather-int8,ours-sharded-int8"
ORIGIN = ("command", "commit", "version", "machine")
COLUMNS = (*ORIGIN, *MEASURED, "dilation")
GROWTH = ("ours-allgather-int8", "ours-sharded-int8")


def append(path: Path, rows: list[Row]) -> None:
    """Add rows, figures shortened."""
    grow(path, COLUMNS, map(short, rows))


def drop(path: Path, cell: Cell, left: list[Plan], dilation: float) -> None:
    """Take the rows of a lab out, which will be measured again; those of other work on it stay."""
    (one, *_) = keys_of(left[0], cell, dilation)

    def goes(row: Row) -> bool:
        mine = key(row)
        if not mine.method and not mine.elements:  # a refusal, written before anything was known
            mine = mine._replace(elements=one.elements)
        return mine.cell == one.cell

    rows = read(path)
    kept = [row for row in rows if not goes(row)]
    if len(kept) < len(rows):
        # In one move: whoever is stopped here has either all rows or those that stay.
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.unlink(missing_ok=True)
        append(part, kept)
        os.replace(part, path)


# --- measuring -----------------------------------------------------------------------------


def run(cell: Cell, left: list[Plan], about: Row, path: Path) -> None:
    """Measure one lab; rows go to the file as they come."""
    network: Network = Loopback(cell.hosts) if cell.rate is None else Lab(cell.hosts, cell.rate)
    with network:
        try:
            share = None if network.rate is None else link_share(check(network), network.rate)
        except LabError as error:
            say(f"{network.describe()}: not reported\n{error}")
            why = {"elements": elements_of(left[0]), "failed": str(error).splitlines()[0]}
            append(path, [about | place(network, left[0]) | why])
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
                died = {
                    "elements": elements_of(plan),
                    "ratio": plan.ratio,
                    "failed": str(error).splitlines()[0],
                }
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
    series: dict[Key, dict[int, float]] = {}
    for each in sorted(bytes_of, key=lambda each: (each[1:], int(each.hosts))):
        if each.method in (*GROWTH, "plain"):
            idle = bytes_of.get(each._replace(method="none", ratio=""), 0.0)
            series.setdefault(each._replace(hosts=""), {})[int(each.hosts)] = bytes_of[each] - idle
    lines = ["MB a host and step at the interface, and against the fewest hosts:"]
    for each, found in series.items():
        first = found[min(found)]
        figures = ", ".join(f"{n}: {moved / 1e6:.3f} ({moved / first:.2f})" for n, moved in found.items())
        lines.append(f"  {each.rate:<8} {each.model} {each.method:<20} {each.ratio:<6} {figures}")
    return "\n".join(lines) if series else "no bytes at interfaces: no growth to show"


def numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    for hosts in found:
        if not 2 <= hosts <= MOST_HOSTS:
            raise argparse.ArgumentTypeError(f"{hosts} hosts: a lab has 2 to {MOST_HOSTS}")
    return found


def ratios(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def rates(text: str) -> list[str]:
    try:
        for part in text.split(","):
            parse_rate(part)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text.split(",")


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, plan = parser.add_argument, Plan()
    add("--hosts", type=numbers, default=[2, 4, 8, 16], help="with commas between (default: 2,4,8,16)")
    add(
        "--rates",
        type=rates,
        default="100mbit,1gbit,10gbit",
        help="with commas between (default: %(default)s)",
    )
    add("--methods", default=METHODS_HERE, help="names and patterns (default: %(default)s)")
    add(
        "--ratios", type=ratios, default=[0.01], help="of sparse methods, with commas between (default: 0.01)"
    )
    add("--model", default=plan.model, choices=sorted(MODELS), help="whose shapes (default: %(default)s)")
    add("--elements", type=int, help="scale the model to so many")
    add("--dilate", type=positive, default=1.0, help="divide elements and rates by this (default: 1)")
    add("--compute", type=duration, default=plan.compute, help="emulated (default: 50ms)")
    add(
        "--steps", type=int, default=plan.steps, help="that count in a repeat, at most (default: %(default)s)"
    )
    add("--warm-up", type=int, default=plan.warm_up, help="steps before them (default: %(default)s)")
    add("--repeats", type=int, default=plan.repeats, help="of every method (default: %(default)s)")
    add("--budget", type=positive, default=1800.0, help="seconds for a lab and ratio, about (default: 1800)")
    add("--loopback", action="store_true", help="no lab, no rates: to try it out")
    add("--out", type=Path, help="default: results/scalability_analysis.csv, or scalability_dilated.csv")
    options = parser.parse_args(arguments)
    if options.out is None:
        name = "scalability_analysis" if options.dilate == 1 else "scalability_dilated"
        options.out = ROOT / "results" / f"{name}.csv"
    lacking = missing()
    if lacking and not options.loopback:
        parser.error(f"no lab here: {lacking}. --loopback goes without one, and says nothing about networks")
    try:
        for cell in cells(options):
            plans(options, cell)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> None:
    options = parse()
    about = {**origin(), "dilation": f"{options.dilate:g}"}
    for cell in cells(options):
        left = unfinished(options, cell, read(options.out))
        if left:
            drop(options.out, cell, left, options.dilate)
            run(cell, left, about, options.out)
        else:
            say(f"{cell.hosts} hosts, {cell.rate}: measured already")
    print(growth(read(options.out)))
    print(f"\nrows in {options.out}")


if __name__ == "__main__":
    main()
