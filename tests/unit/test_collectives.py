"""The conformance suite of collectives, over threads: every way, every compressor, 1 to 5 workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from comparing import same
from torch import Tensor

from compressed_ddp import CompressionConfig, SyncError
from compressed_ddp.communication import COLLECTIVES, Reducer, run_in_process
from compressed_ddp.communication.collectives import MOST_SENT, sent_share
from compressed_ddp.compression import COMPRESSORS
from compressed_ddp.compression.factory import from_config
from compressed_ddp.error_feedback.state import fold_owner_
from compressed_ddp.layout import BucketLayout
from compressed_ddp.types import Transport

LAYOUT = BucketLayout(
    ("conv", "bias", "weight", "empty", "norm"),
    (torch.Size([16, 8, 3, 3]), torch.Size([16]), torch.Size([60, 21]), torch.Size([0]), torch.Size([60])),
)
HALVES = (
    BucketLayout(LAYOUT.names[:2], LAYOUT.shapes[:2]),
    BucketLayout(LAYOUT.names[2:], LAYOUT.shapes[2:]),
)
SHAPES = dict(zip(LAYOUT.names, LAYOUT.shapes, strict=True))
WAYS = [(name, way) for name, cls in sorted(COMPRESSORS.items()) for way in cls.collectives]


def gradient(rank: int, step: int, layout: BucketLayout = LAYOUT) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(layout.numel, generator=generator)


def reducer(net: Transport, **options: Any) -> Reducer:
    config = CompressionConfig(**({"ratio": 0.1, "min_compress_numel": 64} | options))
    return Reducer(from_config(config), config, net)


def debt(state: dict[str, Any]) -> dict[str, Tensor]:
    """What one rank owes, as a worker and as an owner (times P), by name."""
    total = {name: residual.double() for name, residual in state["residuals"].items()}
    for bucket in state["buckets"]:
        if "owner" in bucket["state"]:
            layout = BucketLayout(tuple(bucket["names"]), tuple(map(torch.Size, bucket["shapes"])))
            flat = torch.zeros(layout.numel)
            fold_owner_(flat, bucket["state"]["owner"], state["rank"], state["world_size"])
            for name, view in layout.views(flat).items():
                total[name] = total[name] + view
    return total


def run_steps(
    world: int, steps: int, layout: Callable[[int], BucketLayout] = lambda step: LAYOUT, **options: Any
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], list[Any]]:
    """Reduce random gradients; applied sum, mean debt and mean true sum by name, and the ledgers."""

    def work(net: Transport) -> tuple[list[Tensor], dict[str, Any], dict[str, Tensor], Any]:
        mine = reducer(net, **options)
        results, true = [], {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
        for step in range(steps):
            now = layout(step)
            bucket = gradient(net.rank, step)
            for name, view in LAYOUT.views(bucket).items():
                true[name] += view
            laid = torch.cat([LAYOUT.view(bucket, name).reshape(-1) for name in now.names])
            mine.reduce_(now, laid, last=True)
            results.append(torch.cat([now.view(laid, name).reshape(-1) for name in LAYOUT.names]))
        return results, mine.state_dict(), true, mine.stats

    ranks = run_in_process(world, work)
    for results, *_ in ranks[1:]:
        for mine, first in zip(results, ranks[0][0], strict=True):
            assert torch.equal(mine, first), "workers disagree"
    applied = torch.stack(ranks[0][0]).double().sum(0)
    debts = [debt(state) for _, state, _, _ in ranks]
    owed = {name: sum(d[name] for d in debts) / world for name in debts[0]}
    true = {name: sum(t[name] for _, _, t, _ in ranks) / world for name in LAYOUT.names}
    return applied, owed, true, [stats for *_, stats in ranks]


def flatten(by_name: dict[str, Tensor]) -> Tensor:
    return torch.cat([by_name[name].reshape(-1) for name in LAYOUT.names])


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_same_bits_and_nothing_lost(name: str, way: str, world: int) -> None:
    """Identical results everywhere; applied + owed == true sums for all methods with feedback."""
    applied, owed, true, ledgers = run_steps(world, 12, compressor=name, collective=way)
    if ledgers[0].error_feedback:
        torch.testing.assert_close(applied + flatten(owed), flatten(true), rtol=0, atol=2e-5)
    else:
        assert not owed
        assert float((applied - flatten(true)).norm() / flatten(true).norm()) < 4.0
    for ledger in ledgers:
        assert ledger.total.bytes_sent == ledger.total.bytes_received > 0
        assert ledger.collectives == {way: 1}


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_what_was_not_used_stays_owed(name: str, way: str) -> None:
    """Unused by one rank, or by all: then DDP throws the result away, and nothing may have been paid."""
    cls, (begin, end) = COMPRESSORS[name], (LAYOUT.offsets[2], LAYOUT.offsets[3])

    def work(net: Transport) -> tuple[Tensor, Tensor, dict[str, Any]]:
        mine = reducer(net, compressor=name, collective=way, hold_unused=True)
        applied, true = torch.zeros(2, LAYOUT.numel, dtype=torch.float64)
        for step in range(12):
            bucket = gradient(net.rank, step)
            if step % 4 == 3 or step % 3 == net.rank:
                bucket[begin:end] = 0
            true += bucket
            mine.reduce_(LAYOUT, bucket, last=True)
            if step % 4 == 3:
                bucket[begin:end] = 0
            applied += bucket
        return applied, true, mine.state_dict()

    if not cls.says_zero:
        with pytest.raises(ValueError, match=f"{name!r} has one bit an entry and cannot say nothing"):
            run_in_process(3, work)
        return
    ranks = run_in_process(3, work)
    if not ranks[0][2]["config"]["error_feedback"]:
        return
    owed = sum(flatten(debt(state)) for *_, state in ranks) / 3
    true = sum(true for _, true, _ in ranks) / 3
    torch.testing.assert_close(ranks[0][0] + owed, true, rtol=0, atol=2e-5)


@pytest.mark.parametrize("way", ["allgather", "sharded"])
@pytest.mark.parametrize("scope", ["bucket", "tensor"])
@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_every_value_format_and_scope(way: str, scope: str, values: str) -> None:
    applied, owed, true, _ = run_steps(3, 10, collective=way, scope=scope, values=values)
    torch.testing.assert_close(applied + flatten(owed), flatten(true), rtol=0, atol=2e-5)


@pytest.mark.parametrize("way", ["allgather", "sharded"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ratio_one_is_the_mean(way: str, world: int) -> None:
    applied, owed, true, _ = run_steps(world, 3, ratio=1.0, values="fp32", collective=way)
    torch.testing.assert_close(applied, flatten(true), rtol=0, atol=1e-5)
    assert float(flatten(owed).abs().max()) == 0.0


@pytest.mark.parametrize("way", ["allgather", "sharded"])
def test_buckets_change_and_nothing_is_lost(way: str) -> None:
    """Layouts change every few steps; owners hand over what they owe."""
    orders = [LAYOUT.names, LAYOUT.names[::-1], ("weight", "norm", "conv", "empty", "bias")]

    def layout(step: int) -> BucketLayout:
        names = orders[step // 3 % len(orders)]
        return BucketLayout(names, tuple(LAYOUT.shapes[LAYOUT.names.index(name)] for name in names))

    applied, owed, true, _ = run_steps(3, 12, layout, collective=way)
    torch.testing.assert_close(applied + flatten(owed), flatten(true), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("name", "way"), WAYS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_bad_gradient_changes_no_residual(name: str, way: str, bad: float) -> None:
    """Two buckets a step; the second is bad on rank 1 only: nobody's state changes, all see it."""
    first, second = HALVES

    def work(net: Transport) -> tuple[Any, Any, Tensor, Any]:
        mine = reducer(net, compressor=name, collective=way)
        for step in range(3):
            mine.reduce_(first, gradient(net.rank, step, first), last=False)
            mine.reduce_(second, gradient(net.rank, step, second), last=True)
        before = mine.state_dict()
        good, poisoned = gradient(net.rank, 3, first), gradient(net.rank, 3, second)
        if net.rank == 1:
            poisoned[-1 if way == "allgather" else 0] = bad
        mine.reduce_(first, good, last=False)
        mine.reduce_(second, poisoned, last=True)
        return before, mine.state_dict(), poisoned, mine.stats

    for before, after, poisoned, stats in run_in_process(3, work):
        assert not torch.isfinite(poisoned).any(), "every worker must see the non-finite result"
        assert stats.total.skipped_steps == 1 and stats.last.skipped_steps == 1
        assert before["residuals"].keys() == after["residuals"].keys()
        for key, residual in before["residuals"].items():
            assert torch.equal(residual, after["residuals"][key])
        for old, new in zip(before["buckets"], after["buckets"], strict=True):
            for key, tensor in old["state"].items():
                assert torch.equal(tensor, new["state"][key])


