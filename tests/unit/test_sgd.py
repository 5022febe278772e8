"""SplitSGD: torch's numbers where nothing waits, and momentum that is masked exactly where it was sent."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from comparing import same
from halves import first_half
from torch import Tensor, nn

from compressed_ddp import (
    CompressionConfig,
    DistributedBackend,
    ErrorFeedbackBuffer,
    SplitAdam,
    SplitOptimizer,
    SplitSGD,
    SyncError,
    get_compressor,
    reshard_states,
)
from compressed_ddp.communication import Reducer, run_in_process
from compressed_ddp.compression.factory import from_config
from compressed_ddp.layout import BucketLayout
from compressed_ddp.optim import checked_split
from compressed_ddp.types import Slot, Transport

SHAPES = {"weight": torch.Size([30, 20]), "bias": torch.Size([30]), "late": torch.Size([7, 50])}
LAYOUT = BucketLayout(tuple(SHAPES), tuple(SHAPES.values()))
SMALL = slice(600, 630)
EXACT = {"ratio": 1.0, "values": "fp32"}
WAYS = pytest.mark.parametrize("way", ["allgather", "sharded"])
SWITCHES = [{}, {"nesterov": True}, {"masking": False}, {"nesterov": True, "max_norm": 1.0}]


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradient(step: int, rank: int = 0) -> Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(100 * step + rank))


def joined(world: int = 1, **options: Any) -> SplitSGD:
    named = parameters()
    optimizer = SplitSGD(named.values(), **options)
    optimizer.join(named, world)
    return optimizer


def reducer(net: Transport, sender: SplitOptimizer, **options: Any) -> Reducer:
    config = CompressionConfig(**({"ratio": 0.05, "min_compress_numel": 64} | options))
    return Reducer(from_config(config), config, net, sender=sender)


def flat(by_name: dict[str, Tensor]) -> Tensor:
    """All of them end to end; zeros where there are none yet."""
    return torch.cat([by_name.get(name, torch.zeros(shape)).reshape(-1) for name, shape in SHAPES.items()])


def momentum(sync: Reducer) -> Tensor:
    return flat(sync.state_dict()["kept"]["momentum"])


def give(named: dict[str, nn.Parameter], grad: Tensor) -> None:
    for name, view in LAYOUT.views(grad).items():
        named[name].grad = view.clone()


# --- the numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("nesterov", [False, True])
def test_with_everything_sent_it_is_torchs_sgd(nesterov: bool, decay: float, world: int) -> None:
    """Masked or not: nothing waits. Gradients differ from worker to worker; a group has its own momentum."""

    def groups(named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
        last = {"params": [named["late"]], "momentum": 0.5}
        return [{"params": [named["weight"], named["bias"]]}, last]

    def work(net: Transport) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        ours, theirs = parameters(), parameters()
        options = {"lr": 0.02, "momentum": 0.9, "weight_decay": decay, "nesterov": nesterov}
        half, whole = SplitSGD(groups(ours), **options), torch.optim.SGD(groups(theirs), **options)
        half.join(ours, world)
        sync = reducer(net, half, **EXACT)
        for step in range(12):
            for group in (*half.param_groups, *whole.param_groups):
                group["lr"] = 0.02 * (12 - step) / 12
            give(theirs, sum(gradient(step, rank) for rank in range(world)) / world)
            mine = gradient(step, net.rank)
            sync.reduce_(LAYOUT, mine, last=True)
            give(ours, mine)
            half.step()
            whole.step()
        return ours, theirs

    for ours, theirs in run_in_process(world, work):
        for name in SHAPES:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


def test_a_worker_may_have_sqrt_p_times_the_norm() -> None:
    """The mean of P independent gradients is sqrt(P) times shorter than each; a bucket has its share."""
    optimizer, large = joined(4, max_norm=2.0, momentum=0.0), gradient(0) * 100
    bucket = large.clone()
    optimizer.before_(LAYOUT, bucket, {"momentum": Slot(torch.zeros(LAYOUT.numel))}, [0] * 3)
    torch.testing.assert_close(bucket, large * (2.0 * math.sqrt(4) / large.norm()))
    part = BucketLayout(("bias",), (SHAPES["bias"],))
    bucket = torch.full((30,), 100.0)
    optimizer.before_(part, bucket, {"momentum": Slot(torch.zeros(30))}, [0])
    assert float(bucket.norm()) == pytest.approx(2.0 * 2.0 * math.sqrt(30 / LAYOUT.numel))


def test_a_norm_beyond_float32_is_clipped_as_any_other() -> None:
    """The squares are infinite, the gradient is not: it is scaled down, not away."""
    optimizer, bucket = joined(4, max_norm=2.0, momentum=0.0), 1e19 * gradient(0)
    optimizer.before_(LAYOUT, bucket, {"momentum": Slot(torch.zeros(LAYOUT.numel))}, [0] * 3)
    torch.testing.assert_close(bucket, gradient(0) * (2.0 * math.sqrt(4) / gradient(0).norm()))


# --- masking -------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("scope", ["bucket", "tensor"])
@pytest.mark.parametrize("values", ["fp32", "int8"])
def test_masked_is_exactly_what_was_sent(values: str, scope: str, way: str) -> None:
    """Read off the law: where old residual + velocity is not the new residual, something was sent."""

    def work(net: Transport) -> None:
        sync = reducer(net, joined(3), collective=way, values=values, scope=scope)
        for step in range(6):
            before, debt = momentum(sync), flat(sync.state_dict()["residuals"])
            grad = gradient(step, net.rank)
            velocity = 0.9 * before + grad
            sync.reduce_(LAYOUT, grad, last=True)
            kept = flat(sync.state_dict()["residuals"])
            small = torch.zeros(LAYOUT.numel, dtype=torch.bool)
            small[SMALL] = True
            sent = ((debt + velocity - kept).abs() > 1e-6) & ~small
            assert 0.05 * (LAYOUT.numel - 30) <= int(sent.sum()) <= 0.05 * (LAYOUT.numel - 30) + 6
            torch.testing.assert_close(momentum(sync), velocity.masked_fill(sent, 0.0), rtol=1e-6, atol=1e-6)
            assert not momentum(sync)[sent].any() and momentum(sync)[~sent].all()

    run_in_process(3, work)


@WAYS
def test_what_is_rounded_to_nothing_is_not_masked(way: str) -> None:
    """Four bits a value: chosen, and too small beside the others to be sent. It waits on."""

    def work(net: Transport) -> int:
        sync, rounded = reducer(net, joined(3), collective=way, values="int4", ratio=0.5), 0
        for step in range(6):
            before, debt = momentum(sync), flat(sync.state_dict()["residuals"])
            grad = gradient(step, net.rank) ** 5  # a wide range of magnitudes
            velocity = torch.add(grad, before, alpha=0.9)
            sync.reduce_(LAYOUT, grad, last=True)
            still = debt + velocity == flat(sync.state_dict()["residuals"])
            still[SMALL] = True  # these travel whole
            assert torch.equal(momentum(sync), velocity.masked_fill(~still, 0.0))
            rounded += int(still.sum()) - (LAYOUT.numel + 30) // 2
        return rounded

    assert all(rounded > 50 for rounded in run_in_process(3, work)), "nothing was rounded away"


@pytest.mark.parametrize("name", ["sign", "fp16", "powersgd"])
def test_where_everything_travels_nothing_is_masked(name: str) -> None:
    def work(net: Transport) -> None:
        sync = reducer(net, joined(2), compressor=name)
        sync.reduce_(LAYOUT, gradient(0, net.rank), last=True)
        assert torch.equal(momentum(sync), gradient(0, net.rank))

    run_in_process(2, work)


@WAYS
def test_zeros_that_fill_a_message_mask_nothing(way: str) -> None:
    """Room for more entries than there are: a small tensor, zero where entries are chosen, is not meant."""

    def work(net: Transport) -> None:
        sync = reducer(net, joined(2), collective=way, ratio=0.9)
        for step in range(3):
            grad = torch.zeros(LAYOUT.numel)
            grad[SMALL] = gradient(step, net.rank)[SMALL]
            before = momentum(sync)[SMALL]
            sync.reduce_(LAYOUT, grad.clone(), last=True)
            torch.testing.assert_close(momentum(sync)[SMALL], 0.9 * before + grad[SMALL])
        assert momentum(sync)[SMALL].all()

    run_in_process(2, work)


# --- the laws ------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_nothing_of_the_velocities_is_lost(switches: dict[str, Any], way: str) -> None:
    """Applied + owed == the sum of what workers wanted, with each part on or off and a ratio that changes."""
    limit = math.sqrt(3) * switches.get("max_norm", math.inf)

    def work(net: Transport) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
        sync = reducer(net, joined(3, **switches), collective=way)
        applied, wanted = [], torch.zeros(LAYOUT.numel).double()
        for step in range(10):
            if step == 5:
                sync.set_ratio(0.2)
            before, grad = momentum(sync), gradient(step, net.rank)
            clipped = grad * min(1.0, limit / float(grad.norm()))
            new = 0.9 * before + clipped
            wanted += clipped + 0.9 * new if switches.get("nesterov") else new
            sync.reduce_(LAYOUT, grad, last=True)
            applied.append(grad)
            if not switches.get("masking", True):
                torch.testing.assert_close(momentum(sync), new)
        return applied, wanted, sync.state_dict()

    ranks = run_in_process(3, work)
    for applied, *_ in ranks[1:]:
        assert same(applied, ranks[0][0])
    owed = flat(reshard_states([state for *_, state in ranks], 1)[0]["residuals"]).double()
    true = sum(wanted for _, wanted, _ in ranks) / 3
    torch.testing.assert_close(torch.stack(ranks[0][0]).double().sum(0) + owed, true, rtol=0, atol=1e-4)


@WAYS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38], ids=str)
def test_a_bad_gradient_on_one_worker_changes_no_ones_momentum(bad: float, way: str) -> None:
    """Also a finite one that overflows when the momentum is added."""

    def work(net: Transport) -> None:
        sync = reducer(net, joined(3), collective=way)
        large = 3e38 if net.rank == 2 and bad == 3e38 else 0.0
        first = gradient(0, net.rank)
        first[610] += large / 2  # in a small tensor, which is never masked
        sync.reduce_(LAYOUT, first, last=True)
        before = sync.state_dict()
        grad = gradient(1, net.rank)
        if net.rank == 2:
            grad[610] = bad
        sync.reduce_(LAYOUT, grad, last=True)
        after = sync.state_dict()
        assert not torch.isfinite(grad).any() and after["taken"] == before["taken"] == 1
        for what in ("kept", "residuals", "buckets"):
            assert same(before[what], after[what])

    run_in_process(3, work)


def test_where_there_was_no_gradient_nothing_moves() -> None:
    """A parameter that was not used keeps its momentum and sends none of it; so does a rank out of data."""

    def work(net: Transport, feedback: bool) -> None:
        options = {"hold_unused": True, "error_feedback": feedback, "min_compress_numel": 0}
        sync = reducer(net, joined(2, masking=False), **EXACT | options)
        sync.reduce_(LAYOUT, gradient(0, net.rank), last=True)
        before = momentum(sync)
        grad = gradient(1, net.rank)
        grad[SMALL] = 0
        sync.reduce_(LAYOUT, grad, last=True)
        assert torch.equal(before[SMALL], momentum(sync)[SMALL]) and not grad[SMALL].any()
        after = momentum(sync)
        assert not torch.equal(before, after)
        out_of_data = net.rank == 1
        sync.reduce_(
            LAYOUT, torch.zeros(LAYOUT.numel) if out_of_data else grad, last=True, joined=out_of_data
        )
        assert torch.equal(after, momentum(sync)) == out_of_data

    for feedback in (True, False):
        run_in_process(2, lambda net, feedback=feedback: work(net, feedback))


@WAYS
@pytest.mark.parametrize("options", [{"scope": "tensor"}, {"adapt_every": 1, "ratio": 0.5}])
def test_a_tensor_that_is_sent_whole_keeps_its_momentum(way: str, options: dict[str, Any]) -> None:
    """Nothing in it is ever late: masked, it would have no momentum at all."""
    layout = BucketLayout(("whole", "weight"), (torch.Size([1]), torch.Size([5000])))
    if "adapt_every" in options:  # so loud that all of it is chosen
        layout = BucketLayout(("whole", "weight"), (torch.Size([300]), torch.Size([5000])))
    size = layout.numels[0]

    def work(net: Transport) -> None:
        named = {n: nn.Parameter(torch.zeros(s)) for n, s in zip(layout.names, layout.shapes, strict=True)}
        optimizer = SplitSGD(named.values(), momentum=0.5)
        optimizer.join(named, net.world_size)
        sync = reducer(
            net, optimizer, collective=way, **{"min_compress_numel": 0, "values": "fp32"} | options
        )
        applied = []
        for step in range(5):
            grad = torch.randn(layout.numel, generator=torch.Generator().manual_seed(10 * step + net.rank))
            grad[:size] = 1000.0
            sync.reduce_(layout, grad, last=True)
            applied.append(grad[:size])
        # Its shares are known after the first step, which may have masked it.
        before = applied[0] if "adapt_every" not in options else applied[1]
        for now in applied[1 if "adapt_every" not in options else 2 :]:
            before = 0.5 * before + 1000.0
            torch.testing.assert_close(now, before)
        state = sync.state_dict()
        assert bool((state["kept"]["momentum"]["weight"] == 0).any()), "the other one is masked"

    run_in_process(2, work)


def test_a_threshold_masks_what_it_sends_at_any_ratio() -> None:
    layout = BucketLayout(("weight",), (torch.Size([5000]),))

    def work(net: Transport) -> None:
        named = {"weight": nn.Parameter(torch.zeros(5000))}
        optimizer = SplitSGD(named.values(), momentum=0.9)
        optimizer.join(named, net.world_size)
        options = {"compressor": "threshold", "threshold": 2.0, "collective": "allgather"}
        sync = reducer(net, optimizer, **EXACT | options)
        grad = torch.randn(5000, generator=torch.Generator().manual_seed(net.rank))
        sent = grad.abs() >= 2.0
        sync.reduce_(layout, grad, last=True)
        assert 0 < int(sent.sum()) < 5000
        assert torch.equal(sync.state_dict()["kept"]["momentum"]["weight"] == 0, sent)

    run_in_process(2, work)


@WAYS
def test_saved_and_loaded_it_goes_on_exactly(way: str) -> None:
    def work(net: Transport) -> None:
        options = {"nesterov": True, "max_norm": 5.0}
        sync = reducer(net, joined(3, **options), collective=way)
        for step in range(4):
            sync.reduce_(LAYOUT, gradient(step, net.rank), last=True)
        other = reducer(net, joined(3, **options), collective=way)
        other.load_state_dict(sync.state_dict(), SHAPES)
        for step in range(4, 8):
            one, two = gradient(step, net.rank), gradient(step, net.rank)
            sync.reduce_(LAYOUT, one, last=True)
            other.reduce_(LAYOUT, two, last=True)
            assert torch.equal(one, two)
        assert same(sync.state_dict(), other.state_dict())

    run_in_process(3, work)


def test_another_number_of_workers() -> None:
    """A newcomer has the mean momentum; those who stay keep theirs; alone, what was owed is applied."""

    def save(net: Transport) -> dict[str, Any]:
        sync = reducer(net, joined(2))
        for step in range(3):
            sync.reduce_(LAYOUT, gradient(step, net.rank), last=True)
        return sync.state_dict()

    old = run_in_process(2, save)
    momenta = [flat(state["kept"]["momentum"]) for state in reshard_states(old, 3)]
    assert torch.equal(momenta[0], flat(old[0]["kept"]["momentum"]))
    torch.testing.assert_close(momenta[2], (momenta[0] + momenta[1]) / 2)
    [alone] = reshard_states(old, 1)

    def go_on(net: Transport) -> None:
        sync = reducer(net, joined(1))
        sync.load_state_dict(alone, SHAPES)
        grad = gradient(9)
        sync.reduce_(LAYOUT, grad, last=True)
        wanted = 0.9 * momenta[0] + gradient(9)
        torch.testing.assert_close(grad, wanted + flat(alone["residuals"]))
        torch.testing.assert_close(momentum(sync), wanted)

    run_in_process(1, go_on)


# --- loops written by hand -----------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_a_backend_runs_the_first_half(world: int) -> None:
    """At ratio 1 it is torch's SGD; several buckets, and state that goes on exactly."""

    def work(net: Transport) -> None:
        def start() -> tuple[dict[str, nn.Parameter], SplitSGD, DistributedBackend]:
            named = parameters()
            optimizer = SplitSGD(named.values(), lr=0.1)
            exact = get_compressor(1.0, values="fp32")
            memory = ErrorFeedbackBuffer()
            options: dict[str, Any] = {"bucket_cap_mb": 0.002, "transport": net, "optimizer": optimizer}
            return named, optimizer, DistributedBackend(exact, memory, **options)

        ours, half, backend = start()
        theirs = parameters()
        whole = torch.optim.SGD(theirs.values(), lr=0.1, momentum=0.9)

        def step(
            named: dict[str, nn.Parameter], optimizer: SplitSGD, backend: DistributedBackend, at: int
        ) -> None:
            give(named, gradient(at, net.rank))
            backend.allreduce_gradients(named.items())
            optimizer.step()

        for at in range(5):
            step(ours, half, backend, at)
            give(theirs, sum(gradient(at, rank) for rank in range(world)) / world)
            whole.step()
        for name in SHAPES:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
        again, other, resumed = start()
        for name, parameter in again.items():
            parameter.data.copy_(ours[name])
        resumed.load_state_dict(backend.state_dict(), again.items())
        step(ours, half, backend, 5)
        step(again, other, resumed, 5)
        assert all(torch.equal(ours[name], again[name]) for name in SHAPES)

    run_in_process(world, work)


