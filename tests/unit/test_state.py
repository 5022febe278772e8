"""Saved states: moving to another number of workers, and splitting buckets that are too large."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compressed_ddp import (
    CompressionConfig,
    DistributedBackend,
    ErrorFeedbackBuffer,
    LocalSync,
    reshard_states,
)
from compressed_ddp.communication import Reducer, lanes, run_in_process
from compressed_ddp.communication.collectives import AllGather
from compressed_ddp.communication.lanes import split_by_size
from compressed_ddp.compression import TopKCompressor
from compressed_ddp.compression.factory import from_config
from compressed_ddp.layout import BucketLayout
from compressed_ddp.types import MAX_NUMEL, SyncError, Transport

LAYOUT = BucketLayout(("a", "b"), (torch.Size([40, 30]), torch.Size([700])))
SHAPES = dict(zip(LAYOUT.names, LAYOUT.shapes, strict=True))


def states_of(world: int, way: str = "sharded") -> list[dict[str, object]]:
    config = CompressionConfig(ratio=0.05, collective=way)

    def work(net: Transport) -> dict[str, object]:
        reducer = Reducer(from_config(config), config, net)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + net.rank)
            reducer.reduce_(LAYOUT, torch.randn(LAYOUT.numel, generator=generator), last=True)
        return reducer.state_dict()

    return run_in_process(world, work)


def flat(state: dict[str, object]) -> Tensor:
    return torch.cat([state["residuals"][name].reshape(-1) for name in LAYOUT.names]).double()


def mean_owed(states: list[dict[str, object]]) -> Tensor:
    """What all workers together owe to the mean; owners' debts folded in by the library itself."""
    folded = reshard_states(states, len(states) + 1)
    return torch.stack([flat(state) for state in folded]).sum(0) / len(folded)


def test_alone_only_what_is_used_is_paid() -> None:
    """DDP throws away what a hook gives to a parameter that was not used."""
    [state] = reshard_states(states_of(2), 1)
    config = CompressionConfig(ratio=0.05, hold_unused=True, collective="sharded")

    def work(net: Transport) -> None:
        reducer = Reducer(from_config(config), config, net)
        reducer.load_state_dict(state, SHAPES)
        gradient = torch.ones(LAYOUT.numel)
        gradient[1200:] = 0  # b
        reducer.reduce_(LAYOUT, gradient, last=True)
        assert torch.equal(gradient[:1200], 1 + state["residuals"]["a"].view(-1))
        assert not gradient[1200:].any()
        left = reducer.state_dict()["residuals"]
        assert torch.equal(left["b"], state["residuals"]["b"]) and not left["a"].any()

    run_in_process(1, work)


