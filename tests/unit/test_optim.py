"""Optimizers in two halves: the same numbers as torch's, and all that is remembered is in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import same
from halves import EXACT, LAYOUT, SHAPES, first_half, give, gradient, joined, parameters, reducer
from torch import Tensor, nn

from compressed_ddp import (
    CompressionConfig,
    DistributedBackend,
    ErrorFeedbackBuffer,
    SplitAdam,
    SplitOptimizer,
    SplitSGD,
    SyncError,
    reshard_states,
)
from compressed_ddp.communication import Reducer, attach, run_in_process
from compressed_ddp.compression.factory import from_config
from compressed_ddp.layout import BucketLayout
from compressed_ddp.types import Slot, Transport


@pytest.mark.parametrize("world", [1, 2])
def test_with_everything_sent_it_is_adamw_without_its_first_moment(world: int) -> None:
    """The same gradient on all workers, so that their mean is that of one."""

    def work(net: Transport) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        ours, theirs = parameters(), parameters()
        half = joined(ours, lr=0.02, weight_decay=0.1, beta=0.98)
        whole = torch.optim.AdamW(theirs.values(), lr=0.02, betas=(0.0, 0.98), weight_decay=0.1)
        sync = reducer(net, half, **EXACT)
        for step in range(12):
            for group in (*half.param_groups, *whole.param_groups):
                group["lr"] = 0.02 * (12 - step) / 12  # a schedule, as schedulers do it
            flat = gradient(step)
            give(theirs, flat)
            sync.reduce_(LAYOUT, flat, last=True)
            give(ours, flat)
            half.step()
            whole.step()
        return ours, theirs

    for ours, theirs in run_in_process(world, work):
        for name in SHAPES:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


def test_groups_have_options_of_their_own() -> None:
    named = parameters()
    optimizer = SplitAdam(
        [{"params": [named["weight"], named["late"]]}, {"params": [named["bias"]], "lr": 0.5}], lr=0.1
    )
    optimizer.join(named)
    signs = gradient(0).sign()
    bucket, slot = 3.0 * signs, Slot(torch.zeros(LAYOUT.numel))
    optimizer.before_(LAYOUT, bucket, {"square": slot}, [0] * 3)
    rates = LAYOUT.views(bucket / signs)
    for name, rate in {"weight": 0.1, "bias": 0.5, "late": 0.1}.items():
        torch.testing.assert_close(rates[name], torch.full(SHAPES[name], rate), rtol=1e-4, atol=0)


def test_each_bucket_is_held_to_its_share_of_the_norm() -> None:
    named = parameters()
    free, held = joined(named), joined(named, max_norm=2.0)
    part = BucketLayout(("bias",), (SHAPES["bias"],))
    large = torch.full((300,), 5.0)
    first, second = Slot(torch.zeros(300)), Slot(torch.zeros(300))
    free.before_(part, large.clone(), {"square": first}, [0])
    held.before_(part, large.clone(), {"square": second}, [0])
    share = 2.0 * (300 / LAYOUT.numel) ** 0.5
    assert first.new.sum().item() == pytest.approx(0.001 * large.norm().item() ** 2, rel=1e-4)
    assert second.new.sum().item() == pytest.approx(0.001 * share**2, rel=1e-4)
    small = torch.full((300,), 1e-3)
    held.before_(part, small.clone(), {"square": second}, [0])
    assert second.new.sum().item() == pytest.approx(0.001 * 300 * 1e-6, rel=1e-4)


@pytest.mark.parametrize("size", [1e19, 1e30, 3e38], ids=str)
def test_a_norm_beyond_float32_is_clipped_as_any_other(size: float) -> None:
    """The squares are infinite, the gradient is not: it is scaled down, not away."""
    held = joined(parameters(), max_norm=2.0)
    signs = gradient(0).sign()
    slot = Slot(torch.zeros(LAYOUT.numel))
    held.before_(LAYOUT, bucket := size * signs, {"square": slot}, [0] * 3)
    assert slot.new.sum().item() == pytest.approx(0.001 * 2.0**2, rel=1e-4)
    torch.testing.assert_close(bucket, 0.001 * signs, rtol=1e-4, atol=0)
    held.before_(LAYOUT, bucket := torch.full((LAYOUT.numel,), torch.inf), {"square": slot}, [0] * 3)
    assert not torch.isfinite(bucket).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30], ids=str)
@pytest.mark.parametrize("world", [1, 3])
def test_a_bad_gradient_on_one_worker_changes_no_ones_memory(world: int, bad: float) -> None:
    """Also a finite one whose square is not: Adam would divide by infinity ever after."""

    def work(net: Transport) -> None:
        sync = reducer(net, joined(parameters()), ratio=0.05)
        sync.reduce_(LAYOUT, gradient(0, net.rank), last=True)
        before = sync.state_dict()
        flat = gradient(1, net.rank)
        if net.rank == world - 1:
            flat[17] = bad
        sync.reduce_(LAYOUT, flat, last=True)
        assert not torch.isfinite(flat).any()
        after = sync.state_dict()
        assert after["step"] == 2 and after["taken"] == before["taken"] == 1
        assert same(before["kept"], after["kept"]) and same(before["residuals"], after["residuals"])
        sync.reduce_(LAYOUT, flat := gradient(2, net.rank), last=True)
        assert torch.isfinite(flat).all() and sync.taken == 2

    run_in_process(world, work)


def test_where_there_was_no_gradient_nothing_is_forgotten() -> None:
    def work(net: Transport) -> None:
        sync = reducer(net, joined(parameters()), ratio=0.05, hold_unused=True)
        sync.reduce_(LAYOUT, gradient(0, net.rank), last=True)
        before = sync.state_dict()["kept"]["square"]
        flat = gradient(1, net.rank)
        LAYOUT.views(flat)["bias"].zero_()
        sync.reduce_(LAYOUT, flat, last=True)
        after = sync.state_dict()["kept"]["square"]
        assert torch.equal(before["bias"], after["bias"])
        assert not torch.equal(before["weight"], after["weight"])
        sync.reduce_(LAYOUT, torch.zeros(LAYOUT.numel), last=True, joined=True)
        assert same(after, sync.state_dict()["kept"]["square"])

    run_in_process(2, work)


def without(name: str, step: int, rank: int = 0) -> Tensor:
    """A gradient in which one parameter has no part."""
    flat = gradient(step, rank)
    LAYOUT.views(flat)[name].zero_()
    return flat


def wanted(sync: Reducer, flat: Tensor, name: str) -> Tensor:
    sync.reduce_(LAYOUT, flat, last=True)
    return LAYOUT.views(flat)[name]


def test_a_parameter_that_comes_late_begins_at_its_first_step() -> None:
    """As in a run that begins with it; also if the state was saved before that, or the job becomes larger."""

    def work(net: Transport) -> dict[str, Any]:
        def begin() -> Reducer:
            return reducer(net, joined(parameters(), lr=0.01), **EXACT, hold_unused=True)

        sync, again, fresh = begin(), begin(), begin()
        for step in range(5):
            sync.reduce_(LAYOUT, without("late", step, net.rank), last=True)
        again.load_state_dict(sync.state_dict(), SHAPES)
        for step in range(5, 8):
            updates = [wanted(each, gradient(step, net.rank), "late") for each in (fresh, sync, again)]
            assert torch.equal(updates[0], updates[1]) and torch.equal(updates[0], updates[2])
        sync.reduce_(LAYOUT, torch.zeros(LAYOUT.numel), last=True, joined=True)
        state = sync.state_dict()
        assert state["taken"] == 9 and state["missed"] == {"late": 6, "weight": 1, "bias": 1}
        bad = gradient(9)
        bad[0] = torch.nan
        LAYOUT.views(bad)["late"].zero_()
        sync.reduce_(LAYOUT, bad, last=True)
        assert sync.state_dict()["missed"] == state["missed"], "the step does not count: nobody missed it"
        return state

    states = run_in_process(2, work)
    states[1]["missed"]["late"] = 2
    assert [state["missed"]["late"] for state in reshard_states(states, 3)] == [6, 2, 4]


def test_a_parameter_that_was_frozen_begins_at_its_first_step() -> None:
    """Its state has nothing of it; all the others go on."""

    def work(net: Transport) -> None:
        head = BucketLayout(("weight", "bias"), (SHAPES["weight"], SHAPES["bias"]))
        named = parameters()
        frozen = reducer(net, joined(named), **EXACT)
        for step in range(5):
            frozen.reduce_(head, gradient(step)[: head.numel].contiguous(), last=True)
        sync = reducer(net, joined(named, lr=0.01), **EXACT)
        sync.load_state_dict(frozen.state_dict(), SHAPES)
        first = 0.01 * LAYOUT.views(gradient(5))["late"].sign()
        torch.testing.assert_close(wanted(sync, gradient(5), "late"), first)
        # Nor does it need a state in between.
        thawed = reducer(net, joined(named, lr=0.01), **EXACT)
        for step in range(5):
            thawed.reduce_(head, gradient(step)[: head.numel].contiguous(), last=True)
        torch.testing.assert_close(wanted(thawed, gradient(5), "late"), first)

    run_in_process(2, work)


@pytest.mark.parametrize("missed", [[], {"late": -1}, {"late": 2}, {"nobody": 0}, {"late": 0.5}], ids=str)
def test_missed_steps_that_cannot_be(missed: Any) -> None:
    def work(net: Transport) -> None:
        sync = reducer(net, joined(parameters()), ratio=0.05)
        sync.reduce_(LAYOUT, gradient(0), last=True)
        with pytest.raises(ValueError, match=r"damaged state: .*missed"):
            sync.load_state_dict(sync.state_dict() | {"missed": missed}, SHAPES)

    run_in_process(1, work)


def test_what_workers_tell_of_their_optimizers() -> None:
    """A learning rate may be a tensor. What cannot be told is refused, and nobody waits for it."""

    def work(net: Transport, options: dict[str, Any], lr: Any = 0.1) -> None:
        named = parameters()
        optimizer = SplitAdam([{"params": list(named.values())} | options], lr=lr)
        backend = DistributedBackend(config=CompressionConfig(), transport=net, optimizer=optimizer)
        give(named, gradient(0))
        backend.allreduce_gradients(named.items())

    run_in_process(2, lambda net: work(net, {}, torch.tensor(0.1)))
    with pytest.raises(SyncError, match=r"rank 1 differs from rank 0 in optimizer.groups"):
        run_in_process(2, lambda net: work(net, {}, torch.tensor(0.1 + net.rank)))
    with pytest.raises((TypeError, SyncError), match="not JSON serializable"):
        run_in_process(2, lambda net: work(net, {"tag": object()} if net.rank else {}))


@pytest.mark.parametrize("way", ["allgather", "sharded"])
def test_saved_and_loaded_it_goes_on_exactly(way: str) -> None:
    options = {"ratio": 0.05, "collective": way}

    def work(net: Transport) -> None:
        sync = reducer(net, joined(parameters()), **options)
        for step in range(4):
            sync.reduce_(LAYOUT, gradient(step, net.rank), last=True)
        other = reducer(net, joined(parameters()), **options)
        other.load_state_dict(sync.state_dict(), SHAPES)
        for step in range(4, 8):
            one, two = gradient(step, net.rank), gradient(step, net.rank)
            sync.reduce_(LAYOUT, one, last=True)
            other.reduce_(LAYOUT, two, last=True)
            assert torch.equal(one, two)
        assert same(sync.state_dict(), other.state_dict())

    run_in_process(3, work)


def states(world: int) -> list[dict[str, Any]]:
    def work(net: Transport) -> dict[str, Any]:
        sync = reducer(net, joined(parameters()), ratio=0.05)
        for step in range(3):
            sync.reduce_(LAYOUT, gradient(step, net.rank), last=True)
        return sync.state_dict()

    return run_in_process(world, work)


def test_a_newcomer_has_the_mean_of_all_second_moments() -> None:
    old = states(2)
    new = reshard_states(old, 3)
    for name in SHAPES:
        squares = [state["kept"]["square"][name] for state in new]
        assert torch.equal(squares[0], old[0]["kept"]["square"][name])
        assert torch.equal(squares[1], old[1]["kept"]["square"][name])
        torch.testing.assert_close(squares[2], (squares[0] + squares[1]) / 2)
    assert [state["taken"] for state in new] == [3, 3, 3]
    fewer = reshard_states(old, 1)[0]["kept"]["square"]
    assert same(fewer, old[0]["kept"]["square"])


def test_a_state_of_another_optimizer_is_refused() -> None:
    config = CompressionConfig(ratio=0.05)
    saved = states(1)[0]

    def without(net: Transport) -> None:
        Reducer(from_config(config), config, net).load_state_dict(saved, SHAPES)

    with pytest.raises(ValueError, match=r"keeps square before compression, this one keeps nothing"):
        run_in_process(1, without)

    def damaged(net: Transport) -> None:
        wrong = saved | {"kept": {"square": {"bias": torch.zeros(3)}}}
        reducer(net, joined(parameters())).load_state_dict(wrong, SHAPES)

    with pytest.raises(ValueError, match=r"square of 'bias' has shape \(3,\), the parameter \(300,\)"):
        run_in_process(1, damaged)


def test_mistakes_are_named() -> None:
    named = parameters()
    with pytest.raises(RuntimeError, match=r"first one did not run for these gradients: pass it to attach"):
        SplitAdam(named.values()).step()
    with pytest.raises(ValueError, match=r"does not have parameter 'late'"):
        SplitAdam([named["weight"], named["bias"]]).join(named)
    named["late"].requires_grad_(False)
    SplitAdam([named["weight"], named["bias"]]).join(named)
    for wrong in ({"lr": -1.0}, {"beta": 1.0}, {"eps": 0.0}, {"weight_decay": -0.1}, {"max_norm": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SplitAdam(named.values(), **wrong)
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="needs a DistributedDataParallel"):
        attach(model, optimizer=SplitAdam(model.parameters()))  # type: ignore[arg-type]


def test_a_step_wants_a_first_half_of_its_own() -> None:
    """Else it would subtract raw gradients: of a model attached anew without it, of a second step."""
    named = parameters()
    optimizer = joined(named)
    optimizer.step()  # nothing to move
    give(named, gradient(0))
    before = {name: p.detach().clone() for name, p in named.items()}
    with pytest.raises(RuntimeError, match=r"SplitAdam works in two halves and the first one did not run"):
        optimizer.step()
    first_half(optimizer)
    optimizer.step()
    moved = {name: p.detach().clone() for name, p in named.items()}
    assert not same(before, moved)
    with pytest.raises(RuntimeError, match=r"step once after gradients were synchronised"):
        optimizer.step()
    assert same(moved, {name: p.detach() for name, p in named.items()})


def test_what_nobody_synchronises_is_refused() -> None:
    named = parameters()
    stranger = nn.Parameter(torch.zeros(3, 5))
    optimizer = SplitAdam([*named.values(), stranger])
    with pytest.raises(ValueError, match=r"shape \(3, 5\) whose gradient nobody synchronises"):
        optimizer.join(named)
    stranger.requires_grad_(False)
    optimizer.join(named)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [SplitAdam, SplitSGD])
def test_in_16_bits_what_is_sent_is_not_rounded_first(dtype: torch.dtype, kind: type[SplitOptimizer]) -> None:
    """An update of 1e-8 is nothing in float16; the residual has 32 bits and gets it whole."""

    def work(net: Transport) -> None:
        found = []
        for width in (dtype, torch.float32):
            named = {name: nn.Parameter(p.detach().to(width)) for name, p in parameters().items()}
            optimizer = kind(named.values(), lr=1e-8)
            optimizer.join(named, net.world_size)
            sync = reducer(net, optimizer, ratio=0.05, values="fp32")
            for step in range(3):
                sync.reduce_(LAYOUT, gradient(step, net.rank).clamp(-3, 3).to(dtype).to(width), last=True)
            found.append(sync.state_dict())
        narrow, wide = found
        assert same(narrow["residuals"], wide["residuals"]) and same(narrow["kept"], wide["kept"])
        assert any(bool(residual.any()) for residual in narrow["residuals"].values())

    run_in_process(2, work)


def test_a_closure_is_called() -> None:
    named = parameters()
    optimizer = joined(named)
    before = named["bias"].detach().clone()

    def closure() -> Tensor:
        first_half(optimizer)
        for parameter in named.values():
            parameter.grad = torch.ones_like(parameter)
        return torch.tensor(3.0)

    assert optimizer.step(closure) == 3.0
    torch.testing.assert_close(named["bias"].detach(), before - 1.0)


@pytest.mark.parametrize("kind", [SplitAdam, SplitSGD])
@pytest.mark.parametrize("world", [1, 2])
def test_unfrozen_in_a_loop_of_ones_own(world: int, kind: type[SplitOptimizer]) -> None:
    """A newcomer begins as if the run began with it, ``max_norm`` counts it from then on (and no longer when
    it is frozen again), and a run that is saved after it came goes on to the bit."""
    last, rest = "late", LAYOUT.numel - SHAPES["late"].numel()
    options = {"lr": 0.01, "max_norm": 0.5}

    def start(net: Transport) -> tuple[dict[str, nn.Parameter], SplitOptimizer, DistributedBackend]:
        named = parameters()
        half = kind(named.values(), **options)
        config = CompressionConfig(ratio=0.1, min_compress_numel=16, guard_every=0)
        memory = ErrorFeedbackBuffer()
        return named, half, DistributedBackend(None, memory, config=config, transport=net, optimizer=half)

    def step(run: tuple[Any, ...], at: int, rank: int) -> None:
        named, half, backend = run
        for name, view in LAYOUT.views(gradient(at, rank)).items():
            named[name].grad = view.clone() if named[name].requires_grad else None
        backend.allreduce_gradients(named.items())
        half.step()

    def work(net: Transport) -> None:
        run = named, half, backend = start(net)
        named[last].requires_grad_(False)
        for at in range(3):
            step(run, at, net.rank)
        assert half._numel == rest
        named[last].requires_grad_(True)
        step(run, 3, net.rank)
        state = backend.state_dict()
        assert half._numel == LAYOUT.numel and state["missed"] == {last: 3}
        assert all(bool(kept[last].any()) for kept in state["kept"].values())

        again = other, half_again, resumed = start(net)
        for name, parameter in other.items():
            parameter.data.copy_(named[name])
        half_again.load_state_dict(half.state_dict())
        resumed.load_state_dict(backend.state_dict(), other.items())
        for at in range(4, 6):
            step(run, at, net.rank)
            step(again, at, net.rank)
        assert all(torch.equal(named[name], other[name]) for name in SHAPES)
        assert same(backend.state_dict(), resumed.state_dict())
        named[last].requires_grad_(False)
        step(run, 6, net.rank)
        assert half._numel == rest

    run_in_process(world, work)
