"""A ratio that changes in the middle of a run: nothing is lost, all workers agree, resuming is exact."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from comparing import same
from torch import Tensor

from compressed_ddp import (
    CompressionConfig,
    DistributedBackend,
    ErrorFeedbackBuffer,
    SyncError,
    get_compressor,
    reshard_states,
)
from compressed_ddp.communication import Reducer, run_in_process
from compressed_ddp.compression.factory import from_config
from compressed_ddp.layout import BucketLayout
from compressed_ddp.schedules import Schedule, constant, steps, warmup
from compressed_ddp.types import Transport

SHAPES = {"conv": torch.Size([16, 9, 9]), "bias": torch.Size([16]), "weight": torch.Size([60, 21])}
LAYOUT = BucketLayout(tuple(SHAPES), tuple(SHAPES.values()))
UP_AND_DOWN = steps(0.3, {3: 0.01, 6: 1.0, 7: 0.05})
WAYS = pytest.mark.parametrize("way", ["allgather", "sharded", "auto"])


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(100 * step + rank))


def reducer(net: Transport, **options: Any) -> Reducer:
    config = CompressionConfig(**({"ratio": 0.05, "min_compress_numel": 64} | options))
    return Reducer(from_config(config), config, net)


def advance(sync: Reducer, schedule: Schedule, rank: int, step: int) -> Tensor:
    """One step, as a training loop would take it."""
    if schedule(step) != sync.ratio:
        sync.set_ratio(schedule(step))
    flat = gradient(rank, step)
    sync.reduce_(LAYOUT, flat, last=True)
    return flat


# --- schedules -----------------------------------------------------------------------------


def test_a_warmup_comes_down_by_one_factor() -> None:
    ratio = warmup(0.001, 4.0)
    found = [ratio(epoch) for epoch in range(5)]
    for first, second in pairwise(found):
        assert second / first == pytest.approx(0.001**0.2)
    assert ratio(0.99) == ratio(0.0) and ratio(4.0) == ratio(400.0) == 0.001
    assert ratio(3.9999999999999996) >= 0.001
    assert warmup(0.1, 0.0)(0.0) == 0.1
    assert [round(warmup(0.01, 2.0, stages=1)(epoch), 9) for epoch in (0, 1, 2)] == [0.1, 0.1, 0.01]


def test_steps_and_constants() -> None:
    assert [UP_AND_DOWN(at) for at in (0, 2.9, 3, 6.5, 7, 100)] == [0.3, 0.3, 0.01, 1.0, 0.05, 0.05]
    assert constant(0.5)(17) == 0.5


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: constant(0.0), r"ratio must be in \(0, 1\], got 0.0"),
        (lambda: steps(0.1, {2: 1.5}), r"got 1.5"),
        (lambda: warmup(0.1, -1.0), r"takes 0 or more, got -1.0"),
        (lambda: warmup(0.1, 1.0, stages=0), r"at least one stage"),
    ],
)
def test_impossible_schedules(wrong: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        wrong()


# --- in force ------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("name", ["topk", "threshold", "randomk"])
def test_nothing_is_lost_and_all_agree(name: str, way: str) -> None:
    """Applied + owed == true over every change, to the bit the same everywhere; bytes follow the ratio."""

    def work(net: Transport) -> tuple[list[Tensor], dict[str, Any], list[int]]:
        sync = reducer(net, compressor=name, collective=way)
        results, sent = [], []
        for step in range(10):
            results.append(advance(sync, UP_AND_DOWN, net.rank, step))
            sent.append(sync.stats.last.bytes_sent)
            assert sync.ratio == sync.stats.ratio == sync.stats.as_dict()["ratio"] == UP_AND_DOWN(step)
            assert f"ratio {UP_AND_DOWN(step):g}," in sync.stats.method
        assert sync.config.ratio == 0.05 and sync.step == 10
        return results, sync.state_dict(), sent

    ranks = run_in_process(4, work)
    for results, *_ in ranks[1:]:
        assert same(results, ranks[0][0])
    true = sum(gradient(rank, step).double() for rank in range(4) for step in range(10)) / 4
    alone = reshard_states([state for _, state, _ in ranks], 1)[0]["residuals"]
    owed = torch.cat([alone[name].reshape(-1) for name in LAYOUT.names]).double()
    applied = torch.stack(ranks[0][0]).double().sum(0)
    torch.testing.assert_close(applied + owed, true, rtol=0, atol=3e-5)
    sent = ranks[0][2]
    assert sent[3] < sent[7] < sent[0] < sent[6]
    assert sent[0] == sent[1] == sent[2] and sent[3] == sent[5] and sent[7] == sent[9]


def test_owners_keep_what_they_owe() -> None:
    """The same bucket by the same way with another ratio: no detour over the worker's residual."""

    def work(net: Transport) -> None:
        sync = reducer(net, collective="sharded")
        for step in range(3):
            advance(sync, constant(0.05), net.rank, step)
        before = sync.state_dict()
        assert before["buckets"][0]["state"]["owner"].any()
        sync.set_ratio(0.2)
        collective = sync._lanes.open(LAYOUT, torch.device("cpu"))
        after = sync.state_dict()
        assert collective.traffic > 2 * sync.stats.last.bytes_sent
        assert same(before["residuals"], after["residuals"]) and same(before["buckets"], after["buckets"])

    run_in_process(3, work)