@pytest.mark.parametrize("memory", ["ef", "ef21"])
@pytest.mark.parametrize("how", ["not finite", "an error", "an error while handing over"])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_step_that_fails_where_buckets_change_changes_nothing(memory: str, how: str, loaded: bool) -> None:
    """Buckets are cut elsewhere, and that step does not count: to the bit as before it, and as without it."""

    others = [BucketLayout(names, tuple(SHAPES[n] for n in names)) for names in (("conv",), LAYOUT.names[1:])]

    def step_(mine: Reducer, step: int, layouts: Sequence[BucketLayout], bad: bool = False) -> list[Tensor]:
        found = []
        for layout in layouts:
            found.append(gradient(mine.transport.rank, step, layout))
            if bad and layout is layouts[-1] and mine.transport.rank == 1:
                found[-1][5] = torch.nan
            mine.reduce_(layout, found[-1], last=layout is layouts[-1])
        return found

    def fail(*_: Any) -> Any:
        raise ArithmeticError("no")

    def work(net: Transport) -> None:
        mine, other = (reducer(net, collective="sharded", memory=memory) for _ in range(2))
        for step in range(4):
            step_(mine, step, HALVES)
        before = mine.state_dict()
        if loaded:
            mine = reducer(net, collective="sharded", memory=memory)
            mine.load_state_dict(before, SHAPES)
        if how == "not finite":
            step_(mine, 4, others, bad=True)
        else:
            owner, name = (
                (mine._lanes, "_take_back_") if how == "an error while handing over" else (mine, "_end_step")
            )
            real = getattr(owner, name)
            setattr(owner, name, fail)
            with pytest.raises(ArithmeticError):
                step_(mine, 4, others)
            setattr(owner, name, real)
            mine.abandon_step()
        after = mine.state_dict()
        assert same(*([state[key] for key in ("residuals", "kept", "buckets")] for state in (before, after)))
        # What follows is as if that step had not been.
        other.load_state_dict(before, SHAPES)
        other.step = mine.step
        assert same(step_(mine, 5, others), step_(other, 5, others))
        assert same(mine.state_dict(), other.state_dict())

    run_in_process(3, work)


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_saved_and_loaded_state_goes_on_exactly(name: str, way: str) -> None:
    """A new reducer with loaded state, handed both buckets as one, does what the old one would."""

    def two_buckets(mine: Reducer, rank: int, step: int) -> Tensor:
        flat = gradient(rank, step)
        cut = HALVES[0].numel
        mine.reduce_(HALVES[0], flat[:cut], last=False)
        mine.reduce_(HALVES[1], flat[cut:], last=True)
        return flat

    def work(net: Transport) -> None:
        old = reducer(net, compressor=name, collective=way)
        for step in range(4):
            two_buckets(old, net.rank, step)
        new = reducer(net, compressor=name, collective=way)
        new.load_state_dict(old.state_dict(), SHAPES)
        for step in range(4, 8):
            expected = two_buckets(old, net.rank, step)
            if step < 6:
                got = gradient(net.rank, step)
                new.reduce_(LAYOUT, got, last=True)
            else:
                got = two_buckets(new, net.rank, step)
            assert torch.equal(got, expected), f"step {step} differs"

    run_in_process(3, work)


