"""The program that runs on every host of a lab: measures methods side by side.

    torchrun --nproc-per-node 4 -m compressed_ddp.lab.bench --elements 2500000 --methods plain,ours-*

One process a host; MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE say where they meet. Rank 0 writes
the rows, and a table to standard error at the end. Compute is emulated (sleep); communication,
and what compression costs, are real.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from datetime import timedelta
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ..models import MODELS
from .emulate import model_shapes, scaled_shapes
from .measure import COLUMNS, Bench, Plan, Row
from .methods import METHODS, pick
from .summary import table

Write = Callable[[Row], None]


def duration(text: str) -> float:
    """Seconds of ``"50ms"`` or ``"0.05s"``."""
    for unit, size in (("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            try:
                seconds = float(text.removesuffix(unit)) * size
            except ValueError:
                break
            if 0 <= seconds < float("inf"):
                return seconds
            break
    raise argparse.ArgumentTypeError(f"{text!r} is no duration: write 50ms or 0.05s")


def add_plan_options(parser: argparse.ArgumentParser, *, methods: str = "all") -> None:
    """A flag for each field of a plan; ``make_plan`` reads them."""
    add, plan = parser.add_argument, Plan()
    names = "all" if methods == "all" else methods.replace("%", "%%")
    add("--methods", default=methods, help=f"names and patterns, with commas between (default: {names})")
    add("--model", default=plan.model, choices=sorted(MODELS), help="whose shapes (default: %(default)s)")
    add("--elements", type=int, help="scale the model, its buckets and small tensors to so many elements")
    add("--ratio", type=float, default=plan.ratio, help="of sparse methods (default: %(default)s)")
    add("--compute", type=duration, default=plan.compute, help="emulated, such as 50ms (the default)")
    add("--steps", type=int, default=plan.steps, help="that count, in each repeat (default: %(default)s)")
    add("--warm-up", type=int, default=plan.warm_up, help="steps before them (default: %(default)s)")
    add("--repeats", type=int, default=plan.repeats, help="of every method (default: %(default)s)")
    add("--bucket-mb", type=float, default=plan.bucket_mb, help="DDP's buckets (default: %(default)s)")
    add("--seed", type=int, default=plan.seed, help="of the gradients (default: %(default)s)")
    add("--timeout", type=float, default=plan.timeout, help="seconds of silence (default: %(default)s)")
    add("--block-seconds", type=float, help="fewer steps count where they would take longer together")


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan that options make; raises ValueError where they make none."""
    chosen = {field.name: getattr(options, field.name) for field in fields(Plan)}
    plan = Plan(**chosen | {"methods": tuple(pick(options.methods.split(",")))})
    if plan.elements is not None:
        scaled_shapes(model_shapes(plan.model), plan.elements)  # too few are refused before anything starts
    return plan


def arguments_for(plan: Plan) -> list[str]:
    """The flags that make ``plan``."""
    given = {field.name: getattr(plan, field.name) for field in fields(Plan)}
    given |= {"methods": ",".join(plan.methods), "compute": f"{plan.compute!r}s"}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Plan]:
    """The options, and the plan they make; exits with a message where they make none."""
    parser = argparse.ArgumentParser(
        prog="python -m compressed_ddp.lab.bench",
        description=__doc__,
        epilog=list_methods(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_plan_options(parser)
    add = parser.add_argument
    add("--out", default="-", help="rows go there: .csv, anything else JSON lines; - is standard output")
    add("--announce", help="file or pipe for a JSON line before and after the steps that count; - as above")
    add("--ack", action="store_true", help="after each announcement wait for a line on standard input")
    add("--no-table", action="store_true", help="rows alone")
    options = parser.parse_args(arguments)
    if options.ack and not options.announce:
        parser.error("--ack waits for answers to announcements: --announce says where those go")
    try:
        return options, make_plan(options)
    except ValueError as error:
        parser.error(str(error))


def list_methods() -> str:
    """Every method with a line about it."""
    return "\n".join(["methods:", *(f"  {name:<22}{method.about}" for name, method in METHODS.items())])


class Announcer:
    """Writes events as JSON lines, and waits for a line in answer where somebody reads along."""

    def __init__(self, out: TextIO, answers: TextIO | None = None) -> None:
        self._out, self._answers = out, answers

    def __call__(self, event: Mapping[str, Any]) -> None:
        print(json.dumps(event), file=self._out, flush=True)
        if self._answers is not None and not self._answers.readline():
            raise EOFError(f"nobody acknowledged {event}: standard input has ended")


@contextmanager
def _open(path: str) -> Iterator[TextIO]:
    if path == "-":
        yield sys.stdout
    else:
        with open(path, "w", newline="", encoding="utf-8") as file:
            yield file


def writer(out: TextIO, *, as_csv: bool, columns: Sequence[str] = COLUMNS) -> Write:
    """A function that writes a row to ``out`` at once."""
    if as_csv:
        rows = csv.DictWriter(out, columns, lineterminator="\n")
        rows.writeheader()

    def write(row: Row) -> None:
        if as_csv:
            rows.writerow(short(row))
        else:
            print(json.dumps(short(row)), file=out)
        out.flush()

    return write


def short(row: Row) -> Row:
    """Milliseconds and bytes need no more than three decimals."""
    shares = ("ratio", "link_share")
    return {
        name: round(value, 3) if isinstance(value, float) and name not in shares else value
        for name, value in row.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write, and return the exit status: 0 even if some methods cannot run here."""
    options, plan = parse(arguments)
    needed = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        print(f"{', '.join(missing)} not set: start it with the lab, or with torchrun", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # many hosts share the cores of one machine
    # Ranks wait here while one of them finds out that a method's group is dead.
    dist.init_process_group("gloo", timeout=timedelta(seconds=4 * plan.timeout + 60))
    try:
        with ExitStack() as stack:
            first = dist.get_rank() == 0
            announce = None
            if first and options.announce:
                answers = sys.stdin if options.ack else None
                announce = Announcer(stack.enter_context(_open(options.announce)), answers)
            bench, rows = Bench(plan, announce), []
            out = stack.enter_context(_open(options.out)) if first else None
            write = writer(out, as_csv=options.out.endswith(".csv")) if out is not None else None
            for row in bench.rows():
                rows.append(row)
                if write is not None:
                    write(row)
            if first and not options.no_table:
                print(table(rows, plan), file=sys.stderr)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