@WAYS
def test_resumed_in_the_middle_of_a_warmup_it_is_the_same(way: str) -> None:
    """Saved after each step of a warm-up, and loaded into a reducer that begins with the final ratio."""
    schedule = warmup(0.01, 8.0)

    def work(net: Transport) -> None:
        whole = reducer(net, collective=way, ratio=0.01)
        found, saved = [], []
        for step in range(10):
            found.append(advance(whole, schedule, net.rank, step))
            saved.append(whole.state_dict())
        ways = {bucket["way"] for state in saved for bucket in state["buckets"]}
        assert len(ways) == (2 if way == "auto" else 1), "auto was to change its mind on the way"
        for at in range(9):
            other = reducer(net, collective=way, ratio=0.01)
            other.load_state_dict(saved[at], SHAPES)
            assert other.ratio == schedule(at) == other.stats.ratio
            for step in range(at + 1, 10):
                assert torch.equal(advance(other, schedule, net.rank, step), found[step])
            assert same(other.state_dict(), saved[-1])

    run_in_process(4, work)


def test_another_configured_ratio_wins_over_the_saved_one() -> None:
    """``--ratio`` given anew at resume means something; a state from before there were schedules loads."""

    def work(net: Transport) -> None:
        old = reducer(net, ratio=0.01)
        advance(old, constant(0.3), net.rank, 0)
        state = old.state_dict()
        assert (state["ratio"], state["config"]["ratio"]) == (0.3, 0.01)
        other = reducer(net, ratio=0.02)
        other.load_state_dict(state, SHAPES)
        assert other.ratio == 0.02
        again = reducer(net, ratio=0.01)
        again.load_state_dict({key: value for key, value in state.items() if key != "ratio"}, SHAPES)
        assert again.ratio == 0.01
        for damage in ({"ratio": 7}, {"config": {}}, {"config": None}):
            with pytest.raises(ValueError, match=r"ratio must be in|damaged state"):
                again.load_state_dict(state | damage, SHAPES)

    run_in_process(2, work)


def test_loading_takes_one_ratio_on_all_ranks() -> None:
    def work(net: Transport) -> str:
        sync = reducer(net)
        advance(sync, constant(0.3), net.rank, 0)
        state = sync.state_dict() | ({"ratio": 0.2} if net.rank == 1 else {})
        with pytest.raises(SyncError, match=r"rank 1 differs from rank 0 in state.ratio: 0.2, not 0.3"):
            sync.load_state_dict(state, SHAPES)

    run_in_process(2, work)


# --- mistakes ------------------------------------------------------------------------------


def test_ranks_that_differ_are_told_and_nothing_changes() -> None:
    def work(net: Transport) -> tuple[str, str]:
        sync = reducer(net)
        advance(sync, constant(0.05), net.rank, 0)
        told = []
        for wrong in (0.3 if net.rank == 2 else 0.2, 0.0 if net.rank == 1 else 0.2):
            try:
                sync.set_ratio(wrong)
            except (SyncError, ValueError) as error:
                told.append(f"{type(error).__name__}: {error}")
        assert sync.ratio == 0.05
        assert torch.isfinite(advance(sync, constant(0.05), net.rank, 1)).all()
        return told[0], told[1]

    found = run_in_process(3, work)
    for rank, (differs, cannot) in enumerate(found):
        assert differs.startswith("SyncError: rank 2 differs from rank 0 in ratio: 0.3, not 0.2")
        if rank == 1:
            assert cannot.startswith("ValueError: ratio must be in (0, 1], got 0.0")
        else:
            assert cannot.startswith("SyncError: rank 1 cannot take part: ratio must be in (0, 1]")


@pytest.mark.parametrize("name", ["dense", "sign", "powersgd"])
def test_methods_that_send_everything_have_no_ratio(name: str) -> None:
    def work(net: Transport) -> None:
        reducer(net, compressor=name).set_ratio(0.1)

    with pytest.raises(ValueError, match=f"'{name}' sends every entry: it has no ratio to change"):
        run_in_process(1, work)


def test_loops_written_by_hand() -> None:
    """Before the first step, which compares it, and between steps; without a compressor there is no ratio."""

    def work(net: Transport) -> list[int]:
        quiet = CompressionConfig(guard_every=0)  # whose bytes would count
        backend = DistributedBackend(get_compressor(0.01), ErrorFeedbackBuffer(), config=quiet, transport=net)
        weight = torch.nn.Parameter(torch.zeros(4000))
        sent = []
        for ratio in (0.2, 0.2, 0.05):
            backend.set_ratio(ratio)
            weight.grad = torch.randn(4000)
            backend.allreduce_gradients([("weight", weight)])
            assert backend.ratio == ratio and backend.stats is not None
            sent.append(backend.stats.last.bytes_sent)
        other = DistributedBackend(get_compressor(0.01), ErrorFeedbackBuffer(), transport=net)
        other.load_state_dict(backend.state_dict(), [("weight", weight)])
        assert other.ratio == 0.05
        return sent

    first, second, third = run_in_process(2, work)[0]
    assert first == second > 3 * third

    def differ(net: Transport) -> None:
        backend = DistributedBackend(get_compressor(0.01), ErrorFeedbackBuffer(), transport=net)
        backend.set_ratio(0.1 + 0.1 * net.rank)
        weight = torch.nn.Parameter(torch.zeros(40))
        with pytest.raises(SyncError, match=r"rank 1 differs from rank 0 in ratio: 0.2, not 0.1"):
            backend.allreduce_gradients([("weight", weight)])

    run_in_process(2, differ)
    with pytest.raises(ValueError, match="'dense' sends every entry"):
        DistributedBackend().set_ratio(0.5)
    assert DistributedBackend().ratio == 1.0