def test_loaded_state_in_other_buckets_loses_nothing() -> None:
    """Sharded state saved in two buckets goes on in other two, and in all-gather."""

    for way in ("sharded", "allgather"):

        def work(net: Transport, way: str = way) -> tuple[Any, Any, Tensor, Tensor]:
            old = reducer(net, collective="sharded")
            for step in range(4):
                flat = gradient(net.rank, step)
                old.reduce_(HALVES[0], flat[: HALVES[0].numel], last=False)
                old.reduce_(HALVES[1], flat[HALVES[0].numel :], last=True)
            state = old.state_dict()
            new = reducer(net, collective=way)
            new.load_state_dict(state, SHAPES)
            others = [("conv", "norm"), ("weight", "empty", "bias")]
            flat, out = gradient(net.rank, 9), []
            for names in others:
                layout = BucketLayout(names, tuple(SHAPES[name] for name in names))
                bucket = torch.cat([LAYOUT.view(flat, name).reshape(-1) for name in names])
                new.reduce_(layout, bucket, last=names is others[-1])
                out.append(layout.views(bucket))
            result = flatten(out[0] | out[1])
            return debt(state), debt(new.state_dict()), flat, result

        ranks = run_in_process(3, work)
        before = sum(flatten(b) for b, *_ in ranks) / 3
        after = sum(flatten(a) for _, a, *_ in ranks) / 3
        true = sum(g.double() for _, _, g, _ in ranks) / 3
        torch.testing.assert_close(before + true, after + ranks[0][3].double(), rtol=0, atol=1e-5)


