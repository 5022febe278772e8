"""Numbers at the ends of float32, through whole steps: the law holds, replicas agree, and where a sum leaves
the range the step counts for nothing.

What kernels and codecs make of such numbers by themselves is in test_kernels.py and test_wire.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compressed_ddp import CompressionConfig
from compressed_ddp.communication import Reducer, run_in_process
from compressed_ddp.communication.collectives import _SURE
from compressed_ddp.compression.factory import from_config
from compressed_ddp.compression.powersgd import first_factor
from compressed_ddp.layout import BucketLayout
from compressed_ddp.types import Stamp, Transport

N = 640
LAYOUT = BucketLayout(("w",), (torch.Size([N]),))
LARGEST = torch.finfo(torch.float32).max
TINY = 2.0**-149


def _outlier(number: float) -> Tensor:
    """One in each block of 64 that dwarfs its neighbours, which are not all alike."""
    x = torch.linspace(-1e-3, 1e-3, N)
    x[::64] = number
    return x


GRADIENTS = {
    "zeros": torch.zeros(N),
    "negative zeros": -torch.zeros(N),
    "all equal": torch.full((N,), -0.1),
    "alternating signs": torch.tensor([0.5, -0.5]).repeat(N // 2),
    "the smallest denormal": torch.tensor([TINY, -TINY]).repeat(N // 2),
    "denormals": torch.arange(1, N + 1) * TINY,
    "denormals and one": torch.cat([torch.ones(1), torch.arange(1, N) * TINY]),
    "smallest normal and its neighbours": torch.tensor([2.0**-126, 2.0**-126 - TINY]).repeat(N // 2),
    "a quarter of the largest": torch.tensor([LARGEST / 4, -LARGEST / 4]).repeat(N // 2),
    "one outlier a block": _outlier(1e6),
    "one huge outlier a block": _outlier(LARGEST / 8),
    "one small block among large": torch.cat([torch.full((64,), 1e-30), torch.full((N - 64,), 1e30)]),
}


def steps(
    world: int, gradients: list[Tensor], **options: Any
) -> tuple[list[list[Tensor]], list[dict[str, Any]], list[int]]:
    """Every rank's results of all steps, its state at the end, and how many steps counted."""
    config = CompressionConfig(**({"ratio": 0.1, "min_compress_numel": 0} | options))

    def work(net: Transport) -> tuple[list[Tensor], dict[str, Any], int]:
        reducer = Reducer(from_config(config), config, net)
        results = []
        for gradient in gradients:
            bucket = gradient.clone()
            reducer.reduce_(LAYOUT, bucket, last=True)
            results.append(bucket)
        return results, reducer.state_dict(), reducer.taken

    everyone = run_in_process(world, work)
    return [r for r, _, _ in everyone], [s for _, s, _ in everyone], [t for _, _, t in everyone]


def owed(states: list[dict[str, Any]]) -> Tensor:
    """What is owed to the mean, by workers and by owners."""
    total = sum(state["residuals"]["w"].double() for state in states) / len(states)
    for rank, state in enumerate(states):
        for bucket in state["buckets"]:
            owner = bucket["state"].get("owner", torch.empty(0))
            local = torch.arange(owner.numel())
            total[local // 64 * 64 * len(states) + rank * 64 + local % 64] += owner.double()
    return total


@pytest.mark.parametrize("way", ["allgather", "sharded"])
@pytest.mark.parametrize("values", ["fp32", "int8", "int4", "bf16", "fp16"])
@pytest.mark.parametrize("what", GRADIENTS, ids=lambda what: what.replace(" ", "-"))
def test_the_law_at_the_ends_of_the_range(what: str, values: str, way: str) -> None:
    """Three steps of the same gradient everywhere: applied + owed is what it was, and replicas are one."""
    gradient = GRADIENTS[what]
    results, states, taken = steps(2, [gradient] * 3, values=values, collective=way)
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine.view(torch.int32), other.view(torch.int32))
        assert bool(torch.isfinite(mine).all())
    assert taken == [3, 3]
    wanted, found = 3 * gradient.double(), sum(r.double() for r in results[0]) + owed(states)
    # A float32 rounding of what was due, a few times over; denormals have no relative precision.
    slack = 2.0**-21 * wanted.abs() + 32 * TINY
    assert bool(((found - wanted).abs() <= slack).all()), float((found - wanted).abs().max())
    if not gradient.any():
        assert not any(result.any() for result in results[0])


