"""The C++ kernels give the reference's bits, and the reference is right.

Cases that a reader can name are here; tests/property/test_same_bits.py draws the others, and
tests/native runs the C++ under sanitizers.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import compressed_ddp.kernels as kernels
from compressed_ddp import CompressionConfig, WireError, cli, get_compressor
from compressed_ddp.kernels import CodedEntries, reference, selection
from compressed_ddp.layout import BLOCK, Partition, Quota
from compressed_ddp.types import Payload
from compressed_ddp.wire import MessageCodec

try:
    from compressed_ddp.kernels import _native, native
except ImportError:  # the package works without; test_built_where_it_can_be says whether that is right
    _native = native = None  # type: ignore[assignment]

needs_native = pytest.mark.skipif(native is None, reason="the extension is not built")


def test_built_where_it_can_be() -> None:
    """A build that fails leaves the package without the extension: here that must be noticed."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert native is not None or compiler is None, "a compiler is there, but the extension was not built"


@pytest.fixture(params=[2, 1, 0], ids=["simd", "narrower", "baseline"])
def simd(request: pytest.FixtureRequest) -> Iterator[None]:
    """All sets of inner loops that this processor has."""
    _native.allow_simd(request.param)
    yield
    _native.allow_simd(2)


def bits(tensor: Tensor) -> Tensor:
    """For comparisons that tell -0 from 0."""
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


def hidden(n: int, sampled: float, others: float) -> Tensor:
    """Magnitudes about ``others``, but where the selection looks first about ``sampled``."""
    x = others * (1 + torch.rand(n))
    if n > selection.WHOLE:
        x[selection.sample_positions(n, x.device)] *= sampled / others
    return x


DATA = {
    "gaussian": torch.randn,
    "heavy tails": lambda n: torch.randn(n) / (torch.rand(n) + 1e-3) ** 2,
    "all zero": torch.zeros,
    "all equal": lambda n: 0.25 * (torch.randint(2, (n,)) * 2 - 1),
    "seven values": lambda n: torch.randint(-3, 4, (n,)).to(torch.float32),
    "mostly zero": lambda n: torch.randn(n) * (torch.rand(n) < 0.003),
    "many zeros": lambda n: torch.randn(n) * (torch.rand(n) < 0.5),
    "denormal": lambda n: torch.randn(n) * 1e-42,
    "huge": lambda n: torch.randn(n).clamp(-1, 1) * torch.finfo(torch.float32).max,
    "signed zeros": lambda n: torch.zeros(n) * (torch.randint(2, (n,)) * 2.0 - 1),
    "rising": lambda n: torch.arange(n, dtype=torch.float32),
    "large ones unseen": lambda n: hidden(n, 0.1, 10.0),
    "small ones unseen": lambda n: hidden(n, 10.0, 0.1),
}
KS = {"one": lambda n: 1, "0.001": lambda n: n // 1000, "0.01": lambda n: n // 100, "0.1": lambda n: n // 10}
KS |= {"half": lambda n: n // 2, "all but one": lambda n: n - 1, "all": lambda n: n}


def by_sorting(flat: Tensor, k: int) -> Tensor:
    return torch.sort(flat.abs(), descending=True, stable=True).indices[:k].sort().values


def check_take(
    residual: Tensor | None, gradient: Tensor, part: Partition, *, exact: bool = True, oracle: bool = True
) -> None:
    """Both kernels give the same bits, touch nothing else, and are right."""
    outs, answers = [], []
    before = [None if x is None else x.clone() for x in (residual, gradient)]
    for implementation in (reference, native):
        out = torch.full_like(gradient, torch.nan)
        answers.append(implementation.take_topk(residual, gradient, out, part, exact=exact))
        outs.append(out)
        for x, was in zip((residual, gradient), before, strict=True):
            assert x is None or torch.equal(bits(x), bits(was))
    (wanted, finite), (taken, native_finite) = answers
    assert finite == native_finite
    assert len(wanted) == len(taken)
    for (values, indices), (native_values, native_indices) in zip(wanted, taken, strict=True):
        assert torch.equal(indices, native_indices)
        assert torch.equal(bits(values), bits(native_values))
    if not finite:
        return
    assert torch.equal(bits(outs[0]), bits(outs[1]))
    if oracle and exact:
        due = gradient if residual is None else residual + gradient
        for shard, local in enumerate(part.split(due)):
            picked = [by_sorting(local[a:b], k) + a for a, b, k in part.quotas[shard]]
            assert torch.equal(wanted[shard][1], torch.cat(picked) if picked else wanted[shard][1][:0])


# --- selection -----------------------------------------------------------------------------


@needs_native
@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "roughly"])
@pytest.mark.parametrize("k", sorted(KS))
@pytest.mark.parametrize("data", sorted(DATA))
def test_data(data: str, k: str, exact: bool) -> None:
    n = 70_000
    gradient = DATA[data](n)
    residual = DATA[data](n) if data != "huge" else torch.zeros(n)
    check_take(residual, gradient, Partition.whole(n, KS[k](n)), exact=exact)
    check_take(None, gradient, Partition.whole(n, KS[k](n)), exact=exact)