def test_auto_counts_bytes() -> None:
    """Sharded where it saves 40 % of the bytes; lossless methods as soon as it saves any."""
    large = BucketLayout(("w",), (torch.Size([100_000]),))

    def way(world: int, **options: Any) -> str:
        def work(net: Transport) -> str:
            mine = reducer(net, **options)
            mine.reduce_(large, torch.ones(100_000), last=True)
            return next(iter(mine.stats.collectives))

        return run_in_process(world, work)[0]

    assert [way(p) for p in (2, 3, 4, 5)] == ["allgather", "allgather", "sharded", "sharded"]
    assert [way(p, compressor="dense") for p in (2, 3)] == ["allgather", "sharded"]
    assert way(4, compressor="powersgd") == "lowrank"


def test_sharded_traffic_does_not_grow() -> None:
    """Bytes sent by one worker, for 4, 8 and 16: all-gather's grow with P, sharded's hardly do."""
    large = BucketLayout(("w",), (torch.Size([200_000]),))

    def sent(world: int, way: str) -> int:
        def work(net: Transport) -> int:
            mine = reducer(net, collective=way, ratio=0.1)
            mine.reduce_(large, torch.randn(200_000), last=True)
            return mine.stats.total.bytes_sent

        return run_in_process(world, work)[0]

    assert sent(8, "allgather") > 2 * sent(4, "allgather")
    assert sent(8, "sharded") < 1.1 * sent(4, "sharded")
    assert sent(16, "sharded") < 1.16 * sent(4, "sharded")  # 1.6875 / 1.5, and headers


def test_whatever_the_number_of_workers_ratio_one_sends_all() -> None:
    """More than four send less of their quota to owners, but never less than all of everything."""
    assert [sent_share(p) for p in (1, 2, 4)] == [1.0, 1.0, 1.0]
    assert [p * sent_share(p + 1) / (p + 1) for p in (4, 7, 15)] == pytest.approx([MOST_SENT] * 3)
    whole = BucketLayout(("w",), (torch.Size([1000]),))

    def work(net: Transport) -> Tensor:
        bucket = gradient(net.rank, 0)[:1000].clone()
        mine = reducer(net, collective="sharded", ratio=1.0, values="fp32")
        mine.reduce_(whole, bucket, last=True)
        return bucket

    mean = torch.stack([gradient(rank, 0)[:1000] for rank in range(6)]).sum(0) / 6
    for bucket in run_in_process(6, work):
        torch.testing.assert_close(bucket, mean)


