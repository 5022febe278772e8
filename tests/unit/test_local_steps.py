"""Local steps over threads: the same weights after every meeting, nothing lost, exact states."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import same
from torch import Tensor, nn

from compressed_ddp import CompressionConfig, LocalSync, SyncError, reshard_states
from compressed_ddp.communication import Reducer, run_in_process
from compressed_ddp.compression import COMPRESSORS
from compressed_ddp.compression.factory import from_config
from compressed_ddp.types import Transport

EXACT = {"ratio": 1.0, "values": "fp32"}
PLAIN = {"lr": 1.0, "momentum": 0.0, "nesterov": False}
WAYS = [(name, way) for name, cls in sorted(COMPRESSORS.items()) for way in cls.collectives]


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 9)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def make_local(net: Transport, model: nn.Module, **options: Any) -> LocalSync:
    own = {"steps": 3, "bucket_cap_mb": 0.001, "transport": net}
    own |= {key: options.pop(key) for key in ("steps", "lr", "momentum", "nesterov") if key in options}
    config = CompressionConfig(**({"ratio": 0.1, "min_compress_numel": 16} | options))
    return LocalSync(model, config, **own)


def walk(model: nn.Module, rank: int, step: int) -> None:
    """One optimizer step of this worker, that needs no gradient."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


def mean_owed(states: list[dict[str, Any]]) -> Tensor:
    """The mean over workers of what each owes, and of what it has done since the last meeting."""
    bare = [{k: v for k, v in state.items() if k != "local"} for state in states]
    residuals = reshard_states(bare, 1)[0]["residuals"]  # one worker who owes all of it
    total = []
    for name, anchor in states[0]["local"]["anchor"].items():
        since = [anchor - state["local"]["weights"].get(name, anchor) for state in states]
        total.append(residuals.get(name, torch.zeros_like(anchor)) + torch.stack(since).mean(0))
    return torch.cat([tensor.reshape(-1).double() for tensor in total])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("nesterov", [True, False])
def test_with_everything_sent_it_is_sgd_on_the_mean_movement(world: int, nesterov: bool) -> None:
    """The outer update is torch's SGD, its gradient the mean of anchor - weights."""
    settings = {"lr": 0.7, "momentum": 0.9, "nesterov": nesterov}

    def work(net: Transport) -> Tensor:
        model = make_model()
        local = make_local(net, model, **EXACT, **settings)
        for step in range(12):
            walk(model, net.rank, step)
            assert local.step() == (step % 3 == 2)
        assert local.meetings == 4
        return flat(model)

    first, *others = run_in_process(world, work)
    assert all(torch.equal(other, first) for other in others)
    anchor = make_model()
    outer = torch.optim.SGD(anchor.parameters(), **settings)
    for meeting in range(4):
        workers = [copy.deepcopy(anchor) for _ in range(world)]
        for rank, worker in enumerate(workers):
            for step in range(3 * meeting, 3 * meeting + 3):
                walk(worker, rank, step)
        for name, parameter in anchor.named_parameters():
            moved = [parameter.detach() - worker.get_parameter(name).detach() for worker in workers]
            parameter.grad = torch.stack(moved).mean(0)
        outer.step()
    torch.testing.assert_close(first, flat(anchor), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("world", "name", "way"), [(1, "topk", "auto"), *((3, *row) for row in WAYS)])
def test_the_same_bits_everywhere_and_nothing_lost(name: str, way: str, world: int) -> None:
    """Way of the anchor + mean of what is owed == sum of the mean movements, for all that remember."""

    def work(net: Transport) -> tuple[Tensor, Tensor, Tensor, dict[str, Any], bool]:
        model = make_model()
        local = make_local(net, model, compressor=name, collective=way, **PLAIN)
        begun, moved = flat(model), torch.zeros(flat(model).numel(), dtype=torch.float64)
        for step in range(15):
            before = flat(model)
            walk(model, net.rank, step)
            moved += before - flat(model)
            local.step()
        return flat(model), begun - flat(model), moved, local.state_dict(), local.stats.error_feedback

    ranks = run_in_process(world, work)
    for weights, *_ in ranks[1:]:
        assert torch.equal(weights, ranks[0][0])
    if ranks[0][4] or world == 1:
        moved = sum(moved for _, _, moved, _, _ in ranks) / world
        owed = mean_owed([state for *_, state, _ in ranks])
        torch.testing.assert_close(ranks[0][1] + owed, moved, rtol=0, atol=1e-5)


