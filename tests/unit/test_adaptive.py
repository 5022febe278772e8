"""Entries distributed over parameters: the same number of them, where they are largest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import same
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressed_ddp import CompressionConfig, SyncError, reshard_states
from compressed_ddp.communication import Reducer, run_in_process
from compressed_ddp.communication.adaptive import BINS, propose, within
from compressed_ddp.communication.collectives import parted
from compressed_ddp.compression.factory import from_config
from compressed_ddp.layout import BucketLayout, partition, uneven_partition
from compressed_ddp.types import Transport

WORLD = 4
SIZES = {"quiet": 6000, "bias": 16, "loud": 2000, "other": 4000}
BUCKETS = [
    BucketLayout(("quiet", "bias"), (torch.Size([60, 100]), torch.Size([16]))),
    BucketLayout(("loud", "other"), (torch.Size([2000]), torch.Size([40, 100]))),
]
LOUDNESS = {"quiet": 0.01, "bias": 1.0, "loud": 10.0, "other": 0.1}
WAYS = pytest.mark.parametrize("way", ["allgather", "sharded"])


def gradient(layout: BucketLayout, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + len(layout.names[0]))
    flat = torch.randn(layout.numel, generator=generator)
    for name, view in layout.views(flat).items():
        view *= LOUDNESS[name]
    return flat


def reducer(net: Transport, **options: Any) -> Reducer:
    config = CompressionConfig(**({"ratio": 0.1, "min_compress_numel": 64, "adapt_every": 3} | options))
    return Reducer(from_config(config), config, net)


def advance(sync: Reducer, rank: int, step: int, spoilt: bool = False) -> list[Tensor]:
    flats = [gradient(layout, rank, step) for layout in BUCKETS]
    if spoilt:
        flats[-1][0] = float("nan")
    for layout, flat in zip(BUCKETS, flats, strict=True):
        sync.reduce_(layout, flat, last=layout is BUCKETS[-1])
    return flats


# --- the parts -----------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 7, 100, 2999, 3000])
def test_proposals_are_what_the_largest_entries_are(k: int) -> None:
    torch.manual_seed(k)
    rows = torch.randn(3, 1000) * torch.tensor([[0.1], [1.0], [5.0]])
    table = torch.stack(
        [torch.bincount((row.abs().view(torch.int32) >> 20), minlength=BINS).flip(0) for row in rows]
    )
    found = propose(table, k)
    assert float(found.sum()) == pytest.approx(k)
    largest = rows.abs().flatten().topk(k).indices // 1000
    exact = torch.bincount(largest, minlength=3).double()
    # A bin is an eighth of an octave wide; what lies in the last one is dealt in proportion.
    assert (found - exact).abs().max() <= 0.03 * k + 1
    assert all(0 <= f <= 1000 for f in found.tolist())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 900), st.floats(0, 1.5)), min_size=1, max_size=9),
    st.integers(1, 5),
    st.sampled_from([0, 50]),
)
def test_uneven_shares_fit(tensors: list[tuple[int, float]], shards: int, smallest: int) -> None:
    layout = BucketLayout(
        tuple(f"p{i}" for i in range(len(tensors))), tuple(torch.Size([n]) for n, _ in tensors)
    )
    part = uneven_partition(layout, shards, [share for _, share in tensors], min_numel=smallest)
    assert part.table.shape[1] == 4  # which is checked when it is made
    big = [(n, share) for n, share in tensors if n >= smallest and n]
    covered = torch.zeros(layout.numel, dtype=torch.bool)
    for s, quotas in enumerate(part.quotas):
        for quota in quotas:
            covered[part.to_global(torch.arange(quota.start, quota.stop), s)] = True
            assert 1 <= quota.k <= quota.stop - quota.start
    for name, numel in zip(layout.names, layout.numels, strict=True):
        if numel >= smallest:
            assert layout.view(covered, name).all(), "elements that would never be sent"
    wanted = sum(n * min(1.0, share) for n, share in big)
    ranges = sum(len(quotas) for quotas in part.quotas)
    assert wanted - ranges <= part.total <= wanted + ranges + 1
    assert ranges <= shards * max(1, wanted // (8 * shards) + 1)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 900), st.floats(0, 50)), min_size=1, max_size=9),
    st.floats(0.001, 1.0),
)
@example([(1, 2.0), (1, 2.225073858507203e-309)], 0.75)
@example([(1, 1.0), (1, 2.0), (2, 5e-324)], 0.5)
def test_what_one_has_no_more_of_goes_to_the_others(tensors: list[tuple[int, float]], ratio: float) -> None:
    numels = {f"p{at}": n for at, (n, _) in enumerate(tensors)}
    asked = sum(n * weight for n, weight in tensors) or 1.0
    mean = sum(numels.values())
    factors = {f"p{at}": weight * mean / asked for at, (_, weight) in enumerate(tensors)}
    entries = sum(ratio * factors[name] * numels[name] for name in factors)
    found = within(factors, numels, ratio)
    assert set(found) == set(factors)
    shares = {name: ratio * factor for name, factor in found.items()}
    assert all(0.0 <= share <= 1.0 + 1e-9 for share in shares.values())
    assert sum(share * numels[name] for name, share in shares.items()) == pytest.approx(entries)
    nothing = 1e-300  # what is smaller may vanish
    for a in factors:  # who was louder stays so, and nobody gets less for it
        assert found[a] >= min(factors[a], 1 / ratio) * (1 - 1e-9) - nothing
        assert all(found[a] <= found[b] * (1 + 1e-9) + nothing for b in factors if factors[a] <= factors[b])
    shuffled = {name: factors[name] for name in reversed(factors)}
    assert within(shuffled, numels, ratio) == found, "other bits on a rank that knows them in another order"


def test_shares_that_fit_are_left_alone() -> None:
    factors = {"a": 2.0, "b": 0.5}
    assert within(factors, {"a": 10, "b": 20}, 0.5) is factors


def test_even_shares_are_the_ratio() -> None:
    layout = BucketLayout(("a", "b"), (torch.Size([1000]), torch.Size([3000])))
    part = uneven_partition(layout, 2, [0.1, 0.1])
    assert part.total == 400
    assert part == partition(layout, 2, lambda n: n // 10, scope="tensor")


# --- in force ------------------------------------------------------------------------------


@WAYS
def test_nothing_is_lost_all_agree_and_bytes_stay(way: str) -> None:
    def work(net: Transport) -> tuple[list[Tensor], dict[str, Any], list[int]]:
        sync, results, sent = reducer(net, collective=way), [], []
        for step in range(8):
            results.append(torch.cat(advance(sync, net.rank, step)))
            sent.append(sync.stats.last.bytes_sent)
        return results, sync.state_dict(), sent

    ranks = run_in_process(WORLD, work)
    for results, state, _ in ranks[1:]:
        assert same(results, ranks[0][0]) and state["factors"] == ranks[0][1]["factors"]
    true = sum(
        torch.cat([gradient(layout, rank, step) for layout in BUCKETS]).double()
        for rank in range(WORLD)
        for step in range(8)
    )
    alone = reshard_states([state for _, state, _ in ranks], 1)[0]["residuals"]
    owed = torch.cat([alone[name].reshape(-1) for layout in BUCKETS for name in layout.names]).double()
    applied = torch.stack(ranks[0][0]).double().sum(0)
    torch.testing.assert_close(applied + owed, true / WORLD, rtol=0, atol=3e-4)
    factors = ranks[0][1]["factors"]
    assert set(factors) == {"quiet", "loud", "other"}  # the bias travels whole
    assert factors["loud"] > 3 and factors["quiet"] < 0.1
    sent = ranks[0][2]
    assert sent[0] == sent[1] and 0.85 * sent[0] < sent[3] < 1.02 * sent[0]  # dense indices are shorter
    ring, hashes = 2 * 3 * 8 * (WORLD - 1) // WORLD, 8 * (WORLD - 1)
    assert sent[2] == sent[0] + ring + hashes, "8 bytes a parameter, round a ring, and 8 to each other rank"


def test_less_is_left_unsent_than_with_one_ratio() -> None:
    """The point of it: with the same number of entries, less remains."""

    def work(net: Transport, every: int) -> float:
        sync = reducer(net, collective="allgather", adapt_every=every)
        for step in range(6):
            advance(sync, net.rank, step)
        return sync.memory.norm()

    adaptive = run_in_process(WORLD, lambda net: work(net, 1))
    fixed = run_in_process(WORLD, lambda net: work(net, 0))
    assert all(a < 0.8 * f for a, f in zip(adaptive, fixed, strict=True))


@WAYS
def test_resumed_it_is_the_same(way: str) -> None:
    def work(net: Transport) -> None:
        whole = reducer(net, collective=way)
        states, results = [], []
        for step in range(8):
            states.append(whole.state_dict())
            results.append(advance(whole, net.rank, step))
        shapes = {name: shape for b in BUCKETS for name, shape in zip(b.names, b.shapes, strict=True)}
        for start, state in enumerate(states[1:], 1):
            again = reducer(net, collective=way)
            again.load_state_dict(state, shapes)
            assert same([advance(again, net.rank, step) for step in range(start, 8)], results[start:])

    run_in_process(WORLD, work)


def test_a_step_that_does_not_count_is_not_looked_at() -> None:
    def work(net: Transport) -> None:
        clean, spoilt = reducer(net), reducer(net)
        for step in range(2):
            assert same(advance(clean, net.rank, step), advance(spoilt, net.rank, step))
        before = spoilt.state_dict()["factors"]
        advance(spoilt, net.rank, 2, spoilt=net.rank == 1)
        assert spoilt.taken == 2 and spoilt.state_dict()["factors"] == before == {}
        advance(clean, net.rank, 2)
        advance(spoilt, net.rank, 2)
        assert clean.state_dict()["factors"] == spoilt.state_dict()["factors"] != {}

    run_in_process(3, work)


def test_a_ratio_that_changes_keeps_the_distribution() -> None:
    def work(net: Transport) -> None:
        sync = reducer(net, collective="allgather")
        for step in range(4):
            advance(sync, net.rank, step)
        before, factors = sync.stats.last.bytes_sent, sync.state_dict()["factors"]
        sync.set_ratio(0.01)
        advance(sync, net.rank, 4)
        assert sync.state_dict()["factors"] == factors
        assert sync.stats.last.bytes_sent < 0.25 * before

    run_in_process(2, work)


LOUD = [
    BucketLayout(("loud",), (torch.Size([1000]),)),  # a bucket that is soon whole
    BucketLayout(("quiet", "bias"), (torch.Size([60, 100]), torch.Size([16]))),
    BucketLayout(("other",), (torch.Size([40, 100]),)),
]


@WAYS
def test_a_raised_ratio_sends_as_much_as_it_says(way: str) -> None:
    """A layer that is ten times as loud is whole soon: the others send the rest, in other buckets too."""

    def entries(sync: Reducer) -> int:
        here = torch.device("cpu")
        return sum(parted(layout, sync.compressor, sync.config, 1, here)[0].total for layout in LOUD)

    def work(net: Transport) -> list[Any]:
        def advance(sync: Reducer, step: int) -> Tensor:
            flats = [gradient(layout, net.rank, step) for layout in LOUD]
            for layout, flat in zip(LOUD, flats, strict=True):
                sync.reduce_(layout, flat, last=layout is LOUD[-1])
            return torch.cat(flats)

        sync = reducer(net, collective=way, ratio=0.05, adapt_every=2)
        found: list[Any] = [advance(sync, step) for step in range(2)]
        factors = sync.state_dict()["factors"]
        assert factors["loud"] > 10 and entries(sync) == pytest.approx(0.05 * 11000, abs=3)
        sync.set_ratio(0.3)
        assert entries(sync) == pytest.approx(0.3 * 11000, abs=3)
        again = reducer(net, collective=way, ratio=0.05, adapt_every=9)
        shapes = {name: shape for b in LOUD for name, shape in zip(b.names, b.shapes, strict=True)}
        again.load_state_dict(sync.state_dict(), shapes)
        assert again.state_dict()["factors"] == factors and entries(again) == entries(sync)
        found.append(advance(sync, 3))
        assert same(found[-1], advance(again, 3))
        for ratio in (0.6, 0.02, 1.0):
            again.set_ratio(ratio)
            assert entries(again) == pytest.approx(ratio * 11000, abs=3)
            found += [advance(again, 4), dict(again.compressor.factors)]
        return found

    ranks = run_in_process(3, work)
    assert all(same(found, ranks[0]) for found in ranks[1:])


def test_states_that_differ_or_are_damaged_are_refused() -> None:
    shapes = {name: shape for b in BUCKETS for name, shape in zip(b.names, b.shapes, strict=True)}

    def work(net: Transport, spoil: Any) -> None:
        sync = reducer(net)
        for step in range(3):
            advance(sync, net.rank, step)
        state = sync.state_dict()
        spoil(state, net.rank)
        fresh = reducer(net)
        with pytest.raises((ValueError, SyncError), match="factor"):
            fresh.load_state_dict(state, shapes)
        assert fresh.step == 0 and not fresh.compressor.factors

    def other(state: dict[str, Any], rank: int) -> None:
        state["factors"]["loud"] += rank

    def nan(state: dict[str, Any], rank: int) -> None:
        state["factors"]["loud"] = float("nan")

    def no_table(state: dict[str, Any], rank: int) -> None:
        state["factors"] = [1.0]

    def more(state: dict[str, Any], rank: int) -> None:
        state["factors"] = dict.fromkeys(state["factors"], 50.0)

    for spoil in (other, nan, no_table, more):
        run_in_process(2, lambda net, spoil=spoil: work(net, spoil))


@pytest.mark.parametrize(
    "options",
    [{"compressor": "randomk"}, {"compressor": "dense"}, {"memory": "ef21"}, {"error_feedback": False}],
)
def test_it_needs_a_debt_to_look_at(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="adapt_every=3 needs topk with error feedback"):
        run_in_process(2, lambda net: reducer(net, **options))


def test_it_says_itself_where_entries_are_sought() -> None:
    with pytest.raises(ValueError, match="adapt_every=3 with scope='tensor'"):
        run_in_process(2, lambda net: reducer(net, scope="tensor"))


def test_impossible_intervals() -> None:
    with pytest.raises(ValueError, match="adapt_every must be a number of steps, or 0 for never, got -1"):
        CompressionConfig(adapt_every=-1)
    with pytest.raises(ValueError, match=r"adapt_every must be a whole number, got 2.5"):
        CompressionConfig(adapt_every=2.5)  # type: ignore[arg-type]


class Damaging:
    """A network that flips a bit of what an all-reduce brings to ``ranks``."""

    def __init__(self, net: Transport, ranks: tuple[int, ...], byte: int, bit: int) -> None:
        self._net, self._at, self._bit = net, byte, 1 << bit
        self._hit = net.rank in ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._net, name)

    def all_reduce(self, tensor: Tensor) -> None:
        self._net.all_reduce(tensor)
        if self._hit:
            tensor.view(-1).view(torch.uint8)[self._at] ^= self._bit


@pytest.mark.parametrize(
    ("ranks", "byte", "bit", "told", "named"),
    [
        ((1,), 0, 0, "adaptive ratios: rank 1 received something else", (1,)),
        ((0, 1, 2), 7, 7, "adaptive ratios: 3 ranks propose -.* entries of 'loud'", ()),
        ((0, 1, 2), 6, 0, "adaptive ratios: 3 ranks propose .* entries of 'loud', which has", ()),
        ((0, 1, 2), 1, 4, "adaptive ratios: 3 ranks propose .* entries, .* each", ()),
    ],
)
def test_sums_that_were_damaged(
    ranks: tuple[int, ...], byte: int, bit: int, told: str, named: tuple[int, ...]
) -> None:
    """On the way to one rank, or before they came to all: every rank says so, and nothing has changed."""

    def work(net: Transport) -> None:
        sync = reducer(Damaging(net, ranks, byte, bit))  # type: ignore[arg-type]
        before = None
        with pytest.raises(SyncError, match=told) as caught:
            for step in range(20):
                before = sync.state_dict()
                advance(sync, net.rank, step)
        assert caught.value.ranks == named and caught.value.phase == "all-reduce"
        sync.abandon_step()
        assert before is not None and same(before["residuals"], sync.state_dict()["residuals"])
        assert sync.compressor.factors == {}

    run_in_process(3, work)
