"""torch's default dtype and default device are the user's: whatever they are, the bits are the same.

The C++ kernels write float32 to where they are told. A buffer in a smaller default dtype would be too short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import compressed_ddp.kernels as kernels
from compressed_ddp import (
    CompressionConfig,
    DistributedBackend,
    ErrorFeedbackBuffer,
    get_compressor,
    reshard_states,
)
from compressed_ddp.communication import run_in_process
from compressed_ddp.compression import COMPRESSORS
from compressed_ddp.kernels import reference
from compressed_ddp.layout import Partition, Quota
from compressed_ddp.types import Payload, Stamp, Transport
from compressed_ddp.wire import INDEX_FORMATS, MessageCodec
from compressed_ddp.wire.indices import seeded_indices
from compressed_ddp.wire.values import _FORMATS

try:
    from compressed_ddp.kernels import native
except ImportError:
    native = None  # type: ignore[assignment]

BOTH = [reference] if native is None else [reference, native]
CPU = torch.device("cpu")
N = 20_000
WAYS = [
    (name, way, feedback)
    for name, cls in sorted(COMPRESSORS.items())
    for way in cls.collectives
    for feedback in ((True, False) if cls.contraction else (False,))
]


@pytest.fixture(params=["float16", "bfloat16", "float64", "meta"])
def other(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """What sets another default, for the thread that enters it; 'meta' stands for any other device."""
    if request.param == "meta":
        yield lambda: torch.device("meta")
        return
    torch.set_default_dtype(getattr(torch, request.param))
    yield nullcontext
    torch.set_default_dtype(torch.float32)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def usual(work: Callable[[], Any]) -> Any:
    """What ``work`` gives with torch's own defaults."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return work()
    finally:
        torch.set_default_dtype(before)


def same(a: object, b: object) -> bool:
    """Equal to the bit, all the way down."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        flat = [each.contiguous().view(-1).view(torch.uint8) for each in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and torch.equal(*flat)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("which", BOTH, ids=lambda module: module.__name__.rsplit(".", 1)[1])
def test_kernels(which: Any, other: Callable[[], Any]) -> None:
    part = Partition(N, 3, tuple((Quota(100, 6_600, 165),) for _ in range(3)))

    def work() -> list[list[bytes]]:
        fresh = Partition(part.numel, part.shards, part.quotas)  # its table is made here too
        residual, gradient = draw(N), draw(N, seed=1)
        steps = [kernels._step(which, residual, gradient, fresh, exact) for exact in (True, False)]
        return [*steps, which.topk_indices(gradient, 99).tolist()]

    expected = usual(work)
    with other():
        assert work() == expected
        assert kernels.same_bits() in (True, None)


@pytest.mark.parametrize(("indices", "values"), list(product(INDEX_FORMATS, sorted(_FORMATS))))
def test_messages(indices: str, values: str, other: Callable[[], Any]) -> None:
    codec, stamp = MessageCodec.named(indices, values), Stamp(seed=5, step=7, sender=1)
    numel = 3_000
    k = numel if indices == "all" else 100

    def work() -> list[Any]:
        at = seeded_indices(numel, k, stamp, CPU) if k < numel else torch.arange(numel, device="cpu")
        given, small = Payload(draw(k), at, torch.Size([numel])), draw(67, seed=1)
        sent = codec.encode(given, dense=small, stamp=stamp)
        read = codec.decode(sent.message, numel=numel, k=k, dense=67, stamp=stamp)
        nothing = torch.zeros_like(sent.message)
        codec.encode_not_finite(nothing, numel, 67, stamp)
        return [sent, read, codec.decode(nothing, numel=numel, k=k, dense=67, stamp=stamp)]

    expected = usual(work)
    with other():
        assert same(work(), expected)


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_compressors(name: str, other: Callable[[], Any]) -> None:
    def work() -> list[Any]:
        compressor, gradient = get_compressor(0.1, name=name), draw(150, 200)
        residual = draw(150, 200, seed=1)
        sent = compressor.compress(gradient)
        taken = compressor.take_(residual, gradient)
        return [sent, compressor.decompress(*sent), taken, residual]

    expected = usual(work)
    with other():
        assert same(work(), expected)


@pytest.mark.parametrize(("name", "way", "feedback"), WAYS)
def test_steps_and_states(name: str, way: str, feedback: bool, other: Callable[[], Any]) -> None:
    """Steps, a state, another ratio and another number of workers."""
    config = CompressionConfig(name, ratio=0.05, collective=way, guard_every=2, error_feedback=feedback)

    def backend(net: Transport) -> DistributedBackend:
        return DistributedBackend(
            config=config, error_buffer=ErrorFeedbackBuffer() if feedback else None, transport=net
        )

    def rank(net: Transport, context: Callable[[], Any]) -> Any:
        with context():
            weight, bias = (torch.nn.Parameter(draw(*shape)) for shape in ((60, 50), (60,)))
            mine, means = backend(net), []
            for step in range(4):
                weight.grad, bias.grad = (draw(*p.shape, seed=9 * step + net.rank) for p in (weight, bias))
                mine.allreduce_gradients([("weight", weight), ("bias", bias)])
                means += [weight.grad, bias.grad]
            return means, mine.state_dict()

    def work(context: Callable[[], Any]) -> Any:
        results = run_in_process(3, lambda net: rank(net, context))
        with context():
            return results, reshard_states([state for _, state in results], 2)

    assert same(work(other), usual(lambda: work(nullcontext)))