@pytest.mark.parametrize("way", ["allgather", "sharded"])
@pytest.mark.parametrize("values", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_and_then_again_finite(bad: float, values: str, way: str) -> None:
    """A step that is called off leaves no trace: what follows is what would have been without it."""
    good, poisoned = torch.linspace(-1, 1, N), torch.linspace(-1, 1, N)
    poisoned[77] = bad
    with_it = steps(3, [good, poisoned, good], values=values, collective=way)
    assert with_it[2] == [2] * 3 and not any(bool(torch.isfinite(r[1]).all()) for r in with_it[0])
    states = [{**state, "step": 2} for state in with_it[1]]
    without = steps(3, [good, good], values=values, collective=way)
    assert torch.equal(owed(states), owed(without[1]))
    for mine, other in zip(with_it[0], without[0], strict=True):
        assert torch.equal(mine[0], other[0]) and torch.equal(mine[2], other[1])


@pytest.mark.parametrize("way", ["allgather", "sharded"])
@pytest.mark.parametrize("values", ["fp32", "int8"])
def test_a_sum_that_leaves_the_range(values: str, way: str) -> None:
    """What is owed and the gradient are finite, their sum is not: nobody sends it, nobody's debt changes."""
    largest = torch.full((N,), LARGEST)
    before = steps(2, [largest / 2], values=values, collective=way)
    results, states, taken = steps(2, [largest / 2, largest], values=values, collective=way)
    assert taken == [1, 1]
    assert all(torch.equal(each[0], before[0][0][0]) for each in results)
    assert not any(bool(torch.isfinite(each[1]).all()) for each in results)
    assert torch.equal(owed(states), owed(before[1]))


@pytest.mark.parametrize("world", [2, 3, 5, 9, 10, 18])
@pytest.mark.parametrize("way", ["allgather", "sharded"])
def test_the_mean_of_the_largest(world: int, way: str) -> None:
    """Rounding carries the mean of ten largest floats to infinity: then all ranks call the step off."""
    gradient = torch.zeros(N)
    gradient[:4] = LARGEST
    results, states, taken = steps(world, [gradient], values="fp32", collective=way, ratio=1.0)
    finite = bool(torch.isfinite(results[0][0]).all())
    assert all(torch.equal(each[0], results[0][0]) or not finite for each in results)
    assert taken == [int(finite)] * world
    assert finite or world > _SURE
    if not finite:
        assert not any(state["residuals"]["w"].any() for state in states)


def test_up_to_nine_workers_the_mean_is_finite() -> None:
    """What the all-gather takes as sure. Rounding is monotonic, so the largest numbers are the worst."""
    finite = []
    for world in range(1, 12):
        total = torch.zeros(1)
        for _ in range(world):
            total += torch.tensor([LARGEST]) * (1.0 / world)
        finite.append(bool(torch.isfinite(total).all()))
    assert finite[:_SURE] == [True] * _SURE and not all(finite)


@pytest.mark.parametrize("way", ["allgather", "sharded"])
@pytest.mark.parametrize("values", ["fp32", "int8", "int4", "bf16", "fp16"])
@pytest.mark.parametrize("memory", ["ef21", "ef21-sgdm"])
def test_beliefs_at_the_end_of_the_range(memory: str, values: str, way: str) -> None:
    """What EF21 adds up may leave the range: that step is called off, and later ones count."""
    gradients = [torch.full((N,), LARGEST)] * 2 + [torch.ones(N)] * 2
    settings = {"memory": memory, "ratio": 1.0, "values": values, "collective": way}
    results, states, taken = steps(2, gradients, **settings)
    assert taken[0] == taken[1] >= 3
    for state in states:
        assert all(bool(torch.isfinite(kept["w"]).all()) for kept in state["kept"].values())
    assert all(bool(torch.isfinite(result[-1]).all()) for result in results)
    assert torch.equal(results[0][-1], results[1][-1])


def test_a_residual_of_one_rank_that_leaves_the_range() -> None:
    """PowerSGD: all means are finite, one worker's own rest is not. All call the step off."""
    layout = BucketLayout(("w",), (torch.Size([8, 8]),))
    config = CompressionConfig("powersgd", rank=1, min_compress_numel=0)
    right = first_factor(8, 1, Stamp(config.seed), torch.device("cpu"))[:, 0].double()
    left = torch.tensor([0.8, 0.6, *[0.0] * 6], dtype=torch.float64)
    wide = (left[:, None] * right / right.square().sum() * LARGEST * 0.4).float()
    spike = torch.zeros(8, 8)
    spike[0, right.abs().argmin()], spike[1, right.abs().argmin()] = LARGEST, -LARGEST

    def work(net: Transport) -> list[bool]:
        mine, counted = Reducer(from_config(config), config, net), []
        for step in range(3):
            gradient = torch.full((8, 8), 0.1 * (net.rank + 1)) if step else (spike, wide)[net.rank]
            mine.reduce_(layout, gradient.flatten(), last=True)
            counted.append(mine.counted)
            assert bool(torch.isfinite(mine.memory.residual("w")).all())
        return counted

    assert run_in_process(2, work) == [[False, True, True]] * 2
