"""The guard: hashes that see every bit, errors that name the parameter, warnings that name the straggler."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from compressed_ddp import (
    CompressionConfig,
    DistributedBackend,
    ErrorFeedbackBuffer,
    SyncError,
    get_compressor,
)
from compressed_ddp.communication import Reducer, run_in_process
from compressed_ddp.communication.guard import Guard, fingerprint, straggler
from compressed_ddp.communication.transport import InProcessHub
from compressed_ddp.compression.factory import from_config
from compressed_ddp.kernels import kernels_for, reference
from compressed_ddp.layout import BucketLayout
from compressed_ddp.metrics import Ledger
from compressed_ddp.types import Transport


def ledger() -> Ledger:
    return Ledger("test", "test", False, False)


@pytest.mark.parametrize("numel", [0, 1, 2, 63, 1000, (1 << 20) + 5])
def test_both_kernels_agree(numel: int) -> None:
    torch.manual_seed(numel)
    data = torch.randn(numel).view(torch.uint8)
    mine = kernels_for(torch.zeros(1)).fingerprint(data)
    assert mine == reference.fingerprint(data) and 0 <= mine < 2**64
    assert reference.checksum(data) == (mine ^ (mine >> 32)) & 0xFFFFFFFF


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4, 5), (0,)])
def test_every_bit_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape).to(dtype)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    bits = tensor.reshape(-1).view(torch.uint8)
    for byte in range(bits.numel()):
        for bit in (0, 3, 7):
            bits[byte] ^= 1 << bit
            assert fingerprint(tensor) != before
            bits[byte] ^= 1 << bit
    assert fingerprint(tensor) == before


def test_layouts() -> None:
    """Memory without gaps is read in place, whatever its order; other views are copied."""
    tensor = torch.randn(2, 3, 4, 5)
    last = tensor.contiguous(memory_format=torch.channels_last)
    assert fingerprint(last) == fingerprint(last.permute(0, 2, 3, 1).contiguous())
    strided = torch.randn(10, 8)[:, ::2]
    assert fingerprint(strided) == fingerprint(strided.contiguous())
    half = torch.randn(9).half()[1:]  # begins between two words
    assert fingerprint(half) == fingerprint(half.clone())


def parameters(change: str = "") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = {name: torch.randn(5, 4, generator=generator) for name in ("a", "b", "c")}
    if change:
        found[change][2, 1] += 1e-6
    return found


@pytest.mark.parametrize(
    ("changes", "joined", "told"),
    [
        (("", "", ""), (), ""),
        (("", "b", ""), (), "parameter 'b' of rank 1 is not that of rank 0"),
        (("c", "", ""), (), "parameter 'c' of rank 1, 2 is not that of rank 0"),
        (("", "c", "a"), (), "parameter 'a' of rank 2 is not that of rank 0"),
        (("", "b", ""), (1,), ""),
        (("a", "", "b"), (0,), "parameter 'b' of rank 2 is not that of rank 1"),
        (("a", "b", "c"), (0, 1, 2), ""),
    ],
)
def test_all_ranks_say_the_same(changes: tuple[str, ...], joined: tuple[int, ...], told: str) -> None:
    def work(net: Transport) -> int:
        clock = ledger()
        expected: Any = pytest.raises(SyncError, match=f"at step 7 {told}") if told else nullcontext()
        with expected:
            guard = Guard(7, net, torch.device("cpu"), clock)
            guard.look(parameters(changes[net.rank]), 7, joined=net.rank in joined)
            guard.look(parameters(changes[net.rank]), 8)  # not its turn
        clock.close_step(finite=True)
        return clock.total.bytes_sent

    assert run_in_process(3, work) == [2 * (25 + (24 if told else 0))] * 3


@pytest.mark.parametrize("every", [0, 1, 3])
def test_a_loop_of_ones_own_that_began_differently(every: int) -> None:
    """The guard looks before the first step too: such a loop must see to equal weights itself."""

    def work(net: Transport) -> None:
        weight = torch.nn.Parameter(torch.full((300,), float(net.rank)))
        backend = DistributedBackend(
            get_compressor(0.1),
            ErrorFeedbackBuffer(),
            config=CompressionConfig(guard_every=every),
            transport=net,
        )
        weight.grad = torch.ones(300)
        expected: Any = pytest.raises(SyncError, match="parameter 'w' of rank 1") if every else nullcontext()
        with expected:
            backend.allreduce_gradients([("w", weight)])

    run_in_process(2, work)


def test_who_has_met_goes_on_though_one_has_failed_since() -> None:
    """What all raise alike comes from one exchange: the first to raise must not take it from the others."""
    for _ in range(50):
        hub = InProcessHub(3, timeout=10)

        def meet(rank: int, hub: InProcessHub = hub) -> str:
            hub.wait("all-gather")
            hub.abort()
            return "met"

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(meet, range(3))) == ["met"] * 3
        with pytest.raises(SyncError, match="gone or silent"):
            hub.wait("all-gather")


@pytest.mark.parametrize(
    ("waits", "step", "rank"),
    [
        ([0.5, 0.5, 0.01, 0.5], 1.0, 2),
        ([0.01, 0.5], 1.0, 0),
        ([0.5, 0.5, 0.5, 0.5], 0.6, None),  # the network
        ([0.05, 0.2, 0.2, 0.2], 1.0, None),  # not worth a word
        ([0.0, 0.0], 0.0, None),  # nothing is known yet
    ],
)
def test_a_straggler_is_named(waits: list[float], step: float, rank: int | None) -> None:
    told = straggler(waits, step)
    assert (
        told is None if rank is None else told is not None and told.startswith(f"rank {rank} is a straggler")
    )


def test_who_waits_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    """Rank 1 waits least: all ranks know, and rank 0 says so, once a look."""

    def work(net: Transport) -> list[float]:
        clock = ledger()
        guard = Guard(5, net, torch.device("cpu"), clock)
        guard.look(parameters(), 0)
        clock.total.wait = 1.0 if net.rank == 1 else 1000.0  # in far less than that
        guard.look(parameters(), 5)
        guard.look(parameters(), 6)
        assert "waits by rank  0: 200000.0 ms, 1: 200.0 ms, 2: 200000.0 ms" in str(clock)
        waits = list(clock.waits)
        guard.look(parameters(), 10)  # nobody has waited since
        assert len(clock.waits) == 3 and max(clock.waits) < 1
        return waits

    with caplog.at_level("WARNING", logger="compressed_ddp"):
        assert run_in_process(3, work) == [[200.0, pytest.approx(0.2), 200.0]] * 3
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith("rank 1 is a straggler: the others wait 200 s of each step")


def test_what_was_waited_before_a_restart_is_nobodys_fault_now() -> None:
    """A ledger goes on with the sums of a saved run. Rank 1 was a little slower there; here nobody waits."""
    config = CompressionConfig(ratio=0.1, guard_every=5)

    def reducer(net: Transport) -> Reducer:
        return Reducer(from_config(config), config, net)

    layout = BucketLayout(("w",), (torch.Size([500]),))
    shapes = {"w": torch.Size([500])}

    def train(mine: Reducer, steps: int) -> list[float]:
        for _ in range(steps):
            mine.begin_step({"w": torch.zeros(500)})
            mine.reduce_(layout, torch.ones(500), last=True)
        return list(mine.stats.waits)

    def saved(net: Transport) -> dict[str, Any]:
        first = reducer(net)
        train(first, 7)
        return first.state_dict()

    states = run_in_process(3, saved)

    def resumed(net: Transport) -> list[float]:
        second = reducer(net)
        train(second, 1)  # it has looked already
        second.load_state_dict(states[net.rank], shapes)
        second.stats.total.wait = 8000.0 if net.rank == 1 else 10_000.0
        return train(second, 4) + train(second, 5)  # before step 10 is the first look, before 15 the next

    assert all(max(waits) < 100 for waits in run_in_process(3, resumed))
