"""SplitAdam's other sides: a first moment, a second one that is frozen, an L2 penalty."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from comparing import same
from halves import EXACT, LAYOUT, SHAPES, give, gradient, joined, parameters, reducer
from torch import Tensor, nn

from compressed_ddp import SplitAdam, reshard_states
from compressed_ddp.communication import Reducer, run_in_process
from compressed_ddp.layout import BucketLayout
from compressed_ddp.types import Slot, Transport

OPTIONS = {"lr": 0.02, "beta": 0.98, "eps": 1e-8}
STEPS, ABSENT, ASLEEP = 9, 4, 6
"""Parameter ``late`` has no gradient in the first ``ABSENT`` steps, some entries in the first ``ASLEEP``."""


def given(step: int, rank: int = 0) -> Tensor:
    """A gradient of which parts come later."""
    flat = gradient(step, rank)
    if step < ABSENT:
        LAYOUT.views(flat)["late"].zero_()
    if step < ASLEEP:
        flat[20:30] = 0
    return flat


def wanted(gradients: list[float], beta1: float, freeze: int | None) -> list[float]:
    """What one worker wants of one entry, step by step, from the equations of docs/methods.md."""
    beta, m, v, updates = OPTIONS["beta"], 0.0, 0.0, []
    for t, g in enumerate(gradients, start=1):
        n = t if freeze is None else min(t, freeze)
        m = beta1 * m + (1 - beta1) * g
        if n == t:
            v = beta * v + (1 - beta) * g * g
        else:
            v = max(v, (1 - beta) * g * g)
        first, second = m / (1 - beta1**t), v / (1 - beta**n)
        updates.append(OPTIONS["lr"] * first / (math.sqrt(second) + OPTIONS["eps"]))
    return updates


# --- the numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("freeze", [None, 1, 3, 50])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_it_is_the_equations(beta1: float, freeze: int | None, world: int) -> None:
    """The mean of what workers want, each by moments of its own; late parameters count their own steps."""

    def work(net: Transport) -> Tensor:
        half = joined(parameters(), **OPTIONS, beta1=beta1, freeze=freeze)
        sync = reducer(net, half, **EXACT, hold_unused=True)
        arrived = []
        for step in range(STEPS):
            flat = given(step, net.rank)
            sync.reduce_(LAYOUT, flat, last=True)
            arrived.append(flat)
        return torch.stack(arrived)

    found = run_in_process(world, work)
    assert all(torch.equal(each, found[0]) for each in found)
    start = LAYOUT.offsets[2]
    for entry in range(LAYOUT.numel):
        skipped = ABSENT if entry >= start else 0
        each = [
            wanted([float(given(step, rank)[entry]) for step in range(skipped, STEPS)], beta1, freeze)
            for rank in range(world)
        ]
        mean = [0.0] * skipped + [sum(column) / world for column in zip(*each, strict=True)]
        torch.testing.assert_close(found[0][:, entry], torch.tensor(mean), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_one_worker_that_sends_everything_is_torchs_adam(beta1: float, decoupled: bool) -> None:
    """AdamW, and Adam with its L2 penalty, which clipping does not see; the rate changes as schedulers do."""
    ours, theirs = parameters(), parameters()

    def groups(named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
        last = {"params": [named["late"]], "weight_decay": 0.0}
        return [{"params": [named["weight"], named["bias"]]}, last]

    def work(net: Transport) -> None:
        half = SplitAdam(
            groups(ours),
            lr=0.02,
            beta=0.98,
            weight_decay=0.1,
            max_norm=5.0,
            beta1=beta1,
            decoupled_weight_decay=decoupled,
        )
        half.join(ours)
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        whole = kind(groups(theirs), lr=0.02, betas=(beta1, 0.98), weight_decay=0.1)
        sync = reducer(net, half, **EXACT)
        for step in range(12):
            for group in (*half.param_groups, *whole.param_groups):
                group["lr"] = 0.02 * (12 - step) / 12
            flat = gradient(step)
            assert float(flat.norm()) > 5.0
            give(theirs, flat)
            nn.utils.clip_grad_norm_(theirs.values(), 5.0)
            sync.reduce_(LAYOUT, flat, last=True)
            give(ours, flat)
            half.step()
            whole.step()

    run_in_process(1, work)
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


def test_by_default_nothing_is_new() -> None:
    """One memory, and the bits of the equation as it always stood."""
    half, square = joined(parameters(), **OPTIONS), torch.zeros(LAYOUT.numel)
    assert half.memories == ("square",)
    for step in range(4):
        slot, bucket = Slot(square), gradient(step)
        half.before_(LAYOUT, bucket, {"square": slot}, [step] * 3)
        square = square.mul(0.98).addcmul(gradient(step), gradient(step), value=1.0 - 0.98)
        root = square.sqrt() / math.sqrt(1 - 0.98 ** (step + 1)) + 1e-8
        assert torch.equal(slot.new, square) and torch.equal(bucket, gradient(step) / root * 0.02)


def test_a_frozen_second_moment_stays_but_for_entries_that_wake_up() -> None:
    """Those take what one square adds, and again if a larger one comes: no update beyond Adam's largest."""
    half, square = joined(parameters(), lr=1.0, freeze=3), torch.zeros(LAYOUT.numel)
    squares = []
    for step in range(8):
        bucket = 0.1 * gradient(step).sign()
        bucket[20:30] = {5: 1e-12, 6: 0.3, 7: 0.2}.get(step, 0.0)
        slot = Slot(square)
        half.before_(LAYOUT, bucket, {"square": slot}, [step] * 3)
        squares.append(square := slot.new)
        assert float(bucket.abs().max()) <= math.sqrt(3) + 1e-3
    awake = torch.ones(LAYOUT.numel, dtype=torch.bool)
    awake[20:30] = False
    assert not torch.equal(squares[1][awake], squares[2][awake])
    assert all(torch.equal(later[awake], squares[2][awake]) for later in squares[3:])
    woken = torch.tensor([float(each[20]) for each in squares])
    torch.testing.assert_close(woken, 0.001 * torch.tensor([0, 0, 0, 0, 0, 1e-24, 0.09, 0.09]))