@needs_native
@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("around", [0, 8, 16, 32, 64, 128, 192, 512, 1024, 2048, 4096, 4608])
def test_sizes_around_every_block(around: int) -> None:
    """Vectors of 8 and 16, steps of 32, blocks of 64, tiles of 2,048, whole looks at as many elements."""
    for n in range(max(0, around - 2), around + 3):
        for k in sorted({min(n, 1), n // 10, n}):
            check_take(torch.randn(n), torch.randn(n), Partition.whole(n, k))


@needs_native
@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("around", [2**18, 2**19])
def test_sizes_around_larger_blocks(around: int) -> None:
    """The sample grows from 2**18 elements on, stores go past the caches from 2**19 on."""
    residual, gradient = torch.randn(around + 65), torch.randn(around + 65)
    for n in (around - 65, around - 1, around, around + 1, around + 65):
        check_take(residual[:n], gradient[:n], Partition.whole(n, n // 100))
        check_take(residual[:n], gradient[:n], evenly(n, 3, 0.01), oracle=False)
        check_take(None, gradient[:n], Partition.whole(n, n // 10), exact=False)


@needs_native
def test_sizes_around_the_largest_sample() -> None:
    """At 2**24 elements the sample has its last line; from there on only its strata grow."""
    most = 2**24 + 2048
    residual, gradient = torch.randn(most), torch.randn(most)
    gradient[-4096:] *= (
        1000  # the last lines count: with one more or one less, other entries are taken roughly
    )
    for n in (2**24 - 1, 2**24, most):
        check_take(None, gradient[:n], Partition.whole(n, n // 50), exact=False)
    check_take(residual, gradient, Partition.whole(most, most // 1000), oracle=False)


@needs_native
@pytest.mark.parametrize("threads", [2, 3, 4])
def test_sizes_around_thread_shares(threads: int) -> None:
    """Another thread for each 2**19 elements; shares that leave some over, and meet in a round of shards."""
    torch.set_num_threads(threads)
    around = threads * 2**19
    residual, gradient = torch.randn(around + 65), torch.randn(around + 65)
    for n in (around - 1, around, around + 1, around + 65):
        check_take(residual[:n], gradient[:n], Partition.whole(n, n // 100), oracle=False)
    check_take(residual, gradient, evenly(around + 65, 5, 0.01), oracle=False)


@needs_native
@pytest.mark.usefixtures("simd")
def test_every_k() -> None:
    few, many = torch.randint(-9, 10, (70,)).to(torch.float32), torch.randn(2600)
    for k in range(71):
        check_take(None, few, Partition.whole(70, k))
    for k in [*range(0, 100), *range(100, 2600, 97), *range(2590, 2601)]:
        check_take(None, many, Partition.whole(2600, k))


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("data", ["gaussian", "mostly zero", "seven values", "large ones unseen"])
def test_threads(data: str, threads: int) -> None:
    """Enough elements that every thread gets some: the result must not depend on how many there are."""
    torch.set_num_threads(threads)
    for n, shards in ((4 * 2**19 + 77, 1), (4 * 2**19 + 77, 3)):
        part = evenly(n, shards, 0.01)
        check_take(torch.zeros(n), DATA[data](n), part, oracle=False)
        check_take(None, DATA[data](n), part, exact=False)


@needs_native
@pytest.mark.parametrize("threads", [1, 4])
def test_ten_million(threads: int) -> None:
    torch.set_num_threads(threads)
    n = 10**7 + 13
    check_take(torch.randn(n), torch.randn(n), Partition.whole(n, n // 100))


@needs_native
@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("shift", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [3000, 2**19 + 100])
def test_unaligned_views(shift: int, n: int) -> None:
    """A view that begins in the middle of a vector; large enough, results are written past the caches."""
    residual, gradient, out = (torch.randn(n + 8)[shift : shift + n] for _ in range(3))
    part = Partition.whole(n, n // 50)
    wanted, _ = reference.take_topk(residual, gradient, expected := torch.empty(n), part)
    taken, _ = native.take_topk(residual, gradient, out, part)
    assert torch.equal(out, expected)
    assert torch.equal(taken[0][0], wanted[0][0]) and torch.equal(taken[0][1], wanted[0][1])


def evenly(n: int, shards: int, ratio: float) -> Partition:
    bare = Partition(n, shards, ())
    sizes = [bare.local_numel(s) for s in range(shards)]
    return Partition(n, shards, tuple((Quota(0, m, max(1, int(m * ratio))),) if m else () for m in sizes))


@needs_native
@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("shards", [2, 3, 4, 7, 16])
def test_shards(shards: int) -> None:
    for n in (1, BLOCK, BLOCK * shards - 1, BLOCK * shards + 1, 10_007, 100_000):
        check_take(torch.randn(n), torch.randn(n), evenly(n, shards, 0.03))
        check_take(torch.randn(n), torch.randn(n), evenly(n, shards, 0.03), exact=False)


@needs_native
@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("shards", [1, 3])
def test_ranges_with_gaps(shards: int) -> None:
    """As with scope="tensor": ranges anywhere, some without a quota, elements that belong to none."""
    quotas = (Quota(3, 3, 0), Quota(5, 70, 6), Quota(70, 71, 1), Quota(100, 3000, 29), Quota(3001, 3300, 0))
    part = Partition(10_000, shards, (quotas,) * shards)
    check_take(torch.randn(10_000), torch.randn(10_000), part)


@needs_native
@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("n", [1, 65, 3000, 100_000])
def test_not_finite_is_seen_wherever_it_is(n: int, bad: float) -> None:
    """Also outside all ranges, and in a range that takes nothing or everything."""
    parts = [Partition.whole(n, max(1, n // 100)), Partition.whole(n, 0), Partition.whole(n, n)]
    parts += [Partition(n, 1, ((),)), evenly(n, 3, 0.1)]
    for part in parts:
        for at in (0, n // 2, n - 1):
            gradient = torch.randn(n)
            gradient[at] = bad
            check_take(torch.randn(n), gradient, part)
            assert not native.finite_sum(None, gradient) and not reference.finite_sum(None, gradient)
    large = torch.full((n,), torch.finfo(torch.float32).max)
    check_take(large, large, parts[0])  # both finite, their sum is not
    assert not native.finite_sum(large, large) and native.finite_sum(large, -large)


@needs_native
@pytest.mark.usefixtures("simd")
def test_in_place() -> None:
    for data in DATA:
        for n, shards in ((3000, 1), (3000, 3), (2**19 + 5, 1)):
            residual = torch.zeros(n) if data == "huge" else DATA[data](n)
            gradient, out, part = DATA[data](n), torch.empty(n), evenly(n, shards, 0.05)
            wanted, _ = reference.take_topk(residual, gradient, out, part)
            taken, _ = native.take_topk(residual, gradient, residual, part)
            assert torch.equal(bits(residual), bits(out))
            assert all(torch.equal(a[1], b[1]) for a, b in zip(taken, wanted, strict=True))


def test_roughly_takes_no_more_than_k_and_about_k() -> None:
    """The sample's promise, on data where it can be kept."""
    for n, k in ((10_000, 100), (300_000, 3000), (300_000, 300)):
        x = torch.randn(n)
        chosen = selection.roughly_topk_indices(x, k)
        assert k / 2 <= chosen.numel() <= k
        kept = x[chosen].abs().sum() / x[by_sorting(x, k)].abs().sum()
        assert kept > 0.6
    assert torch.equal(selection.roughly_topk_indices(torch.zeros(9000), 90), torch.arange(90))


@pytest.mark.parametrize("data", sorted(DATA))
def test_the_reference_sorts(data: str) -> None:
    """The definition itself, against the plainest way to say it; sampled or not."""
    for n in (100, 2048, 2049, 40_000):
        x = DATA[data](n)
        for k in (1, n // 100, n // 3, n):
            assert torch.equal(reference.topk_indices(x, k), by_sorting(x, k))


def test_compaction_without_asking_the_device() -> None:
    """What GPUs run instead of nonzero."""
    for n in (0, 1, 1000):
        for share in (0.0, 0.1, 1.0):
            mask = torch.rand(n) < share
            for size in (0, 1, 50, n):
                asked, told = selection._by_nonzero(mask, size), selection._by_scatter(mask, size)
                assert torch.equal(asked, told)


def test_one_question_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selection on a GPU must not wait for it again and again: everything is read back at once."""
    monkeypatch.setattr(selection, "first_positions", selection._by_scatter)
    reads: list[str] = []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "nonzero"):
        real = getattr(torch.Tensor, name)

        def watched(self: Tensor, *args: object, real: object = real, name: str = name) -> object:
            reads.append(name)
            return real(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(torch.Tensor, name, watched)
    n = 20_000
    part = evenly(n, 4, 0.01)
    taken, finite = selection.take_topk(torch.randn(n), torch.randn(n), torch.empty(n), part)
    assert reads == ["tolist"]
    assert finite and [values.numel() for values, _ in taken] == part.rooms


# --- sums and codes ------------------------------------------------------------------------


@needs_native
@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("shards", [1, 2, 5, 100])
@pytest.mark.parametrize("n", [1, 63, 64, 5000, 8191, 8192, 8193, 30_001])
def test_accumulate(n: int, shards: int) -> None:
    """Also around a tile of 8,192 elements, the unit in which sums are made."""
    part = evenly(n, shards, 0.1)
    pieces = []
    for sender in range(4):
        for shard in range(shards):
            size = part.local_numel(shard)
            indices = torch.randperm(size)[: max(1, size // (sender + 2))].sort().values[:size]
            pieces.append((shard, torch.randn(indices.numel()), indices))
    outs = [torch.full((n,), torch.nan) for _ in range(2)]
    reference.accumulate_(outs[0], part, pieces, 1 / 3)
    native.accumulate_(outs[1], part, pieces, 1 / 3)
    assert torch.equal(bits(outs[0]), bits(outs[1]))
    shard, values, indices = pieces[-1]
    for kernel, out in zip((reference, native), outs, strict=True):
        kernel.put_difference_(out, part, shard, indices, values, torch.sin(values))
    assert torch.equal(bits(outs[0]), bits(outs[1]))


VALUES = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3, "int4": 4}


def coded(part: Partition, shard: int, values: str, *, share: float, full: bool) -> CodedEntries:
    """A message about ``shard`` as it travels; where not ``full``, with less than it has room for."""
    size = part.local_numel(shard)
    room = min(size, max(1, int(size * share)))
    count = room if full else room // 2
    indices = torch.randperm(size)[:count].sort().values
    payload = Payload(torch.randn(count) * 100, indices, torch.Size([size]))
    codec = MessageCodec.named("elias_fano", values)
    message = codec.encode(
        payload, k=room, out=torch.zeros(codec.nbytes(size, room), dtype=torch.uint8)
    ).message
    opened = codec.open(message, numel=size, k=room)
    return CodedEntries(shard, opened.indices, opened.values, size, room, count)


@needs_native
@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("values", sorted(VALUES))
@pytest.mark.parametrize("shards", [1, 2, 5, 100])
@pytest.mark.parametrize("n", [1, 63, 64, 5000, 8191, 8192, 8193, 30_001])
def test_sum_coded(n: int, shards: int, values: str) -> None:
    """Straight from the bytes: as decoding and adding would."""
    part = evenly(n, shards, 0.1)
    messages = [
        coded(part, shard, values, share=1 / (sender + 1) ** 3, full=sender != 2)
        for sender in range(4)
        for shard in range(shards)
    ]
    outs = [torch.full((n,), torch.nan) for _ in range(2)]
    for kernel, out in zip((reference, native), outs, strict=True):
        kernel.sum_coded_(out, part, messages, VALUES[values], 1 / 3)
    assert torch.equal(bits(outs[0]), bits(outs[1]))


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("share", [0.3, 0.01, 0.00001])
def test_sum_coded_with_threads(threads: int, share: float) -> None:
    """Threads begin in the middle of a message."""
    torch.set_num_threads(threads)
    n = 5 * 2**19 + 3
    for shards, values in ((1, "int8"), (3, "int4"), (1, "fp16")):
        part = evenly(n, shards, 0.01)
        messages = [coded(part, s % shards, values, share=share, full=s > 0) for s in range(2 * shards)]
        outs = [torch.full((n,), torch.nan) for _ in range(2)]
        for kernel, out in zip((reference, native), outs, strict=True):
            kernel.sum_coded_(out, part, messages, VALUES[values], 0.5)
        assert torch.equal(bits(outs[0]), bits(outs[1]))


@needs_native
def test_every_half_is_read_alike() -> None:
    """All finite numbers of both 16-bit types, denormals and signed zeros among them."""
    for values, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        numbers = numbers[numbers.isfinite()]
        n = numbers.numel()
        indices = reference.ef_encode(torch.arange(n), n, n)
        message = CodedEntries(0, indices, numbers.view(torch.uint8), n, n, n)
        out = torch.ones(n)
        native.sum_coded_(out, Partition.whole(n, n), [message], VALUES[values], 1.0)
        assert torch.equal(bits(out), bits(0.0 + numbers.to(torch.float32)))


@needs_native
def test_damaged_entries_leave_the_sum_alone() -> None:
    """The last of three messages is bad: both kernels say so, and neither has written anything."""
    part = Partition.whole(5000, 50)
    for values, code in VALUES.items():
        good = [coded(part, 0, values, share=0.01, full=True) for _ in range(3)]
        bad_indices = good[2].indices.clone()
        bad_indices[-20:] = 0xFF
        bad_values = good[2].values.clone()
        bad_values[:8] = 0xFF
        for last in (good[2]._replace(indices=bad_indices), good[2]._replace(values=bad_values)):
            told = []
            for kernel in (reference, native):
                out = torch.full((5000,), 7.0)
                with pytest.raises(WireError) as caught:
                    kernel.sum_coded_(out, part, [*good[:2], last], code, 1.0)
                told.append(str(caught.value))
                assert bool((out == 7).all())
            assert told[0] == told[1]
        for short in (good[2]._replace(values=bad_values[1:]), good[2]._replace(indices=bad_indices[1:])):
            for kernel in (reference, native):
                with pytest.raises(WireError, match="bytes"):
                    kernel.sum_coded_(torch.empty(5000), part, [short], code, 1.0)


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_accumulate_with_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    n = 5 * 2**19 + 3
    for shards in (1, 3):
        part = evenly(n, shards, 0.01)
        pieces = []
        for sender in range(3 * shards):
            shard = sender % shards
            indices = torch.randperm(part.local_numel(shard))[:5000].sort().values
            pieces.append((shard, torch.randn(5000), indices))
        outs = [torch.full((n,), torch.nan) for _ in range(2)]
        reference.accumulate_(outs[0], part, pieces, 0.5)
        native.accumulate_(outs[1], part, pieces, 0.5)
        assert torch.equal(bits(outs[0]), bits(outs[1]))


@needs_native
@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("data", sorted(DATA))
@pytest.mark.parametrize("width", [8, 4])
def test_log_codes(data: str, width: int) -> None:
    for n in (0, 1, 2, 63, 64, 65, 127, 129, 5000):
        values = DATA[data](n)
        codes = reference.log_encode(values, width)
        assert torch.equal(native.log_encode(values, width), codes)
        assert torch.equal(
            bits(native.log_decode(codes, width, n)), bits(reference.log_decode(codes, width, n))
        )


@needs_native
@pytest.mark.parametrize("width", [8, 4])
def test_log_codes_of_every_magnitude(width: int) -> None:
    """A value of every sign, exponent and leading mantissa bits, beside neighbours near and far."""
    patterns = torch.arange(0, 0x7F80, dtype=torch.int32) << 16
    patterns = torch.stack([patterns, patterns | 0x8001, patterns | 0xFFFF], 1).view(-1)
    everything = torch.cat([patterns, patterns - 2**31]).view(torch.float32)
    for order in (torch.arange(everything.numel()), torch.randperm(everything.numel())):
        values = everything[order]
        codes = reference.log_encode(values, width)
        assert torch.equal(native.log_encode(values, width), codes)
        n = values.numel()
        assert torch.equal(
            bits(native.log_decode(codes, width, n)), bits(reference.log_decode(codes, width, n))
        )


@needs_native
@pytest.mark.parametrize("numel", [1, 2, 7, 64, 1000, 123_457])
def test_elias_fano(numel: int) -> None:
    for capacity in sorted({1, min(numel, 3), max(1, numel // 100), max(1, numel // 2), numel}):
        for count in sorted({0, 1, capacity // 2, capacity}):
            chosen = (torch.arange(count), torch.arange(numel - count, numel), torch.randperm(numel)[:count])
            for indices in chosen:
                indices = indices.sort().values
                data = reference.ef_encode(indices, numel, capacity)
                assert torch.equal(native.ef_encode(indices, numel, capacity), data)
                assert torch.equal(native.ef_decode(data, numel, capacity, count), indices)


@needs_native
def test_damage_is_named_alike() -> None:
    """Both kernels refuse the same bytes with the same words."""
    generator = torch.Generator().manual_seed(1)
    refused = set()
    for _ in range(3000):
        numel, capacity = 200, int(torch.randint(1, 60, (1,), generator=generator))
        count = int(torch.randint(0, capacity + 1, (1,), generator=generator))
        indices = torch.randperm(numel, generator=generator)[:count].sort().values
        data = reference.ef_encode(indices, numel, capacity)
        at = int(torch.randint(data.numel() * 8, (1,), generator=generator))
        data[at // 8] ^= 1 << at % 8
        told = []
        for kernel in (reference, native):
            try:
                told.append(str(kernel.ef_decode(data, numel, capacity, count).tolist()))
            except WireError as error:
                told.append(str(error))
                refused.add(str(error).split()[0])
        assert told[0] == told[1]
    assert refused == {"index", "indices"}
    codes = reference.log_encode(torch.randn(200), 8)
    codes[0:2], codes[2:4] = 0x70, 0x60
    for kernel in (reference, native):
        with pytest.raises(WireError, match="smallest magnitude"):
            kernel.log_decode(codes, 8, 200)
        with pytest.raises(WireError, match="bytes"):
            kernel.log_decode(codes[:-1], 8, 200)
        with pytest.raises(WireError, match="bytes"):
            kernel.ef_decode(codes, 200, 20, 20)


@needs_native
def test_checksum() -> None:
    message = torch.randint(256, (4096,), dtype=torch.uint8)
    for size in (0, 4, 8, 4096):
        for skip in (-1, 0, 7):
            if skip * 4 < size:
                assert native.checksum(message[:size], skip) == reference.checksum(message[:size], skip)


@needs_native
def test_addresses_are_not_taken_on_trust() -> None:
    x, part = torch.randn(100), Partition.whole(100, 5)
    for wrong in (torch.randn(99), torch.randn(200)[::2], torch.randn(100, dtype=torch.float64)):
        with pytest.raises(ValueError, match="contiguous CPU tensor of 100"):
            native.take_topk(wrong, x, torch.empty(100), part)
        with pytest.raises(ValueError, match="contiguous CPU tensor of 100"):
            native.take_topk(x, x, wrong, part)
    for quota in (Quota(0, 101, 5), Quota(0, 10, 11), Quota(-1, 10, 2), Quota(20, 10, 0), Quota(0, 10, -1)):
        with pytest.raises(ValueError, match="does not fit shard 0"):
            native.take_topk(x, x, torch.empty(100), Partition(100, 1, ((quota,),)))
    overlapping = Partition(100, 1, ((Quota(0, 50, 5), Quota(49, 60, 2)),))
    with pytest.raises(ValueError, match="50 of them in quotas before it"):
        native.take_topk(x, x, torch.empty(100), overlapping)
    for indices in ([-1], [100], [3, 1_000_000]):
        pieces = [(0, torch.ones(len(indices)), torch.tensor(indices))]
        with pytest.raises(ValueError, match="reach outside their shard"):
            native.accumulate_(torch.empty(100), part, pieces, 1.0)
    with pytest.raises(ValueError, match="reach outside their shard"):
        native.put_difference_(torch.empty(100), part, 0, torch.tensor([100]), torch.ones(1), torch.ones(1))
    for indices in ([3, 2], [-1], [100], [5, 5], [1, 2, 3]):
        with pytest.raises(ValueError, match="strictly increasing"):
            native.ef_encode(torch.tensor(indices), 100, 2)


# --- which one runs ------------------------------------------------------------------------


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


DESCRIBE = "from compressed_ddp.kernels import describe; print(describe())"


@needs_native
def test_choice() -> None:
    assert "native (C++" in run(DESCRIBE, COMPRESSED_DDP_KERNELS="").stdout
    assert "native (C++" in run(DESCRIBE, COMPRESSED_DDP_KERNELS="native").stdout
    forced = run(DESCRIBE, COMPRESSED_DDP_KERNELS="reference")
    assert forced.stdout.strip() == "reference (torch operations; COMPRESSED_DDP_KERNELS=reference)"
    assert forced.stderr == ""
    unknown = run(DESCRIBE, COMPRESSED_DDP_KERNELS="fast")
    assert "COMPRESSED_DDP_KERNELS='fast': use 'reference' or 'native'" in unknown.stderr


def test_without_the_extension_it_says_so_once() -> None:
    """As after an installation without a compiler."""
    program = (
        "import sys; sys.modules['compressed_ddp.kernels._native'] = None\n"
        "import torch\n"
        "from compressed_ddp import get_compressor\n"
        "for _ in range(3):\n"
        "    get_compressor(0.1).take_(torch.zeros(100), torch.randn(100))\n" + DESCRIBE
    )
    result = run(program, COMPRESSED_DDP_KERNELS="")
    assert result.returncode == 0
    assert result.stdout.strip() == "reference (torch operations; the extension was not built)"
    assert result.stderr.count("compressed-ddp runs on torch operations") == 1
    insisted = run(program, COMPRESSED_DDP_KERNELS="native")
    assert (
        insisted.returncode != 0 and "ImportError" in insisted.stderr
    ) or "ModuleNotFound" in insisted.stderr


@needs_native
def test_native_serves_contiguous_cpu_tensors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPRESSED_DDP_KERNELS", raising=False)
    kernels._choice.cache_clear()
    try:
        assert kernels.kernels_for(torch.zeros(10)) is native
        assert kernels.kernels_for(torch.zeros(10, dtype=torch.uint8)) is native
        assert kernels.kernels_for(torch.zeros(10)[::2]) is reference
        assert kernels.kernels_for(torch.zeros(10, dtype=torch.float64)) is reference
        assert kernels.kernels_for(torch.zeros(10, device="meta")) is reference
        assert kernels.describe(torch.device("cuda")) == "reference (torch operations on cuda)"
        assert kernels.same_bits() is True
    finally:
        monkeypatch.undo()
        kernels._choice.cache_clear()


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert kernels.describe() in text and torch.__version__ in text and "topk" in text
    assert cli.main(["info", "--json"]) == 0
    assert '"kernels"' in capsys.readouterr().out
    native_runs = kernels.describe().startswith("native")
    assert cli.main(["info", "--expect-native"]) == (0 if native_runs else 1)


def test_info_finds_kernels_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "same_bits", lambda: False)
    assert cli.main(["info"]) == 1


def test_stats_say_which_kernels_run(caplog: pytest.LogCaptureFixture) -> None:
    from compressed_ddp.communication import Reducer, run_in_process

    config = CompressionConfig()
    with caplog.at_level(logging.WARNING):
        stats = run_in_process(1, lambda net: Reducer(get_compressor(), config, net).stats)[0]
    assert kernels.describe() in str(stats)
    assert stats.as_dict()["kernels"] == kernels.describe()


# --- take_ ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["topk", "threshold", "randomk", "qsgd"])
def test_take_with_out_reads_only(name: str) -> None:
    """The same payload and residual, but written beside."""
    residual, gradient, out = torch.randn(40, 50), torch.randn(40, 50), torch.empty(40, 50)
    before = residual.clone()
    beside = get_compressor(0.05, name=name).take_(residual, gradient, out=out)
    assert torch.equal(residual, before)
    inside = get_compressor(0.05, name=name).take_(residual, gradient)
    assert torch.equal(residual, out)
    assert torch.equal(beside.values, inside.values) and torch.equal(beside.indices, inside.indices)


def test_take_serves_views() -> None:
    """A residual with gaps, and one that is part of something larger."""
    compressor = get_compressor(0.1)
    row = torch.randn(200)
    for residual, gradient in ((row[::2], torch.randn(100)), (torch.randn(100), torch.randn(200)[::2])):
        beside, expected = torch.empty(100), residual.clone()
        wanted = compressor.take_(expected, gradient.clone())
        assert torch.equal(compressor.take_(residual, gradient, out=beside).indices, wanted.indices)
        assert torch.equal(compressor.take_(residual, gradient).values, wanted.values)
        assert torch.equal(residual, expected) and torch.equal(beside, expected)
    home = torch.randn(60, 100)
    for view in (home[:, ::2], home[10:20]):
        expected, others = view.clone(), home.clone()
        gradient = torch.randn(view.shape)
        payload = compressor.take_(view, gradient)
        wanted = compressor.take_(expected, gradient)
        assert torch.equal(view, expected) and torch.equal(payload.indices, wanted.indices)
        view.fill_(0)
        others_view = others[:, ::2] if view.shape[1] == 50 else others[10:20]
        others_view.fill_(0)
        assert torch.equal(home, others)


def test_take_refuses_a_wrong_out() -> None:
    residual, gradient = torch.zeros(10), torch.zeros(10)
    wrong = {
        "out is torch.float32": torch.zeros(11),
        "out is torch.float64": torch.zeros(10, dtype=torch.float64),
        "must be contiguous": torch.zeros(20)[::2],
        "shares memory": residual,
    }
    for message, out in wrong.items():
        with pytest.raises(ValueError, match=message):
            get_compressor(0.1).take_(residual, gradient, out=out)


@needs_native
def test_want_of_memory_is_nobodys_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer must not be blamed for it."""

    class Poor:
        ef_decode = staticmethod(lambda *_: (native._NO_MEMORY, 0))

    data = torch.zeros(native.ef_nbytes(100, 4), dtype=torch.uint8)
    monkeypatch.setattr(native, "_native", Poor)
    with pytest.raises(MemoryError):
        native.ef_decode(data, 100, 4, 0)
