"""Optimizers in two halves: the same numbers as torch's, and all that is remembered is in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import same
from torch import Tensor, nn

from compressed_ddp import CompressionConfig, SplitAdam, SplitOptimizer, reshard_states
from compressed_ddp.communication import Reducer, attach, run_in_process
from compressed_ddp.compression.factory import from_config
from compressed_ddp.layout import BucketLayout
from compressed_ddp.types import Slot, Transport

SHAPES = {"weight": torch.Size([30, 20]), "bias": torch.Size([300]), "late": torch.Size([7, 50])}
LAYOUT = BucketLayout(tuple(SHAPES), tuple(SHAPES.values()))
EXACT = {"ratio": 1.0, "values": "fp32", "min_compress_numel": 0}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradient(step: int, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(LAYOUT.numel, generator=generator) * 10.0 ** torch.linspace(-4, 1, LAYOUT.numel)


def joined(named: dict[str, nn.Parameter], **options: Any) -> SplitAdam:
    optimizer = SplitAdam(named.values(), **options)
    optimizer.join(named)
    return optimizer


def reducer(net: Transport, sender: SplitOptimizer, **options: Any) -> Reducer:
    config = CompressionConfig(**options)
    return Reducer(from_config(config), config, net, sender=sender)


def give(named: dict[str, nn.Parameter], flat: Tensor) -> None:
    for name, view in LAYOUT.views(flat).items():
        named[name].grad = view.clone()


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
    optimizer.before_(LAYOUT, bucket, {"square": slot}, 0)
    rates = LAYOUT.views(bucket / signs)
    for name, rate in {"weight": 0.1, "bias": 0.5, "late": 0.1}.items():
        torch.testing.assert_close(rates[name], torch.full(SHAPES[name], rate), rtol=1e-4, atol=0)


def test_each_bucket_is_held_to_its_share_of_the_norm() -> None:
    named = parameters()
    free, held = joined(named), joined(named, max_norm=2.0)
    part = BucketLayout(("bias",), (SHAPES["bias"],))
    large = torch.full((300,), 5.0)
    first, second = Slot(torch.zeros(300)), Slot(torch.zeros(300))
    free.before_(part, large.clone(), {"square": first}, 0)
    held.before_(part, large.clone(), {"square": second}, 0)
    share = 2.0 * (300 / LAYOUT.numel) ** 0.5
    assert first.new.sum().item() == pytest.approx(0.001 * large.norm().item() ** 2, rel=1e-4)
    assert second.new.sum().item() == pytest.approx(0.001 * share**2, rel=1e-4)
    small = torch.full((300,), 1e-3)
    held.before_(part, small.clone(), {"square": second}, 0)
    assert second.new.sum().item() == pytest.approx(0.001 * 300 * 1e-6, rel=1e-4)


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
    with pytest.raises(RuntimeError, match=r"first one never ran: pass it to attach"):
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


def test_a_closure_is_called() -> None:
    named = parameters()
    optimizer = joined(named)
    before = named["bias"].detach().clone()

    def closure() -> Tensor:
        for parameter in named.values():
            parameter.grad = torch.ones_like(parameter)
        return torch.tensor(3.0)

    assert optimizer.step(closure) == 3.0
    torch.testing.assert_close(named["bias"].detach(), before - 1.0)