# --- the penalty ---------------------------------------------------------------------------


@pytest.mark.parametrize("memory_order", [False, True])
def test_the_penalty_lies_as_the_gradient_does(memory_order: bool) -> None:
    """DDP's buckets have a channels-last gradient in memory order, loops by hand in that of indices."""
    weights = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    named = {"conv": nn.Parameter(weights.contiguous(memory_format=torch.channels_last))}
    assert not named["conv"].is_contiguous()
    half = SplitAdam(named.values(), lr=1.0, weight_decay=0.1, decoupled_weight_decay=False)
    half.join(named, memory_order=memory_order)
    layout, slot = BucketLayout(("conv",), (weights.shape,)), Slot(torch.zeros(weights.numel()))
    half.before_(layout, torch.zeros(weights.numel()), {"square": slot}, [0])
    as_it_lies = weights.permute(0, 2, 3, 1) if memory_order else weights
    torch.testing.assert_close(slot.new, 0.001 * (0.1 * as_it_lies.reshape(-1)) ** 2)


def test_a_view_into_a_larger_tensor_has_a_penalty_too() -> None:
    """It is not dense: DDP lays its gradient in the order of indices."""
    named = {"odd": nn.Parameter(torch.arange(40.0).view(5, 8)[:, ::2])}
    assert named["odd"].stride() == (8, 2)
    half = SplitAdam(named.values(), lr=1.0, weight_decay=0.1, decoupled_weight_decay=False)
    half.join(named, memory_order=True)
    slot = Slot(torch.zeros(20))
    half.before_(BucketLayout(("odd",), (torch.Size([5, 4]),)), torch.zeros(20), {"square": slot}, [0])
    torch.testing.assert_close(slot.new, 0.001 * (0.1 * named["odd"].detach().reshape(-1)) ** 2)


def test_without_a_gradient_there_is_no_penalty() -> None:
    """As with torch's: a parameter that was not used does not move."""

    def work(net: Transport) -> None:
        options = {"weight_decay": 0.1, "decoupled_weight_decay": False, "beta1": 0.9}
        sync = reducer(net, joined(parameters(), **options), **EXACT, hold_unused=True)
        flat = given(0, net.rank)
        sync.reduce_(LAYOUT, flat, last=True)
        kept = sync.state_dict()["kept"]
        assert not LAYOUT.views(flat)["late"].any() and kept["square"]["weight"].all()
        assert not kept["momentum"]["late"].any() and not kept["square"]["late"].any()

    run_in_process(2, work)


# --- what is remembered --------------------------------------------------------------------


