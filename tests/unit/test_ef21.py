"""EF21 over threads: what all agree on is the mean of what is believed of each, by every way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import same
from torch import Tensor, nn

from compressed_ddp import (
    CompressionConfig,
    DistributedBackend,
    LocalSync,
    SplitAdam,
    reshard_states,
)
from compressed_ddp.communication import Reducer, run_in_process
from compressed_ddp.compression import COMPRESSORS
from compressed_ddp.compression.factory import from_config
from compressed_ddp.error_feedback.state import fold_owner_
from compressed_ddp.layout import BucketLayout
from compressed_ddp.types import Transport

LAYOUT = BucketLayout(
    ("conv", "bias", "weight", "empty"),
    (torch.Size([16, 8, 3, 3]), torch.Size([16]), torch.Size([60, 21]), torch.Size([0])),
)
HALVES = (
    BucketLayout(LAYOUT.names[:2], LAYOUT.shapes[:2]),
    BucketLayout(LAYOUT.names[2:], LAYOUT.shapes[2:]),
)
SHAPES = dict(zip(LAYOUT.names, LAYOUT.shapes, strict=True))
WAYS = [
    (name, way)
    for name, cls in sorted(COMPRESSORS.items())
    for way in cls.collectives
    if name != "terngrad"  # no contraction
]
MEMORIES = pytest.mark.parametrize("memory", ["ef21", "ef21-sgdm"])
BOTH = pytest.mark.parametrize("way", ["allgather", "sharded"])


def gradient(rank: int, step: int, layout: BucketLayout = LAYOUT) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(layout.numel, generator=generator)


def reducer(net: Transport, memory: str = "ef21", **options: Any) -> Reducer:
    config = CompressionConfig(**({"ratio": 0.1, "min_compress_numel": 64, "memory": memory} | options))
    return Reducer(from_config(config), config, net)


def flat(by_name: dict[str, Tensor]) -> Tensor:
    return torch.cat([by_name[name].reshape(-1) for name in LAYOUT.names]).double()


def untold(states: list[dict[str, Any]]) -> Tensor:
    """What the owners of shards still owe to the mean."""
    total = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for state in states:
        for bucket in state["buckets"]:
            if "owner" in bucket["state"]:
                layout = BucketLayout(tuple(bucket["names"]), tuple(map(torch.Size, bucket["shapes"])))
                owed = torch.zeros(layout.numel)
                fold_owner_(owed, bucket["state"]["owner"], state["rank"], state["world_size"])
                views = layout.views(owed / len(states))
                for name, view in LAYOUT.views(total).items():
                    view += views.get(name, torch.zeros(()))
    return total


def check_invariant(states: list[dict[str, Any]]) -> None:
    """All agree on g, and g + what owners owe is the mean of all g_i."""
    for state in states:
        assert same(state["kept"]["agreed"], states[0]["kept"]["agreed"])
        assert not state["residuals"]
    believed = torch.stack([flat(state["kept"]["estimate"]) for state in states]).mean(0)
    agreed = flat(states[0]["kept"]["agreed"])
    torch.testing.assert_close(agreed + untold(states), believed, rtol=0, atol=2e-6 * len(states))
    assert bool(agreed.any())


@pytest.mark.parametrize("world", [2, 5])
@pytest.mark.parametrize(
    ("memory", "name", "way"),
    [("ef21", *row) for row in WAYS]
    + [("ef21-sgdm", *row) for row in WAYS if row[0] in ("topk", "powersgd")],
)
def test_what_all_agree_on_is_the_mean_of_what_is_believed(
    name: str, way: str, memory: str, world: int
) -> None:
    def work(net: Transport) -> tuple[list[Tensor], dict[str, Any]]:
        mine, results = reducer(net, memory, compressor=name, collective=way), []
        for step in range(8):
            bucket = gradient(net.rank, step)
            mine.reduce_(LAYOUT, bucket, last=True)
            results.append(bucket)
        return results, mine.state_dict()

    ranks = run_in_process(world, work)
    for results, state in ranks:
        assert same(results, ranks[0][0]), "workers disagree"
        assert torch.equal(results[-1].double(), flat(state["kept"]["agreed"]))
    check_invariant([state for _, state in ranks])


@MEMORIES
def test_it_is_the_algorithm_of_the_papers(memory: str) -> None:
    """Against the equations, written down once more."""
    world, k, eta = 3, 30, 0.3

    def work(net: Transport) -> list[Tensor]:
        options = {"values": "fp32", "min_compress_numel": 0, "collective": "allgather", "eta": eta}
        mine, results = reducer(net, memory, ratio=k / LAYOUT.numel, **options), []
        for step in range(10):
            mine.reduce_(LAYOUT, bucket := gradient(net.rank, step), last=True)
            results.append(bucket)
        return results

    got = run_in_process(world, work)[0]
    averages, believed = torch.zeros(2, world, LAYOUT.numel)
    for step in range(10):
        for rank in range(world):
            now = gradient(rank, step)
            averages[rank] = now if step == 0 or memory == "ef21" else (1 - eta) * averages[rank] + eta * now
            difference = averages[rank] - believed[rank]
            chosen = difference.abs().topk(k).indices
            believed[rank, chosen] += difference[chosen]
        torch.testing.assert_close(got[step], believed.mean(0), rtol=0, atol=1e-6)


@BOTH
@MEMORIES
def test_a_gradient_that_stays_is_learnt_whole(memory: str, way: str) -> None:
    """What error feedback never does: after enough steps g is the mean itself, whatever the compressor."""

    def work(net: Transport) -> Tensor:
        mine = reducer(net, memory, ratio=0.2, collective=way)
        for _ in range(40):
            mine.reduce_(LAYOUT, bucket := gradient(net.rank, 0), last=True)
        return bucket

    wanted = torch.stack([gradient(rank, 0) for rank in range(3)]).mean(0)
    for bucket in run_in_process(3, work):
        torch.testing.assert_close(bucket, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("world", [1, 2, 4])
@BOTH
def test_with_everything_sent_it_is_the_mean(way: str, world: int) -> None:
    def work(net: Transport) -> list[Tensor]:
        plain = reducer(net, ratio=1.0, values="fp32", collective=way)
        average = reducer(net, "ef21-sgdm", ratio=1.0, values="fp32", collective=way, eta=0.25)
        results = []
        for step in range(5):
            for each in (plain, average):
                each.reduce_(LAYOUT, bucket := gradient(net.rank, step), last=True)
                results.append(bucket)
        return results

    means = [torch.stack([gradient(rank, step) for rank in range(world)]).mean(0) for step in range(5)]
    average = means[0]
    for results in run_in_process(world, work):
        for step, mean in enumerate(means):
            average = mean if step == 0 else 0.75 * average + 0.25 * mean
            torch.testing.assert_close(results[2 * step], mean, rtol=0, atol=2e-6)
            torch.testing.assert_close(results[2 * step + 1], average, rtol=0, atol=2e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("world", [1, 3])
@BOTH
@pytest.mark.parametrize("memory", ["ef21-sgdm"])
def test_one_bad_gradient_changes_nothing(memory: str, way: str, world: int, bad: float) -> None:
    first, second = HALVES

    def work(net: Transport) -> None:
        mine = reducer(net, memory, collective=way)
        for step in range(3):
            mine.reduce_(first, gradient(net.rank, step, first), last=False)
            mine.reduce_(second, gradient(net.rank, step, second), last=True)
        before = mine.state_dict()
        good, poisoned = gradient(net.rank, 3, first), gradient(net.rank, 3, second)
        if net.rank == world - 1:
            poisoned[0] = bad
        mine.reduce_(first, good, last=False)
        mine.reduce_(second, poisoned, last=True)
        after = mine.state_dict()
        assert not torch.isfinite(poisoned).all() and mine.stats.total.skipped_steps == 1
        assert same(before["kept"], after["kept"]) and same(before["buckets"], after["buckets"])
        mine.reduce_(LAYOUT, bucket := gradient(net.rank, 4), last=True)
        assert torch.isfinite(bucket).all()

    run_in_process(world, work)


@pytest.mark.parametrize(
    ("name", "memory"), [("topk", "ef21"), ("topk", "ef21-sgdm"), ("powersgd", "ef21"), ("sign", "ef21-sgdm")]
)
def test_saved_and_loaded_it_goes_on_exactly(name: str, memory: str) -> None:
    """Also handed both buckets as one, as DDP does after a restart."""

    def two_buckets(mine: Reducer, rank: int, step: int) -> Tensor:
        both = gradient(rank, step)
        cut = HALVES[0].numel
        mine.reduce_(HALVES[0], both[:cut], last=False)
        mine.reduce_(HALVES[1], both[cut:], last=True)
        return both

    def work(net: Transport) -> None:
        for way in COMPRESSORS[name].collectives:
            old = reducer(net, memory, compressor=name, collective=way)
            for step in range(4):
                two_buckets(old, net.rank, step)
            new = reducer(net, memory, compressor=name, collective=way)
            new.load_state_dict(old.state_dict(), SHAPES)
            for step in range(4, 7):
                got = gradient(net.rank, step)
                new.reduce_(LAYOUT, got, last=True)
                assert torch.equal(got, two_buckets(old, net.rank, step))
            assert same(new.state_dict()["kept"], old.state_dict()["kept"])

    run_in_process(3, work)


@BOTH
def test_buckets_change_and_the_invariant_does_not(way: str) -> None:
    """Owners take back what the others have not heard of."""
    orders = [LAYOUT.names, LAYOUT.names[::-1], ("weight", "conv", "empty", "bias")]

    def work(net: Transport) -> list[dict[str, Any]]:
        mine, states = reducer(net, collective=way), []
        for step in range(9):
            names = orders[step // 3]
            layout = BucketLayout(names, tuple(SHAPES[name] for name in names))
            mine.reduce_(layout, gradient(net.rank, step), last=True)
            states.append(mine.state_dict())
        other = reducer(net, collective="allgather")
        other.load_state_dict(states[-1], SHAPES)
        other.reduce_(LAYOUT, gradient(net.rank, 9), last=True)
        return [*states, other.state_dict()]

    ranks = run_in_process(3, work)
    for states in zip(*ranks, strict=True):
        check_invariant(list(states))


@pytest.mark.parametrize(("old", "new"), [(4, 3), (3, 4), (4, 1), (2, 5)])
@BOTH
@MEMORIES
def test_another_number_of_workers(memory: str, way: str, old: int, new: int) -> None:
    """Who stays keeps what is believed of it, who comes begins with the mean, and all agree on the mean."""

    def steps(net: Transport, state: dict[str, Any] | None = None) -> dict[str, Any]:
        mine = reducer(net, memory, collective=way)
        if state is not None:
            mine.load_state_dict(state, SHAPES)
        for step in range(4):
            mine.reduce_(LAYOUT, gradient(net.rank, step), last=True)
        return mine.state_dict()

    states = run_in_process(old, steps)
    resharded = reshard_states(states, new)
    check_invariant(resharded)
    everyone = torch.stack([flat(state["kept"]["estimate"]) for state in states]).mean(0)
    for rank, state in enumerate(resharded):
        if rank < old:
            assert same(state["kept"]["estimate"], states[rank]["kept"]["estimate"])
        else:
            torch.testing.assert_close(flat(state["kept"]["estimate"]), everyone, rtol=0, atol=1e-6)
    after = run_in_process(new, lambda net: steps(net, resharded[net.rank]))
    check_invariant(after)
    assert [state["step"] for state in after] == [8] * new


def test_ranks_that_agree_on_different_things_are_told() -> None:
    def steps(net: Transport) -> dict[str, Any]:
        mine = reducer(net)
        mine.reduce_(LAYOUT, gradient(net.rank, 0), last=True)
        return mine.state_dict()

    states = run_in_process(2, steps)
    states[1]["kept"]["agreed"]["bias"] = torch.ones(16)

    def load(net: Transport) -> None:
        reducer(net).load_state_dict(states[net.rank], SHAPES)

    with pytest.raises(RuntimeError, match=r"rank 1 differs from rank 0 in state\.agreed"):
        run_in_process(2, load)


@pytest.mark.parametrize("world", [1, 2])
def test_a_parameter_that_comes_late_begins_with_its_first_gradient(world: int) -> None:
    """Unfrozen in the middle of a run, or loaded from a state that has nothing of it; a step that does not
    count is not its first."""

    def part(rank: int, step: int) -> Tensor:
        return LAYOUT.views(gradient(rank, step))["weight"]

    def work(net: Transport) -> None:
        sync, loaded = (reducer(net, "ef21-sgdm", eta=0.25, collective="allgather") for _ in "12")
        for step in range(3):
            sync.reduce_(HALVES[0], gradient(net.rank, step)[: HALVES[0].numel].contiguous(), last=True)
        loaded.load_state_dict(sync.state_dict(), SHAPES)
        bad = gradient(net.rank, 3)
        bad[0] = torch.nan
        sync.reduce_(LAYOUT, bad, last=True)
        saved = reducer(net, "ef21-sgdm", eta=0.25, collective="allgather")
        saved.load_state_dict(sync.state_dict(), SHAPES)
        for each in (sync, loaded, saved):
            before = each.state_dict()["kept"]["average"]["conv"]
            each.reduce_(LAYOUT, gradient(net.rank, 4), last=True)
            average = each.state_dict()["kept"]["average"]
            assert torch.equal(average["weight"], part(net.rank, 4))
            now = LAYOUT.views(gradient(net.rank, 4))["conv"]
            assert torch.equal(average["conv"], torch.lerp(before, now, 0.25)), "the others go on"
            each.reduce_(LAYOUT, gradient(net.rank, 5), last=True)
            mixed = torch.lerp(part(net.rank, 4), part(net.rank, 5), 0.25)
            assert torch.equal(each.state_dict()["kept"]["average"]["weight"], mixed)
            assert each.state_dict()["missed"] == dict.fromkeys(HALVES[1].names, 3)

    run_in_process(world, work)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_dtypes(dtype: torch.dtype) -> None:
    """g has 32 bits: a bucket of 16 sees it rounded, and nobody else does."""

    def work(net: Transport) -> tuple[Tensor, dict[str, Any]]:
        mine = reducer(net)
        for step in range(6):
            mine.reduce_(LAYOUT, bucket := gradient(net.rank, step).to(dtype), last=True)
        assert torch.equal(bucket, flat(mine.state_dict()["kept"]["agreed"]).to(dtype))
        return bucket, mine.state_dict()

    check_invariant([state for _, state in run_in_process(3, work)])


def test_a_worker_without_data_counts_as_zero() -> None:
    def work(net: Transport) -> tuple[Tensor, dict[str, Any]]:
        mine = reducer(net, ratio=1.0, values="fp32", hold_unused=True)
        mine.reduce_(LAYOUT, gradient(net.rank, 0), last=True)
        out = net.rank == 1
        bucket = torch.zeros(LAYOUT.numel) if out else gradient(net.rank, 1)
        mine.reduce_(LAYOUT, bucket, last=True, joined=out)
        return bucket, mine.state_dict()

    ranks = run_in_process(2, work)
    check_invariant([state for _, state in ranks])
    torch.testing.assert_close(ranks[0][0], gradient(0, 1) / 2, rtol=0, atol=1e-6)


def test_beside_a_split_optimizer() -> None:
    named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}

    def work(net: Transport) -> tuple[Tensor, dict[str, Any]]:
        half = SplitAdam(named.values())
        half.join(named)
        config = CompressionConfig(ratio=0.1, memory="ef21")
        mine = Reducer(from_config(config), config, net, sender=half)
        for step in range(4):
            mine.reduce_(LAYOUT, bucket := gradient(net.rank, step), last=True)
        return bucket, mine.state_dict()

    ranks = run_in_process(3, work)
    assert sorted(ranks[0][1]["kept"]) == ["agreed", "estimate", "square"]
    check_invariant([state for _, state in ranks])


def test_in_a_loop_of_ones_own() -> None:
    """DistributedBackend needs no buffer for it; LocalSync follows movements in the same way."""
    config = CompressionConfig(ratio=0.1, memory="ef21-sgdm")
    start = nn.Linear(30, 20)  # here: threads have one generator between them

    def work(net: Transport) -> tuple[Tensor, Tensor]:
        model = copy.deepcopy(start)
        backend = DistributedBackend(config=config, transport=net)
        local = LocalSync(nn.Linear(30, 20), config, steps=2, transport=net)
        for step in range(4):
            for p in (*model.parameters(), *local._model.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + net.rank))
            backend.allreduce_gradients(model.named_parameters())
            torch.optim.SGD(local._model.parameters(), lr=0.1).step()
            local.step()
        assert backend.stats is not None and "ef21-sgdm" in str(backend.stats)
        return model.weight.grad, local._model.weight.detach()

    (one, two), *others = run_in_process(3, work)
    for other in others:
        assert torch.equal(other[0], one) and torch.equal(other[1], two)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda net: reducer(net, "ef22"), "unknown memory 'ef22'; did you mean 'ef21'"),
        (lambda net: reducer(net, eta=0.0), r"eta must be in \(0, 1\], got 0\.0"),
        (lambda net: reducer(net, error_feedback=False), "a kind of error feedback, and that is off"),
        (lambda net: reducer(net, compressor="terngrad"), "memory='ef21' with 'terngrad'.*leave memory out"),
    ],
    ids=["name", "eta", "off", "no contraction"],
)
def test_settings_that_cannot_be(work: Callable[[Transport], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_in_process(1, work)


def test_another_memory_cannot_go_on() -> None:
    def work(net: Transport) -> None:
        old = reducer(net, "ef")
        old.reduce_(LAYOUT, gradient(net.rank, 0), last=True)
        reducer(net, "ef21").load_state_dict(old.state_dict(), SHAPES)

    with pytest.raises(
        ValueError, match=r"keeps nothing before compression, this one keeps agreed, estimate"
    ):
        run_in_process(2, work)