def test_owner_factor_passes_on_more() -> None:
    _, owed_one, _, one = run_steps(4, 10, collective="sharded", values="fp32")
    _, owed_four, _, four = run_steps(4, 10, collective="sharded", values="fp32", owner_factor=4.0)
    assert four[0].total.bytes_sent > 1.5 * one[0].total.bytes_sent
    assert float(flatten(owed_four).norm()) < float(flatten(owed_one).norm())


def test_alone_nothing_changes() -> None:
    def work(net: Transport) -> None:
        bucket = gradient(0, 0)
        mine = reducer(net)
        mine.reduce_(LAYOUT, bucket, last=True)
        assert torch.equal(bucket, gradient(0, 0))
        assert mine.stats.total.bytes_sent == 0 and mine.stats.total.steps == 1

    run_in_process(1, work)


def test_joined_worker_sends_nothing_of_its_own() -> None:
    """A rank out of data keeps its residual and its duties as an owner."""

    def work(net: Transport) -> Tensor:
        mine = reducer(net, collective="sharded", values="fp32", ratio=0.5)
        mine.reduce_(LAYOUT, gradient(net.rank, 0), last=True)
        before = mine.memory.state_dict()
        out_of_data = net.rank == 2
        bucket = torch.zeros(LAYOUT.numel) if out_of_data else gradient(net.rank, 1)
        mine.reduce_(LAYOUT, bucket, last=True, joined=out_of_data)
        after = mine.memory.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before) == out_of_data
        assert bucket.any()
        return bucket

    buckets = run_in_process(3, work)
    assert torch.equal(buckets[0], buckets[1]) and torch.equal(buckets[0], buckets[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collective": "algather"}, "unknown collective 'algather'; did you mean 'allgather'"),
        ({"collective": "lowrank"}, "'topk' cannot travel by 'lowrank'; use auto or allgather or sharded"),
        ({"compressor": "powersgd", "collective": "sharded"}, "use auto or lowrank"),
        ({"compressor": "randomk", "scope": "tensor"}, "'randomk' has no scope='tensor'"),
        ({"compressor": "terngrad", "error_feedback": True}, "residual would grow without bound"),
        ({"compressor": "qsgd", "levels": 3, "error_feedback": True}, "leave error_feedback out"),
        ({"compressor": "randomk", "unbiased": True, "error_feedback": True}, "unbiased"),
    ],
)
def test_impossible_combinations(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_in_process(1, lambda net: reducer(net, **options))


@pytest.mark.parametrize("hit", [0, 1, 2, 3])
def test_a_damaged_factor_is_found_one_exchange_later(hit: int) -> None:
    """PowerSGD's sums have no checksum: a bit that flips on the way to one rank is told by all of them."""

    def work(net: Transport) -> None:
        mine, calls, real = reducer(net, compressor="powersgd", collective="lowrank"), [0], net.all_reduce

        def damaging(tensor: Tensor) -> None:
            real(tensor)
            if calls[0] == hit and net.rank == 1:
                tensor.view(torch.uint8)[100] ^= 1
            calls[0] += 1

        net.all_reduce = damaging  # type: ignore[method-assign]
        with pytest.raises(SyncError, match="the ranks have not received the same"):
            for step in range(4):
                mine.reduce_(LAYOUT, gradient(net.rank, step), last=True)
        assert calls[0] == hit + 2

    run_in_process(3, work)


def test_every_collective_is_used() -> None:
    assert {way for _, way in WAYS} == set(COLLECTIVES)