@pytest.mark.parametrize("way", ["allgather", "sharded"])
@pytest.mark.parametrize(("old", "new"), [(4, 3), (3, 4), (4, 1), (2, 5), (5, 2)])
def test_another_world_size_conserves_the_mean_owed(old: int, new: int, way: str) -> None:
    states = states_of(old, way)
    resharded = reshard_states(states, new)
    assert [s["rank"] for s in resharded] == list(range(new))
    total = torch.stack([flat(state) for state in resharded]).sum(0)
    torch.testing.assert_close(total / new, mean_owed(states), rtol=0, atol=1e-5)
    direct = (
        sum(torch.cat([s["residuals"][n].reshape(-1) for n in LAYOUT.names]).double() for s in states) / old
    )
    owners = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    if way == "sharded":
        for rank, state in enumerate(states):
            for local, debt in enumerate(state["buckets"][0]["state"]["owner"].tolist()):
                owners[(local // 64) * 64 * old + rank * 64 + local % 64] += debt
    torch.testing.assert_close(mean_owed(states), direct + owners, rtol=0, atol=1e-5)

    def work(net: Transport) -> int:
        config = CompressionConfig(ratio=0.05, collective=way)
        reducer = Reducer(from_config(config), config, net)
        reducer.load_state_dict(resharded[net.rank], SHAPES)
        reducer.reduce_(LAYOUT, torch.randn(LAYOUT.numel), last=True)
        return reducer.step

    assert run_in_process(new, work) == [5] * new


def test_a_single_worker_pays_what_is_owed() -> None:
    """Alone nothing is sent: what a larger job still owed is applied at once, and then gone."""
    alone = reshard_states(states_of(4), 1)

    def work(net: Transport) -> None:
        config = CompressionConfig(ratio=0.05)
        reducer = Reducer(from_config(config), config, net)
        reducer.load_state_dict(alone[0], SHAPES)
        gradient = torch.randn(LAYOUT.numel)
        bucket = gradient.clone()
        reducer.reduce_(LAYOUT, bucket, last=True)
        torch.testing.assert_close(bucket.double(), gradient + flat(alone[0]), rtol=0, atol=1e-6)
        assert reducer.memory.norm() == 0.0

    run_in_process(1, work)


def test_saved_again_before_a_step_is_the_same() -> None:
    """What was loaded and not yet used must be in the next state too."""
    states = states_of(3)

    def work(net: Transport) -> dict[str, object]:
        config = CompressionConfig(ratio=0.05, collective="sharded")
        reducer = Reducer(from_config(config), config, net)
        reducer.load_state_dict(states[net.rank], SHAPES)
        again = reducer.state_dict()
        reducer.reduce_(LAYOUT, torch.randn(LAYOUT.numel), last=True)
        return again

    for state, again in zip(states, run_in_process(3, work), strict=True):
        assert torch.equal(flat(state), flat(again))
        (one,), (two,) = state["buckets"], again["buckets"]
        assert one["names"] == two["names"]
        assert torch.equal(one["state"]["owner"], two["state"]["owner"])


def test_residuals_without_error_feedback_are_refused() -> None:
    states = states_of(2)

    def work(net: Transport) -> None:
        config = CompressionConfig(ratio=0.05, error_feedback=False)
        Reducer(from_config(config), config, net).load_state_dict(states[net.rank], SHAPES)

    with pytest.raises(ValueError, match="error_feedback is off"):
        run_in_process(2, work)


def rename_way(state: dict[str, object]) -> None:
    state["buckets"][0]["way"] = "pigeon"


def rename_factor(state: dict[str, object]) -> None:
    factors = state["buckets"][0]["state"]
    factors["right factor of z"] = factors.pop("right factor of a")


def cut_factor(state: dict[str, object]) -> None:
    factors = state["buckets"][0]["state"]
    factors["right factor of a"] = factors["right factor of a"][1:].clone()


@pytest.mark.parametrize(
    ("rank", "change", "told"),
    [
        (3, None, "saved with another rank"),
        (2, rename_way, "unknown collective in a saved state 'pigeon'"),
        (2, rename_factor, "no right factor of shape"),
        (2, cut_factor, "no right factor of shape"),
    ],
    ids=["another rank", "another way", "a factor of another", "a factor that is too small"],
)
def test_what_a_collective_cannot_take_back_changes_nothing(
    rank: int, change: Callable[[dict[str, object]], None] | None, told: str
) -> None:
    """PowerSGD's factors: wrong on one worker alone, all of them say so before the first step, and go on."""

    def reducer_of(net: Transport, approximation: int) -> Reducer:
        config = CompressionConfig("powersgd", rank=approximation)
        reducer = Reducer(from_config(config), config, net)
        reducer.reduce_(LAYOUT, torch.ones(LAYOUT.numel), last=True)
        return reducer

    states = run_in_process(2, lambda net: reducer_of(net, 2).state_dict())
    assert states[1]["buckets"][0]["way"] == "lowrank"
    if change is not None:
        change(states[1])

    def work(net: Transport) -> str:
        reducer = reducer_of(net, rank)
        before = reducer.state_dict()
        with pytest.raises((ValueError, SyncError)) as caught:
            reducer.load_state_dict(states[net.rank], SHAPES)
        after = reducer.state_dict()
        assert torch.equal(flat(before), flat(after)) and after["step"] == 1
        reducer.reduce_(LAYOUT, torch.ones(LAYOUT.numel), last=True)
        return str(caught.value)

    assert all(told in text for text in run_in_process(2, work))


@pytest.mark.parametrize("matrix", ["a", "owner"])
def test_powersgd_goes_on_where_it_was(matrix: str) -> None:
    """To the bit, so that the check above does not refuse what fits; and Top-K may go on from its state,
    and more workers. A parameter's name may be a word that other states know."""
    config = CompressionConfig("powersgd")
    layout = BucketLayout((matrix, "b"), LAYOUT.shapes)
    shapes = dict(zip(layout.names, layout.shapes, strict=True))

    def steps(reducer: Reducer, numbers: range) -> Tensor:
        for step in numbers:
            generator = torch.Generator().manual_seed(10 * step + reducer.transport.rank)
            bucket = torch.randn(LAYOUT.numel, generator=generator)
            reducer.reduce_(layout, bucket, last=True)
        return bucket

    def work(net: Transport) -> dict[str, object]:
        whole, second = (Reducer(from_config(config), config, net) for _ in range(2))
        steps(whole, range(3))
        state = whole.state_dict()
        second.load_state_dict(state, shapes)
        assert torch.equal(steps(whole, range(3, 5)), steps(second, range(3, 5)))
        other = CompressionConfig("topk", ratio=0.1)
        third = Reducer(from_config(other), other, net)
        third.load_state_dict(state, shapes)
        steps(third, range(3, 4))
        return state

    states = run_in_process(2, work)
    for name in layout.names:  # what the mean owes is the same for three
        owed = [
            sum(state["residuals"][name] for state in some) for some in (states, reshard_states(states, 3))
        ]
        torch.testing.assert_close(owed[0] / 2, owed[1] / 3)


def test_the_same_world_size_is_left_alone() -> None:
    states = states_of(3)
    for old, new in zip(states, reshard_states(states, 3), strict=True):
        assert old == new and old is not new


def test_resharding_wants_all_states_in_order() -> None:
    states = states_of(3)
    for wrong in (states[:2], states[::-1], [], [{}]):
        with pytest.raises(ValueError, match="all ranks of one job, in rank order"):
            reshard_states(wrong, 2)
    with pytest.raises(ValueError, match="at least 1"):
        reshard_states(states, 0)


def test_limit_of_the_wire_format() -> None:
    """More than 2^31 - 1 elements: buckets are split, a single tensor is refused with advice."""
    half = torch.Size([MAX_NUMEL // 2])
    large = BucketLayout(("a", "b", "c"), (half, half, half))
    assert [part.names for part in split_by_size(large)] == [("a", "b"), ("c",)]
    assert split_by_size(LAYOUT) == [LAYOUT]
    with pytest.raises(ValueError, match=r"'huge' has 2,147,483,648 elements.*Split the parameter"):
        split_by_size(BucketLayout(("huge",), (torch.Size([2**31]),)))


def test_a_bucket_that_is_split_gives_the_same_means(monkeypatch: pytest.MonkeyPatch) -> None:
    from compressed_ddp.communication import reducer as module

    config = CompressionConfig(ratio=1.0, values="fp32")

    def work(net: Transport) -> tuple[Tensor, int]:
        reducer = Reducer(from_config(config), config, net)
        bucket = torch.full((LAYOUT.numel,), float(net.rank))
        reducer.reduce_(LAYOUT, bucket, last=True)
        return bucket, sum(reducer.stats.collectives.values())

    monkeypatch.setattr(module, "split_by_size", lambda layout: split_by_size(layout, 1200))
    for bucket, buckets in run_in_process(3, work):
        assert torch.equal(bucket, torch.ones(LAYOUT.numel)) and buckets == 2


@pytest.mark.parametrize("strides", [[0, 0], [1, 1], [30, 2], [30], 7, torch.zeros(1).expand(10**9)])
def test_strides_that_no_parameter_has(strides: object) -> None:
    """Owners' debts lie in the order of memory; by such strides some would count twice, and others never."""
    states = states_of(2)
    for state in states:
        state["buckets"][0]["strides"] = [[30, 1], [1]]
    assert len(reshard_states(states, 3)) == 3
    states[1]["buckets"][0]["strides"] = [strides, [1]]
    with pytest.raises(ValueError, match="damaged state"):
        reshard_states(states, 3)


def test_numbers_that_32_bits_do_not_hold() -> None:
    states = states_of(2)
    states[0]["residuals"]["a"] = torch.full((40, 30), 1e300, dtype=torch.float64)
    with pytest.raises(ValueError, match="NaN or infinite"):
        reshard_states(states, 3)
    with pytest.raises(ValueError, match="NaN or infinite"):
        ErrorFeedbackBuffer().load_state_dict(states[0]["residuals"])


def failing(*_: object) -> None:
    raise SyncError("a peer is gone")


def test_a_step_that_fails_while_buckets_change_leaves_every_bit() -> None:
    """In a loop of one's own, as under DDP: owners have handed over by then, and that is undone."""

    def parameters(seed: int) -> dict[str, torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(seed)
        named = {name: torch.nn.Parameter(torch.zeros(40, 40)) for name in "abcd"}
        for parameter in named.values():
            parameter.grad = torch.randn(40, 40, generator=generator)
        return named

    def backend(net: Transport, cap: float) -> DistributedBackend:
        config = CompressionConfig(ratio=0.05, collective="sharded")
        return DistributedBackend(
            from_config(config), ErrorFeedbackBuffer(), config=config, bucket_cap_mb=cap, transport=net
        )

    def first(net: Transport) -> dict[str, object]:
        mine = backend(net, 1.0)
        for step in range(4):
            mine.allreduce_gradients(parameters(10 * step + net.rank).items())
        return mine.state_dict()

    saved = run_in_process(2, first)

    def second(net: Transport) -> bool:
        mine, named = backend(net, 0.008), parameters(99 + net.rank)
        mine.load_state_dict(saved[net.rank], named.items())
        before = mine.state_dict()
        net.all_to_all = failing  # type: ignore[method-assign]
        with pytest.raises(SyncError, match="a peer is gone"):
            mine.allreduce_gradients(named.items())
        after = mine.state_dict()
        return all(torch.equal(after["residuals"][name], before["residuals"][name]) for name in "abcd")

    assert run_in_process(2, second) == [True, True]


def test_a_meeting_that_fails_while_buckets_change_leaves_every_bit() -> None:
    def local(net: Transport, cap: float) -> LocalSync:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(4)))
        config = CompressionConfig(ratio=0.05, collective="sharded")
        return LocalSync(model, config, steps=1, bucket_cap_mb=cap, transport=net)

    def walk(sync: LocalSync, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in sync._model.parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        sync.step()

    def first(net: Transport) -> dict[str, object]:
        sync = local(net, 1.0)
        for step in range(4):
            walk(sync, 10 * step + net.rank)
        return sync.state_dict()

    saved = run_in_process(2, first)

    def second(net: Transport) -> bool:
        sync = local(net, 0.008)
        sync.load_state_dict(saved[net.rank])
        before = sync.state_dict()["residuals"]
        net.all_to_all = failing  # type: ignore[method-assign]
        with pytest.raises(SyncError, match="a peer is gone"):
            walk(sync, 99 + net.rank)
        after = sync.state_dict()["residuals"]
        return all(torch.equal(after[name], before[name]) for name in before)

    assert run_in_process(2, second) == [True, True]


class Remembers(AllGather):
    """A collective that owes something in a way of its own."""

    def state_dict(self) -> dict[str, Tensor]:
        return {"debts": torch.ones(3)}


def test_a_debt_that_nobody_can_fold_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same buckets it is taken back; by others, by another way or by more workers it is refused."""
    monkeypatch.setitem(lanes.COLLECTIVES, "mine", Remembers)
    monkeypatch.setattr(TopKCompressor, "collectives", (*TopKCompressor.collectives, "mine"))
    told = "'debts' of the bucket with 'a', which 'mine' saved, cannot be handed over"

    def reducer_of(net: Transport, way: str = "mine") -> Reducer:
        config = CompressionConfig(ratio=0.1, collective=way)
        return Reducer(from_config(config), config, net)

    def work(net: Transport) -> dict[str, object]:
        first, again = reducer_of(net), reducer_of(net)
        first.reduce_(LAYOUT, torch.ones(LAYOUT.numel), last=True)
        state = first.state_dict()
        again.load_state_dict(state, SHAPES)
        again.reduce_(LAYOUT, torch.ones(LAYOUT.numel), last=True)
        with pytest.raises(ValueError, match=told):
            reducer_of(net, "allgather").load_state_dict(state, SHAPES)
        other = reducer_of(net)
        other.load_state_dict(state, SHAPES)
        alone = BucketLayout(LAYOUT.names[:1], LAYOUT.shapes[:1])
        with pytest.raises(ValueError, match=told):
            other.reduce_(alone, torch.ones(alone.numel), last=True)
        return state

    states = run_in_process(2, work)
    with pytest.raises(ValueError, match=told):
        reshard_states(states, 3)
    for state in states:
        state["buckets"][0]["state"] = {}
    assert len(reshard_states(states, 3)) == 3