def test_one_step_and_no_momentum_is_plain_data_parallel_sgd() -> None:
    inputs = torch.randn(2, 16, 12)

    def work(net: Transport) -> Tensor:
        model = make_model().eval()
        local = make_local(net, model, steps=1, **EXACT, **PLAIN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(inputs[net.rank]).square().mean().backward()
            optimizer.step()
            assert local.step()
        return flat(model)

    one, two = run_in_process(2, work)
    model = make_model().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (sum(model(inputs[rank]).square().mean() for rank in (0, 1)) / 2).backward()
        optimizer.step()
    assert torch.equal(one, two)
    torch.testing.assert_close(one, flat(model), rtol=0, atol=1e-6)


def test_all_begin_with_the_first_ones_weights_and_buffers() -> None:
    def work(net: Transport) -> Tensor:
        model = make_model(seed=net.rank)
        model[1].running_mean.fill_(float(net.rank + 1))
        frozen = model[3].bias.requires_grad_(False)
        local = make_local(net, model, **EXACT)
        assert torch.equal(flat(model), flat(make_model(seed=0)))
        assert bool((model[1].running_mean == 1).all())
        for step in range(3):
            walk(model, net.rank, step)
            with torch.no_grad():
                frozen.fill_(5.0)
            local.step()
        assert bool((frozen == 5).all()), "a frozen parameter is nobody's to change"
        with torch.no_grad():
            model[0].weight.fill_(float(net.rank + 7))
        local.begin()
        assert bool((model[0].weight == 7).all()) and not local.state_dict()["local"]["weights"]
        return flat(model)

    for weights in run_in_process(3, work)[1:]:
        assert weights.numel() > 0


@pytest.mark.parametrize("way", ["allgather", "sharded"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("world", [1, 3])
def test_weights_that_are_not_finite_cost_the_period_and_nothing_else(
    world: int, bad: float, way: str
) -> None:
    def work(net: Transport) -> Tensor:
        model = make_model()
        local = make_local(net, model, collective=way)
        for step in range(3):
            walk(model, net.rank, step)
            local.step()
        before, weights = local.state_dict(), flat(model)
        for step in range(3, 6):
            walk(model, net.rank, step)
            if net.rank == world - 1 and step == 4:
                with torch.no_grad():
                    model[3].bias[0] = bad
            local.step()
        after = local.state_dict()
        assert torch.equal(flat(model), weights), "everyone goes back to the anchor"
        assert same(before["local"], after["local"]) and same(before["residuals"], after["residuals"])
        assert local.stats.total.skipped_steps == 1
        for step in range(6, 9):
            walk(model, net.rank, step)
            local.step()
        assert torch.isfinite(flat(model)).all() and not torch.equal(flat(model), weights)
        return flat(model)

    first, *others = run_in_process(world, work)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("at", [6, 8], ids=["at a meeting", "between two"])
@pytest.mark.parametrize("way", ["allgather", "sharded"])
def test_saved_and_loaded_it_goes_on_exactly(way: str, at: int) -> None:
    def work(net: Transport) -> None:
        model, other = make_model(), make_model(seed=9)
        local = make_local(net, model, collective=way)
        for step in range(at):
            walk(model, net.rank, step)
            local.step()
        again = make_local(net, other, collective=way)
        again.load_state_dict(local.state_dict())
        assert torch.equal(flat(model), flat(other)) and again.since == at % 3
        assert same(local.state_dict(), again.state_dict())
        for step in range(at, 14):
            for each, sync in ((model, local), (other, again)):
                walk(each, net.rank, step)
                sync.step()
            assert torch.equal(flat(model), flat(other))
        assert same(local.state_dict(), again.state_dict())

    run_in_process(3, work)


def saved(world: int, steps: int, **options: Any) -> list[dict[str, Any]]:
    def work(net: Transport) -> dict[str, Any]:
        model = make_model()
        local = make_local(net, model, **options)
        for step in range(steps):
            walk(model, net.rank, step)
            local.step()
        return local.state_dict()

    return run_in_process(world, work)


@pytest.mark.parametrize("way", ["allgather", "sharded"])
@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 4), (4, 1)])
def test_another_number_of_workers_loses_nothing(old: int, new: int, way: str) -> None:
    states = saved(old, 8, collective=way)
    resharded = reshard_states(states, new)
    for state in resharded:
        assert same(state["local"]["anchor"], states[0]["local"]["anchor"])
        assert same(state["local"]["momentum"], states[0]["local"]["momentum"])
        assert state["local"]["since"] == 0 and not state["local"]["weights"]
    assert states[0]["local"]["weights"] and float(mean_owed(states).norm()) > 0
    torch.testing.assert_close(mean_owed(resharded), mean_owed(states), rtol=0, atol=1e-6)

    def work(net: Transport) -> Tensor:
        model = make_model(seed=4)
        local = make_local(net, model, collective=way)
        local.load_state_dict(reshard_states(states, new)[net.rank])
        for step in range(3):
            walk(model, net.rank, step)
            local.step()
        return flat(model)

    first, *others = run_in_process(new, work)
    assert all(torch.equal(first, other) for other in others)


