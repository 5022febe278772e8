"""The labs that scalability_analysis.py measures: what tells rows apart, and what is left to do."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from compressed_ddp.lab.emulate import model_shapes, scaled_shapes
from compressed_ddp.lab.measure import Plan
from compressed_ddp.lab.methods import METHODS, pick
from compressed_ddp.lab.shaping import parse_rate, rate_code

BLOCK = 2.0
"""Seconds that building, attaching and closing take, about."""

Row = dict[str, Any]


class Cell(NamedTuple):
    """A lab: ``rate`` is None on loopback."""

    hosts: int
    rate: str | None


class Key(NamedTuple):
    """What tells a method's rows from others', as text: as a CSV has it."""

    hosts: str
    rate: str
    model: str
    elements: str
    compute: str
    dilation: str
    method: str
    """Empty in a row that says why there are no figures."""
    ratio: str

    @property
    def cell(self) -> tuple[str, ...]:
        """Where it was measured, and with what work: rows are compared within one."""
        return tuple(self[:6])


def key(row: Row) -> Key:
    """Of a row, measured or read."""

    def number(name: str) -> str:
        value = row.get(name)
        return "" if value in (None, "") else f"{float(value):.12g}"

    hosts, rate, model, method = (str(row.get(name) or "") for name in ("hosts", "rate", "model", "method"))
    elements, compute, dilation = (number(name) for name in ("elements", "compute_ms", "dilation"))
    return Key(hosts, rate, model, elements, compute, dilation, method, number("ratio"))


def elements_of(plan: Plan) -> int:
    """How many there really are: scaled shapes are rounded."""
    shapes = model_shapes(plan.model)
    return sum(
        shape.numel() for shape in (shapes if plan.elements is None else scaled_shapes(shapes, plan.elements))
    )


def guess(method: str, plan: Plan, cell: Cell) -> tuple[float, float]:
    """About how many seconds a step takes, and one of the first steps, to plan with."""
    elements = elements_of(plan)
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


def plans(options: argparse.Namespace, cell: Cell, also: Sequence[Key] = ()) -> list[Plan]:
    """A plan for each ratio; methods without one are in the first alone. ``also``: what has rows already."""
    asked = pick(options.methods.split(","))
    there = [each.method for each in also if each.method in METHODS]  # others are no more
    names = [name for name in METHODS if name in asked or name in there]
    ratios = list(dict.fromkeys([*options.ratios, *(float(each.ratio) for each in also if each.ratio)]))
    found = []
    for at, ratio in enumerate(ratios):
        chosen = tuple(name for name in names if at == 0 or METHODS[name].sparse)
        if chosen:
            plan = Plan(
                *(chosen, options.model, scaled(options), ratio, options.compute, options.steps),
                *(options.warm_up, options.repeats),
            )
            found.append(fit(plan, cell, options.budget))
    return found


def scaled(options: argparse.Namespace) -> int | None:
    """The elements that are measured."""
    elements: int | None = options.elements
    if options.dilate == 1:
        return elements
    whole = elements or sum(shape.numel() for shape in model_shapes(options.model))
    return round(whole / options.dilate)


def cells(options: argparse.Namespace) -> list[Cell]:
    """Every lab; the fast and small ones first, so that early rows say something."""
    if options.loopback:
        return [Cell(hosts, None) for hosts in options.hosts]
    rates = sorted((parse_rate(rate) / options.dilate for rate in options.rates), reverse=True)
    return [Cell(hosts, rate_code(rate)) for rate in rates for hosts in options.hosts]


def keys_of(plan: Plan, cell: Cell, dilation: float) -> list[Key]:
    """Of the rows that a plan will give."""
    compute = round(1e3 * plan.compute, 3)  # as rows are written
    work = (plan.model, f"{elements_of(plan):.12g}", f"{compute:.12g}", f"{dilation:.12g}")
    return [
        Key(
            str(cell.hosts),
            cell.rate or "",
            *work,
            name,
            f"{plan.ratio:.12g}" if METHODS[name].sparse else "",
        )
        for name in pick(plan.methods)
    ]


def unfinished(options: argparse.Namespace, cell: Cell, rows: list[Row]) -> list[Plan]:
    """What is to be measured of a lab: nothing if the file has it all, of one run, else all of it.

    Rows of different runs are not compared: the machine may have been busier, or the code another.
    """
    asked = plans(options, cell)
    here = keys_of(asked[0], cell, options.dilate)[0].cell
    mine = [(each, row) for row in rows if (each := key(row)).cell == here]
    # A lab is measured before it is used: rows with another share of the rate are of another one.
    if len({(row.get("commit"), row.get("link_share")) for each, row in mine if each.method}) > 1:
        return plans(options, cell, [each for each, _ in mine])
    for plan in asked:
        for wanted in keys_of(plan, cell, options.dilate):
            found = [row for each, row in mine if each == wanted]
            if len(found) < plan.repeats and not any(row["failed"] for row in found):
                return plans(options, cell, [each for each, _ in mine])
    return []
