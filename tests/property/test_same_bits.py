"""The C++ kernels against the reference, on whatever hypothesis thinks of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressed_ddp import WireError
from compressed_ddp.kernels import reference
from compressed_ddp.layout import Partition, Quota

native = pytest.importorskip("compressed_ddp.kernels.native", reason="the extension is not built")

laws = settings(max_examples=150, deadline=None)
FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 3.4e38]),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@st.composite
def sums(draw: st.DrawFn) -> tuple[Tensor | None, Tensor]:
    """A gradient and perhaps a residual: drawn values, repeated to any length and stirred."""
    n = draw(st.integers(0, 9000))
    pool = torch.tensor(draw(st.lists(FLOATS, min_size=1, max_size=40)), dtype=torch.float32)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    gradient = pool[torch.randint(pool.numel(), (n,), generator=generator)]
    if draw(st.booleans()):
        gradient = gradient * torch.rand(n, generator=generator)
    if draw(st.integers(0, 9)) == 0 and n:
        gradient[draw(st.integers(0, n - 1))] = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    residual = torch.randn(n, generator=generator) if draw(st.booleans()) else None
    return residual, gradient


@st.composite
def partitions(draw: st.DrawFn, n: int) -> Partition:
    shards = draw(st.integers(1, 5))
    bare = Partition(n, shards, ())
    quotas = []
    for shard in range(shards):
        size = bare.local_numel(shard)
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=6)))
        ranges = [(0, size)] if draw(st.booleans()) else list(zip(cuts[::2], cuts[1::2], strict=False))
        quotas.append(tuple(Quota(a, b, draw(st.integers(0, b - a))) for a, b in ranges))
    return Partition(n, shards, tuple(quotas))


@laws
@given(data=st.data(), pair=sums(), exact=st.booleans(), simd=st.integers(0, 2))
def test_take(data: st.DataObject, pair: tuple[Tensor | None, Tensor], exact: bool, simd: int) -> None:
    residual, gradient = pair
    part = data.draw(partitions(gradient.numel()))
    native._native.allow_simd(simd)
    try:
        outs = [torch.empty_like(gradient) for _ in range(2)]
        wanted, finite = reference.take_topk(residual, gradient, outs[0], part, exact=exact)
        taken, native_finite = native.take_topk(residual, gradient, outs[1], part, exact=exact)
    finally:
        native._native.allow_simd(2)
    assert finite == native_finite and len(wanted) == len(taken)
    for (values, indices), (native_values, native_indices) in zip(wanted, taken, strict=True):
        assert torch.equal(indices, native_indices)
        assert torch.equal(values.view(torch.int32), native_values.view(torch.int32))
    assert not finite or torch.equal(*(out.view(torch.int32) for out in outs))


@laws
@given(values=st.lists(FLOATS, max_size=300), bits=st.sampled_from([8, 4]))
def test_log_codes(values: list[float], bits: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    codes = reference.log_encode(x, bits)
    assert torch.equal(native.log_encode(x, bits), codes)
    seen = [kernel.log_decode(codes, bits, x.numel()).view(torch.int32) for kernel in (reference, native)]
    assert torch.equal(*seen)


@laws
@given(data=st.data(), numel=st.integers(1, 3000))
def test_any_bytes_as_indices(data: st.DataObject, numel: int) -> None:
    """Both read the same indices from bytes that nobody wrote, or refuse them with the same words."""
    capacity = data.draw(st.integers(1, numel))
    size = reference.ef_nbytes(numel, capacity)
    raw = data.draw(st.binary(min_size=size, max_size=size))
    message = torch.tensor(list(raw), dtype=torch.uint8)
    count = data.draw(st.integers(0, capacity))
    told = []
    for kernel in (reference, native):
        try:
            told.append(str(kernel.ef_decode(message, numel, capacity, count).tolist()))
        except WireError as error:
            told.append(str(error))
    assert told[0] == told[1]


@laws
@given(raw=st.binary(min_size=4, max_size=500), bits=st.sampled_from([8, 4]), count=st.integers(1, 400))
def test_any_bytes_as_values(raw: bytes, bits: int, count: int) -> None:
    size = reference.log_nbytes(bits, count)
    message = torch.tensor(list((raw * (size // len(raw) + 1))[:size]), dtype=torch.uint8)
    told = []
    for kernel in (reference, native):
        try:
            told.append(str(kernel.log_decode(message, bits, count).view(torch.int32).tolist()))
        except WireError as error:
            told.append(str(error))
    assert told[0] == told[1]