def test_without_memory_a_broken_period_is_lost_and_said_so() -> None:
    states = saved(3, 8, compressor="dense")
    assert all(not state["residuals"] for state in reshard_states(states, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """The anchor has at least 32 bits, and rounding it to the weights is nobody's movement."""

    def work(net: Transport) -> tuple[Tensor, Tensor]:
        model = make_model(dtype=dtype)
        local = make_local(net, model, **EXACT, **PLAIN)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter * (0.01 if net.rank else 0.0))
        local.synchronize() if local.since else [local.step() for _ in range(3)]
        anchor = local.state_dict()["local"]["anchor"]
        for _ in range(6):  # nobody moves: nothing may change
            local.step()
        assert same(anchor, local.state_dict()["local"]["anchor"])
        assert all(tensor.dtype in (torch.float32, torch.float64) for tensor in anchor.values())
        return flat(model), torch.cat([tensor.reshape(-1).double() for tensor in anchor.values()])

    (one, anchor), (two, _) = run_in_process(2, work)
    assert torch.equal(one, two)
    assert torch.equal(anchor.to(dtype).double(), one)


def test_meeting_early_and_the_ledger() -> None:
    def work(net: Transport) -> None:
        model = make_model()
        local = make_local(net, model, steps=10)
        local.synchronize()
        assert local.meetings == 0, "nobody has moved: nothing to do"
        for step in range(4):
            walk(model, net.rank, step)
            local.step()
        local.synchronize()
        assert (local.meetings, local.since) == (1, 0)
        ring = 2 * (net.world_size - 1) * 4 * flat(model).numel() // net.world_size
        assert local.stats.total.dense_bytes == pytest.approx(4 * ring, rel=0.01)
        assert local.stats.total.steps == 1 and "every 10 steps" in str(local.stats)
        assert local.residual_norm() > 0

    run_in_process(3, work)


def wrong_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Transport], None]:
    states = saved(2, 4)

    def work(net: Transport) -> None:
        model = make_model()
        local = make_local(net, model)
        before = local.state_dict()
        try:
            local.load_state_dict(change(states[net.rank]) if net.rank else states[0])
        finally:
            assert same(before, local.state_dict()), "nothing may change"

    return work


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {k: v for k, v in s.items() if k != "local"}, "not a state of LocalSync"),
        (lambda s: s | {"local": {}}, "damaged state: KeyError 'since'"),
        (lambda s: s | {"local": s["local"] | {"since": 0}}, "differs from rank 0 in state.since: 0, not 1"),
        (
            lambda s: s | {"local": s["local"] | {"since": torch.ones(1)}},
            r"damaged state: since is 'tensor",
        ),
        (lambda s: s | {"step": torch.ones(1)}, r"damaged state: step is 'tensor"),
        (lambda s: s | {"local": s["local"] | {"anchor": {}}}, "anchor: '0.weight' is in the model alone"),
        (
            lambda s: s | {"local": s["local"] | {"momentum": s["local"]["momentum"] | {"x": torch.ones(1)}}},
            "momentum: 'x' is in the state alone",
        ),
        (
            lambda s: (
                s | {"local": s["local"] | {"weights": s["local"]["weights"] | {"3.bias": torch.ones(2)}}}
            ),
            r"weights of '3.bias' has shape \(2,\), the parameter \(9,\)",
        ),
        (
            lambda s: (
                s | {"local": s["local"] | {"anchor": s["local"]["anchor"] | {"3.bias": torch.ones(9)}}}
            ),
            "rank 1 differs from rank 0 in state.anchor and momentum",
        ),
        (lambda s: s | {"rank": 0}, "each rank loads its own"),
        (lambda s: None, "not a state of LocalSync"),
    ],
    ids=[
        "none",
        "empty",
        "since",
        "no number",
        "no step",
        "anchor",
        "momentum",
        "weights",
        "another anchor",
        "rank",
        "nothing",
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_all(change: Any, message: str) -> None:
    with pytest.raises((ValueError, SyncError), match=message):
        run_in_process(2, wrong_state(change))


def test_gradients_cannot_go_on_from_local_steps() -> None:
    [state] = saved(1, 3)
    shapes = {name: anchor.shape for name, anchor in state["local"]["anchor"].items()}
    config = CompressionConfig(ratio=0.1)

    def work(net: Transport) -> None:
        Reducer(from_config(config), config, net).load_state_dict(state, shapes)

    with pytest.raises(ValueError, match="saved by LocalSync: what it owes are changes of weights"):
        run_in_process(1, work)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 2.5}, r"steps must be at least 1, got 2\.5"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"collective": "algather"}, "did you mean 'allgather'"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_in_process(1, lambda net: make_local(net, make_model(), **options))