def test_workers_compare_their_optimizers() -> None:
    def work(net: Transport) -> None:
        named = parameters()
        optimizer = SplitSGD(named.values(), masking=net.rank == 0)
        backend = DistributedBackend(
            get_compressor(0.1), ErrorFeedbackBuffer(), transport=net, optimizer=optimizer
        )
        give(named, gradient(0))
        with pytest.raises(SyncError, match=r"rank 1 differs from rank 0 in optimizer.masking: False"):
            backend.allreduce_gradients(named.items())

    run_in_process(2, work)


# --- mistakes ------------------------------------------------------------------------------


def test_momentum_must_not_come_twice() -> None:
    named = parameters()
    twice = torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)
    with pytest.raises(TypeError, match=r"SGD has momentum 0.9 and adds it after compression.*use SplitSGD"):
        DistributedBackend(optimizer=twice)
    for other in (torch.optim.SGD(named.values(), lr=0.1), torch.optim.AdamW(named.values()), "sgd"):
        with pytest.raises(TypeError, match="does nothing before compression: leave optimizer= out"):
            checked_split(other)
    adam = SplitAdam(named.values())
    assert checked_split(adam) is adam


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"momentum": 1.0}, {"weight_decay": -0.1}, {"max_norm": 0.0}], ids=str
)
def test_impossible_settings(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SplitSGD(parameters().values(), **wrong)


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ValueError, match="nesterov needs a momentum"):
        SplitSGD(parameters().values(), momentum=0.0, nesterov=True)


def test_weight_decays_momentum_is_in_the_state() -> None:
    named = parameters()
    optimizer = SplitSGD(named.values(), lr=0.1, weight_decay=0.1)
    optimizer.join(named)
    for step in range(3):
        first_half(optimizer, LAYOUT)
        give(named, gradient(step))
        optimizer.step()
    again = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    other = SplitSGD(again.values(), lr=0.1, weight_decay=0.1)
    other.join(again)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the tensors
    for mine, parameters_ in ((optimizer, named), (other, again)):
        first_half(mine, LAYOUT)
        give(parameters_, gradient(3))
        mine.step()
    assert all(torch.equal(named[name], again[name]) for name in SHAPES)