@pytest.mark.parametrize("way", ["allgather", "sharded"])
def test_saved_and_loaded_it_goes_on_exactly(way: str) -> None:
    """Saved before the second moment froze, and after."""
    options = {"beta1": 0.9, "freeze": 4, "weight_decay": 0.1, "decoupled_weight_decay": False}

    def work(net: Transport) -> None:
        def start() -> Reducer:
            return reducer(net, joined(parameters(), **options), ratio=0.05, collective=way)

        sync = start()
        for step in range(STEPS):
            sync.reduce_(LAYOUT, one := gradient(step, net.rank), last=True)
            if step in (2, 6):
                other = start()
                other.load_state_dict(sync.state_dict(), SHAPES)
            elif step > 2:
                other.reduce_(LAYOUT, two := gradient(step, net.rank), last=True)
                assert torch.equal(one, two) and same(sync.state_dict(), other.state_dict())

    run_in_process(3, work)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_bad_gradient_on_one_worker_changes_no_ones_memory(frozen: bool, bad: float) -> None:
    """Also a finite one whose square is not, before squares are frozen and after."""

    def work(net: Transport) -> None:
        half = joined(parameters(), beta1=0.9, freeze=1 if frozen else None)
        sync = reducer(net, half, ratio=0.05)
        sync.reduce_(LAYOUT, gradient(0, net.rank), last=True)
        before = sync.state_dict()
        flat = gradient(1, net.rank)
        if net.rank == 1:
            flat[0] = bad
        sync.reduce_(LAYOUT, flat, last=True)
        after = sync.state_dict()
        assert not torch.isfinite(flat).any() and after["taken"] == before["taken"] == 1
        assert same(before["kept"], after["kept"]) and same(before["residuals"], after["residuals"])

    run_in_process(2, work)


def states(world: int, **options: Any) -> list[dict[str, Any]]:
    def work(net: Transport) -> dict[str, Any]:
        sync = reducer(net, joined(parameters(), **options), ratio=0.05)
        for step in range(3):
            sync.reduce_(LAYOUT, gradient(step, net.rank), last=True)
        return sync.state_dict()

    return run_in_process(world, work)


def test_a_newcomer_has_the_mean_of_both_moments() -> None:
    old = states(2, beta1=0.9, freeze=2)
    for what in ("square", "momentum"):
        for name in SHAPES:
            each = [state["kept"][what][name] for state in reshard_states(old, 3)]
            torch.testing.assert_close(each[2], (each[0] + each[1]) / 2)
            assert torch.equal(each[0], old[0]["kept"][what][name])


def test_a_state_without_a_first_moment_is_for_those_without() -> None:
    """One that is to freeze may go on with it."""
    [saved] = states(1)

    def load(net: Transport, **options: Any) -> None:
        reducer(net, joined(parameters(), **options), ratio=0.05).load_state_dict(saved, SHAPES)

    run_in_process(1, load)
    run_in_process(1, lambda net: load(net, freeze=7))
    with pytest.raises(ValueError, match=r"keeps square before compression, this one keeps momentum, square"):
        run_in_process(1, lambda net: load(net, beta1=0.9))


# --- mistakes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (None, 3, "Go on with freeze=None, or one above 5$"),
        (9, 3, "Go on with freeze=9, or one above 5$"),
        (3, 8, "a second moment of 3 squares would be taken for one of 5. Go on with freeze=3$"),
        (3, None, "Go on with freeze=3$"),
        (9, 7, ""),
        (None, 6, ""),
        (5, None, ""),
        (3, 3, ""),
    ],
)
def test_what_froze_stays_frozen(before: int | None, now: int | None, told: str) -> None:
    half = joined(parameters(), freeze=before)
    slots = {"square": Slot(torch.zeros(LAYOUT.numel))}
    for step in range(5):
        half.before_(LAYOUT, gradient(step), slots, [step] * len(SHAPES))
    other = joined(parameters(), freeze=now)
    if not told:
        other.load_state_dict(half.state_dict())
        assert other.state_dict()["steps"] == 5 and other.freeze == now
        return
    with pytest.raises(ValueError, match=told):
        other.load_state_dict(half.state_dict())
    with pytest.raises(ValueError, match="damaged state: steps are 'x'"):
        other.load_state_dict(half.state_dict() | {"steps": "x"})


@pytest.mark.parametrize("name", ["beta1", "freeze", "decoupled_weight_decay"])
def test_what_there_is_one_of(name: str) -> None:
    """Workers compare it, and a group of its own cannot have it."""
    values: dict[str, tuple[Any, Any]] = {
        "beta1": (0.9, 0.8),
        "freeze": (None, 5),
        "decoupled_weight_decay": (True, False),
    }
    told = [SplitAdam(parameters().values(), **{name: value}).describe() for value in values[name]]
    assert [each[name] for each in told] == list(values[name])
    with pytest.raises(ValueError, match=f"a group has {name} .* pass it to SplitAdam itself"):
        SplitAdam([{"params": list(parameters().values()), name: values[name][1]}])


@pytest.mark.parametrize("wrong", [{"beta1": 1.0}, {"beta1": -0.1}, {"freeze": 0}], ids=str)
def test_impossible_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SplitAdam(parameters().values(), **wrong)