def test_mistakes_are_named() -> None:
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Module, got list"):
        LocalSync([], steps=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"CompressionConfig\(compressor=\.\.\.\)"):
        LocalSync(make_model(), {"ratio": 0.1}, steps=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        LocalSync(make_model().requires_grad_(False), steps=3)

    def differ(net: Transport) -> None:
        make_local(net, make_model(), steps=3 + net.rank)

    with pytest.raises(SyncError, match=r"rank 1 differs from rank 0 in local\.steps: 4, not 3"):
        run_in_process(2, differ)
    with LocalSync(make_model(), steps=2) as local:
        assert not local.step()
    with pytest.raises(SyncError, match="was closed"):
        local.step()
    local.close()


def test_a_peer_that_is_gone_is_an_error_that_stays() -> None:
    begun = threading.Event()

    def work(net: Transport) -> tuple[str, str]:
        model = make_model()
        local = make_local(net, model, steps=1)
        if net.rank == 1:
            assert begun.wait(60)
            net.close(failed=True)
            return "", ""
        begun.set()
        walk(model, 0, 0)
        before = flat(model)
        with pytest.raises(SyncError) as first:
            local.step()
        with pytest.raises(SyncError, match="an earlier meeting failed") as second:
            local.step()
        assert torch.equal(before, flat(model)) and local.error is first.value
        return str(first.value), str(second.value)

    assert "gone" in run_in_process(2, work)[0][0]


@pytest.mark.parametrize("world", [2, 3])
def test_weights_that_were_damaged_on_their_way(world: int) -> None:
    """Rank 0's weights come to everyone without a checksum: so they are compared."""

    def work(net: Transport) -> None:
        real = net.all_reduce

        def damaging(tensor: Tensor) -> None:
            real(tensor)
            if net.rank == 1:
                tensor.view(-1).view(torch.uint8)[7] ^= 1

        net.all_reduce = damaging  # type: ignore[method-assign]
        told = "rank 1 received something else" if world == 3 else "the ranks differ"
        with pytest.raises(SyncError, match=f"rank 0's weights and buffers: {told}"):
            make_local(net, make_model())

    run_in_process(world, work)


@pytest.mark.parametrize("replaced", [False, True], ids=["unfrozen", "replaced"])
def test_what_no_meeting_would_synchronise_is_named(replaced: bool) -> None:
    """A layer that was frozen, or not there, at the start would drift apart without a word."""

    def work(net: Transport) -> None:
        model = make_model()
        model[0].requires_grad_(False)
        local = make_local(net, model)
        for step in range(3):
            walk(model, net.rank, step)
            local.step()
        if replaced:
            model[3] = nn.Linear(40, 9)
        else:
            model[0].requires_grad_(True)
        assert not local.step() and not local.step()
        name = "3.weight" if replaced else "0.weight"
        with pytest.raises(ValueError, match=f"'{name}' is trained now and was frozen, or another, when"):
            local.step()

    run_in_process(2, work)


def test_unfrozen_on_one_rank_alone_the_others_do_not_wait() -> None:
    def work(net: Transport) -> str:
        model = make_model()
        model[0].requires_grad_(False)
        local = make_local(net, model, steps=1)
        model[0].requires_grad_(net.rank == 1)
        with pytest.raises((ValueError, SyncError)) as caught:
            local.step()
        return f"{type(caught.value).__name__}: {caught.value}"

    other, mine = run_in_process(2, work)
    assert mine.startswith("ValueError: '0.weight' is trained now")
    assert other.startswith("SyncError: ") and "a peer of this in-process network is gone" in other
