"""Three suites over one table of methods (tests/method_rows.py), on three real gloo processes.

Conformance: replicas are the same to the bit, and an overflow on a random rank in a random step, and in one
that every row has, changes nothing on any. Conservation: the law, or EF21's own. Exact resume: saved in the
middle and begun anew.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from itertools import islice
from typing import Any, get_args

import pytest
import torch
from ef21_law import astray
from method_jobs import LOCAL, SAVED, STEPS, SURE, WANTED, every_law, everything_sent, overflows
from method_rows import ROWS, Row
from pool import Pool
from torch import nn

from compressed_ddp import SplitAdam, SplitSGD, optim, schedules
from compressed_ddp.optim import SplitOptimizer
from compressed_ddp.training.config import Optimisation, Optimizer
from compressed_ddp.training.optimise import make_optimizer
from compressed_ddp.types import MEMORIES

Ran = Callable[[str, str], list[dict[str, Any]]]
EVERY = [pytest.param(name, way, id=f"{name}-{way}") for name in ROWS for way in ("allgather", "sharded")]
METHODS = pytest.mark.parametrize(("name", "way"), EVERY)


@pytest.fixture(scope="module")
def ran(pool: Pool) -> Ran:
    """What came of a row, by rank; each is run once, for all suites."""
    done: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def run(name: str, way: str) -> list[dict[str, Any]]:
        if (name, way) not in done:
            done[name, way] = pool.run(3, every_law, name, way)
        return done[name, way]

    return run


@METHODS
def test_replicas_agree_and_an_overflow_changes_nothing(ran: Ran, name: str, way: str) -> None:
    row, ranks = ROWS[name], ran(name, way)
    for found in ranks:
        assert torch.equal(found["parameters"], ranks[0]["parameters"])
        assert found["untouched"] and found["noted"] == found["planted"] >= found["checked"] > 0
        assert 0 < found["saved_percent"] < 100
        assert found["scales"] > 1 or row.precision != "fp16", "the loss scale never changed"
        if row.local:
            assert found is ranks[0] or not torch.equal(found["apart"], ranks[0]["apart"])
        else:
            assert found["layouts"] > 1, "DDP did not rebuild its buckets: the test tests less than it says"
    assert torch.isfinite(ranks[0]["parameters"]).all()


@METHODS
def test_nothing_is_lost(ran: Ran, name: str, way: str) -> None:
    for found in ran(name, way):
        assert found["law"] < 1e-5


@METHODS
def test_resume_is_exact(ran: Ran, name: str, way: str) -> None:
    """What is remembered before compression, weights, and the optimizer's own state."""
    for found in ran(name, way):
        assert found["resumed"] == [True, True, True]


def test_with_everything_sent_it_is_plain_ddp(pool: Pool) -> None:
    """Behind the compression nothing differs: torch's optimizers, accumulation, precisions, clipping."""
    for found in pool.run(2, everything_sent):
        assert {"momentum", "nesterov", "adamw", "accumulation", "bf16", "fp16", "clipped behind it"} <= set(
            found
        )
        for name, (plain, ours) in found.items():
            assert torch.equal(plain, ours), name
        assert not torch.equal(found["momentum"][0], found["clipped behind it"][0])


def test_the_table_has_every_method() -> None:
    """Every memory, schedule, optimizer of the application, and optimizer in two halves is in some row."""
    weights = [nn.Parameter(torch.zeros(3))]
    made = {type(row.optimizer(weights)) for row in ROWS.values()}
    halves = {kind for kind in vars(optim).values() if isinstance(kind, type)} - {SplitOptimizer}
    assert halves <= made and halves == set(WANTED)
    for name in get_args(Optimizer):
        assert type(make_optimizer(Optimisation(optimizer=name), nn.Linear(2, 2))) in made
    assert {row.config.get("memory", "ef") for row in ROWS.values()} == set(MEMORIES)
    ours = {each.__name__ for each in vars(schedules).values() if inspect.isfunction(each)} - {"check_ratio"}
    assert {row.ratio.__qualname__.split(".")[0] for row in ROWS.values()} >= ours
    assert {row.precision for row in ROWS.values()} == {"fp32", "bf16", "fp16"}


def test_the_table_has_every_way_to_train() -> None:
    """Each switch on and off: what a row has set by hand is not found by the names of its parts."""
    weights = [nn.Parameter(torch.zeros(3))]
    switches: dict[str, Callable[[Row], object]] = {
        "local steps": lambda row: bool(row.local),
        "outer nesterov": lambda row: row.local.get("nesterov", True) if row.local else None,
        "adaptive": lambda row: bool(row.config.get("adapt_every")),
        "adaptive, local steps": lambda row: bool(row.config.get("adapt_every") and row.local),
        "EF21, local steps": lambda row: bool(row.config.get("memory") and row.local),
        "accumulation": lambda row: row.micro > 1,
        "accumulation, two halves": lambda row: row.micro > 1 and isinstance(of(row), SplitOptimizer),
        "clipped behind it": lambda row: row.clip is not None,
        **{
            f"{kind.__name__}.{switch}": lambda row, kind=kind, switch=switch: (
                setting(of(row), switch) if type(of(row)) is kind else None
            )
            for kind, switch in [
                *((SplitSGD, switch) for switch in ("masking", "nesterov", "momentum", "max_norm")),
                *(
                    (SplitAdam, switch)
                    for switch in ("max_norm", "beta1", "freeze", "decoupled_weight_decay")
                ),
                (torch.optim.SGD, "nesterov"),
            ]
        },
    }

    def of(row: Row) -> torch.optim.Optimizer:
        return row.optimizer(weights)

    def setting(optimizer: torch.optim.Optimizer, name: str) -> bool:
        return bool(getattr(optimizer, name, None) or optimizer.param_groups[0].get(name))

    for what, switch in switches.items():
        assert True in {switch(row) for row in ROWS.values()}, f"no row has {what}"
    for what in (
        *("outer nesterov", "SplitSGD.masking", "SplitSGD.momentum", "SplitSGD.max_norm"),
        *("SplitAdam.beta1", "SplitAdam.freeze", "SplitAdam.decoupled_weight_decay"),
    ):
        assert False in {switches[what](row) for row in ROWS.values()}, f"no row is without {what}"


def test_the_table_plants_overflows_and_saves_between_meetings() -> None:
    rows = [list(islice(overflows(name, 3), STEPS)) for name in ROWS]
    hits = [hit for row in rows for step, hit in enumerate(row) if step != SURE]
    assert set(hits) == {-1, 0, 1, 2} and 0.1 < 1 - hits.count(-1) / len(hits) < 0.3
    assert {row[SURE] for row in rows} == {0, 1, 2}
    assert SAVED % LOCAL and STEPS % LOCAL and 1 < SAVED <= SURE and (SURE + 1) % LOCAL == 0


def test_an_estimate_that_goes_astray_is_seen() -> None:
    """The law of EF21 above can break: g_i that moves the wrong way, too far, or by what others sent."""
    target, old, message = torch.tensor([3.0, -1.0]), torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])
    assert astray(target, old, old + message, message) == 0.0
    assert astray(target, old, old - message, message) == math.inf
    assert astray(target, old, old + message / 2, message) > 0.1
    assert astray(target, old, old, message) > 0.1
    assert astray(target, old, old + message.flip(0), message) == math.inf
    assert astray(target, old, target, message) > 0.1
