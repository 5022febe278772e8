"""The laws, on inputs nobody would think of: nothing is lost, nothing is invented, nothing crashes.

Examples are derived from the test itself (``derandomize``), so a run finds what the last one
found and never fails by chance.
"""

from __future__ import annotations

import math
import struct
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressed_ddp.communication.packer import Packer
from compressed_ddp.compression import COMPRESSORS, BaseCompressor, get_compressor
from compressed_ddp.kernels.reference import checksum, ef_decode, ef_encode, ef_nbytes, topk_indices
from compressed_ddp.layout import BucketLayout, Partition, deal, partition, resized, small_positions
from compressed_ddp.types import Payload, Slot, Stamp, WireError
from compressed_ddp.wire import INDEX_FORMATS, SPARSE_VALUES, MessageCodec
from compressed_ddp.wire.indices import seeded_indices
from compressed_ddp.wire.values import _FORMATS

CPU = torch.device("cpu")
laws = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)


class Row(NamedTuple):
    """A compressor and its options; ratios are drawn."""

    name: str
    options: dict[str, Any] = {}  # noqa: RUF012

    def make(self, ratio: float = 0.1, **more: Any) -> BaseCompressor:
        return get_compressor(ratio, name=self.name, **self.options | more)


ROWS = [
    Row("dense"),
    Row("fp16"),
    Row("bf16"),
    Row("topk"),
    Row("threshold"),
    Row("threshold", {"threshold": 0.5}),
    Row("randomk"),
    Row("randomk", {"unbiased": True}),
    *(Row("qsgd", {"levels": 2**bits - 1}) for bits in range(1, 8)),
    Row("sign"),
    Row("terngrad"),
    Row("onebit"),
    Row("powersgd"),
    Row("powersgd", {"rank": 1}),
]
CONTRACTIONS = [row for row in ROWS if row.make().contraction]
SPARSE = [row for row in ROWS if row.make().index_format != "all"]
SHRINKING = [row for row in SPARSE if row in CONTRACTIONS]
IN_MESSAGES = [row for row in ROWS if row.name != "powersgd"]
"""PowerSGD travels as plain all-reduces (tests of its own: tests/unit/test_collectives.py)."""


def names(rows: list[Row]) -> list[str]:
    return ["-".join([row.name, *map(str, row.options.values())]) for row in rows]


every_row = pytest.mark.parametrize("row", ROWS, ids=names(ROWS))
every_message = pytest.mark.parametrize("row", IN_MESSAGES, ids=names(IN_MESSAGES))
every_contraction = pytest.mark.parametrize("row", CONTRACTIONS, ids=names(CONTRACTIONS))


def test_every_compressor_has_a_row() -> None:
    """A new compressor must pass these laws too."""
    assert {row.name for row in ROWS} == set(COMPRESSORS)


# --- inputs --------------------------------------------------------------------------------

KINDS = ("gaussian", "heavy", "ties", "zeros", "tiny", "outlier", "huge")
ratios = st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0])
bounded = st.floats(-(2.0**50), 2.0**50, width=32)


def generated(kind: str, n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator)
    if kind == "heavy":
        return x * torch.exp(4 * torch.randn(n, generator=generator))
    if kind == "ties":
        return torch.randint(-3, 4, (n,), generator=generator).float()
    if kind == "zeros":
        return torch.zeros(n)
    if kind == "tiny":
        return x * 1e-42
    if kind == "huge":
        return x * 1e12
    if kind == "outlier" and n:
        x[int(torch.randint(n, (1,), generator=generator))] = -1e6
    return x


@st.composite
def tensors(draw: st.DrawFn, n: int) -> Tensor:
    """``n`` float32 values: of one of several kinds, or number by number."""
    if n <= 24 and draw(st.booleans()):
        return torch.tensor(draw(st.lists(bounded, min_size=n, max_size=n)), dtype=torch.float32)
    return generated(draw(st.sampled_from(KINDS)), n, draw(st.integers(0, 2**31)))


@st.composite
def pairs(draw: st.DrawFn, largest: int = 1200) -> tuple[Tensor, Tensor]:
    """A residual and a gradient of one shape, often a matrix."""
    n = draw(st.one_of(st.integers(0, 24), st.integers(0, largest)))
    residual, gradient = draw(tensors(n)), draw(tensors(n))
    columns = draw(st.sampled_from([1, 2, 5, 12, 30]))
    if n and n % columns == 0 and draw(st.booleans()):
        return residual.view(-1, columns), gradient.view(-1, columns)
    return residual, gradient


def assert_law(owed: Tensor, gradient: Tensor, sent: Tensor, left: Tensor) -> None:
    """owed + gradient == sent + left, but for two roundings: of the sum, and of what is left of it."""
    due = owed.double() + gradient.double()
    rest = (owed + gradient.float()).double() - sent.double()
    slack = 2.0**-24 * (due.abs() + rest.abs()) * (1 + 1e-6) + 2.0**-149
    missing = (due - sent.double() - left.double()).abs()
    assert bool((missing <= slack).all()), f"lost {missing.max():g} of {due.abs().max():g}"


def energy(x: Tensor) -> float:
    return float(x.double().square().sum())


# --- compressors ---------------------------------------------------------------------------


@every_row
@laws
@given(pair=pairs(), ratio=ratios)
def test_take_conserves(row: Row, pair: tuple[Tensor, Tensor], ratio: float) -> None:
    """Whatever a method drops or rounds must stay in the residual, or training drifts."""
    residual, gradient = pair
    compressor, before, given_ = row.make(ratio), residual.clone(), gradient.clone()
    payload = compressor.take_(residual, gradient)
    assert torch.equal(gradient, given_)
    sent = compressor.decompress(*payload)
    assert sent.shape == gradient.shape
    assert_law(before, gradient, sent, residual)
    assert bool((payload.indices[1:] > payload.indices[:-1]).all())
    assert payload.indices.numel() <= compressor.quota(gradient.numel())


@laws
@given(pair=pairs(), ratio=ratios)
def test_topk_conserves_integers_exactly(pair: tuple[Tensor, Tensor], ratio: float) -> None:
    """Where arithmetic is exact, so is the law: not one bit of slack."""
    residual, gradient = (x.nan_to_num().clamp(-1000, 1000).round() for x in pair)
    before = residual.clone()
    compressor = get_compressor(ratio, values="fp32")
    sent = compressor.decompress(*compressor.take_(residual, gradient))
    assert torch.equal(before + gradient, sent + residual)
    assert not bool(((sent != 0) & (residual != 0)).any())


@every_row
def test_take_leaves_a_residual_alone_where_the_gradient_is_not_finite(row: Row) -> None:
    """A poisoned residual would be sent for ever."""
    residual = torch.arange(40.0).view(8, 5)
    for poison in (torch.nan, torch.inf):
        gradient = torch.ones(8, 5)
        gradient[3, 2] = poison
        with pytest.raises(ValueError, match="not finite"):
            row.make().take_(residual, gradient)
        assert torch.equal(residual, torch.arange(40.0).view(8, 5))


@pytest.mark.parametrize("row", [Row("topk"), Row("sign"), Row("powersgd")], ids=lambda row: row.name)
def test_take_on_any_memory_layout(row: Row) -> None:
    """Convolution weights in channels_last have gradients and residuals with strides of their own."""
    residual = torch.randn(8, 6, 3, 3).to(memory_format=torch.channels_last)
    gradient = torch.randn(8, 6, 3, 3)
    before, compressor = residual.clone(), row.make()
    sent = compressor.decompress(*compressor.take_(residual, gradient))
    assert_law(before, gradient, sent, residual)


@every_contraction
@laws
@given(pair=pairs(), ratio=ratios)
def test_contraction(row: Row, pair: tuple[Tensor, Tensor], ratio: float) -> None:
    """Compressing must not leave more error than there was signal, or error feedback diverges."""
    x = pair[1]
    compressor = row.make(ratio)
    left = x - compressor.decompress(*compressor.compress(x))
    assert energy(left) <= energy(x) * (1 + 1e-5)


@pytest.mark.parametrize("values", SPARSE_VALUES)
@pytest.mark.parametrize("row", SHRINKING, ids=names(SHRINKING))
@settings(laws, max_examples=20)
@given(pair=pairs(), ratio=ratios)
def test_contraction_of_messages(row: Row, values: str, pair: tuple[Tensor, Tensor], ratio: float) -> None:
    """The same of what really travels: selection and value rounding together."""
    compressor = row.make(ratio, values=values)
    x = pair[1].reshape(-1)
    indices = compressor.select(x, compressor.quota(x.numel()), Stamp())
    seen = compressor.codec.encode(Payload(x[indices], indices, x.shape)).values
    left = x.clone()
    left[indices] -= seen
    assert energy(left) <= energy(x) * (1 + 1e-5)


METHODS = [row for row in ROWS if row.name in ("fp16", "bf16", "qsgd", "sign", "terngrad", "onebit")]


@pytest.mark.parametrize("row", METHODS, ids=names(METHODS))
def test_compress_shows_what_a_receiver_sees(row: Row) -> None:
    """Where rounding is the method, compress and take_ must round: else nothing is compressed."""
    x = torch.randn(700)
    compressor = row.make()
    first = compressor.compress(x)
    message = compressor.codec.encode(Payload(x, torch.arange(700), x.shape), stamp=Stamp())
    assert torch.equal(first.values, message.values)
    residual, fresh = torch.zeros(700), row.make()
    assert torch.equal(fresh.take_(residual, x).values, message.values)


UNBIASED = [row for row in ROWS if row.make().unbiased]


@pytest.mark.parametrize("row", UNBIASED, ids=names(UNBIASED))
def test_unbiased(row: Row) -> None:
    """Averaged over draws the message is the gradient; methods without a residual rest on that."""
    draws, n = 500, 48
    x = torch.linspace(-1.0, 2.0, n)
    x[7] = 0.0
    compressor = row.make(0.25)
    k, total = compressor.quota(n), torch.zeros(n, dtype=torch.float64)
    for step in range(draws):
        stamp = Stamp(seed=3, step=step)
        indices = compressor.select(x, k, stamp)
        sent = compressor.scale(x[indices], k, n)
        seen = compressor.codec.encode(Payload(sent, indices, x.shape), stamp=stamp).values
        total[indices] += seen.double()
    if row.name == "randomk":
        spread = x.abs().double() * math.sqrt(n / k - 1)
        rounding = 0.05 * x.abs().double()  # its values travel in 8 bits, rounded to nearest
    else:
        scale = x.abs().max() if row.name == "terngrad" else x.norm()
        spread = torch.full_like(total, float(scale) / row.options.get("levels", 1) / 2)
        rounding = 1e-6 * x.abs().double()
    error = (total / draws - x.double()).abs()
    assert bool((error <= 5 * spread / math.sqrt(draws) + rounding).all())


@laws
@given(data=st.data(), n=st.integers(0, 60))
def test_topk_is_a_sort(data: st.DataObject, n: int) -> None:
    """By magnitude, then by position: the order that all implementations must share."""
    x, k = data.draw(tensors(n)), data.draw(st.integers(0, n))
    flat = x.tolist()
    wanted = sorted(sorted(range(n), key=lambda i: (-abs(flat[i]), i))[:k])
    assert topk_indices(x, k).tolist() == wanted


@laws
@given(pair=pairs(400), ratio=ratios)
def test_threshold_never_exceeds_its_room(pair: tuple[Tensor, Tensor], ratio: float) -> None:
    """A message has room for k; what passes beyond that must be the largest."""
    x = pair[1].reshape(-1)
    k = get_compressor(ratio).quota(x.numel())
    chosen = get_compressor(ratio, name="threshold", threshold=1e-30).select(x, k, Stamp())
    top = topk_indices(x, k)
    assert torch.equal(chosen, top[x[top].abs() >= 1e-30])


# --- codecs --------------------------------------------------------------------------------


@st.composite
def index_sets(draw: st.DrawFn, largest: int = 3000) -> tuple[int, int, list[int]]:
    """numel, room, and at most that many increasing indices."""
    numel = draw(st.one_of(st.integers(1, 70), st.integers(1, largest), st.integers(2**30, 2**31 - 1)))
    chosen = draw(st.lists(st.integers(0, numel - 1), unique=True, max_size=min(numel, 90)))
    room = draw(st.integers(len(chosen), min(numel, len(chosen) + 50)))
    return numel, room, sorted(chosen)


@settings(laws, max_examples=200)
@given(index_sets())
def test_elias_fano_round_trip(case: tuple[int, int, list[int]]) -> None:
    """Any index set comes back, in the size that was promised before it was known."""
    numel, room, chosen = case
    data = ef_encode(torch.tensor(chosen, dtype=torch.int64), numel, room)
    assert data.numel() == ef_nbytes(numel, room)
    assert ef_decode(data, numel, room, len(chosen)).tolist() == chosen


@settings(laws, max_examples=200)
@given(numel=st.integers(1, 2**31 - 1), share=st.floats(0.0, 1.0))
def test_elias_fano_size(numel: int, share: float) -> None:
    """At most log2(n / k) + 2 bits an entry, and some bytes for the ends."""
    k = max(1, int(numel * share))
    assert 8 * ef_nbytes(numel, k) <= k * (math.log2(numel / k) + 2) + 32


@pytest.mark.parametrize("indices", INDEX_FORMATS)
@settings(laws, max_examples=100)
@given(data=st.data(), values=st.sampled_from(sorted(_FORMATS)), step=st.integers(0, 2**33))
def test_codec_round_trip(indices: str, data: st.DataObject, values: str, step: int) -> None:
    """Sender and receiver see the same values, whatever they are."""
    codec = MessageCodec.named(indices, values)
    numel, room, chosen = data.draw(index_sets())
    if indices == "all":
        numel = room = min(numel, 1100)
        chosen = list(range(numel))
    stamp = Stamp(seed=1, step=step, bucket=data.draw(st.integers(0, 70000)), sender=3)
    at = torch.tensor(chosen, dtype=torch.int64)
    if indices == "seeded":
        numel = min(numel, 5000)
        room = len(chosen) if len(chosen) <= numel else numel
        at = seeded_indices(numel, room, stamp, CPU)
    x, small = data.draw(tensors(at.numel())), data.draw(tensors(data.draw(st.integers(0, 24))))
    message, seen, seen_small = codec.encode(
        Payload(x, at, torch.Size([numel])), k=room, dense=small, stamp=stamp
    )
    assert message.numel() == codec.nbytes(numel, room, small.numel())
    got = codec.decode(message, numel=numel, k=room, dense=small.numel(), stamp=stamp)
    assert got.finite and torch.equal(got.payload.indices, at)
    assert torch.equal(got.payload.values.view(torch.int32), seen.view(torch.int32))
    assert torch.equal(got.dense.view(torch.int32), seen_small.view(torch.int32))
    if values == "fp32":
        assert torch.equal(seen, x) and torch.equal(seen_small, small)


def decode_or_refuse(
    codec: MessageCodec, message: Tensor, numel: int, k: int, dense: int, stamp: Stamp
) -> None:
    """Decode; WireError is fine, and so is a result that can do no harm. Anything else is not."""
    try:
        got = codec.decode(message, numel=numel, k=k, dense=dense, stamp=stamp)
    except WireError:
        return
    values, indices, _ = got.payload
    if not got.finite:
        assert values.numel() == indices.numel() == got.dense.numel() == 0
        return
    assert values.numel() == indices.numel() <= k and got.dense.numel() == dense
    assert bool((indices[1:] > indices[:-1]).all())
    assert not indices.numel() or (int(indices[0]) >= 0 and int(indices[-1]) < numel)
    assert bool(torch.isfinite(values).all() and torch.isfinite(got.dense).all())


formats = {"indices": st.sampled_from(sorted(INDEX_FORMATS)), "values": st.sampled_from(sorted(_FORMATS))}


@settings(laws, max_examples=200)
@given(data=st.data(), numel=st.integers(0, 80), k=st.integers(0, 80), dense=st.integers(0, 9), **formats)
def test_random_bytes(data: st.DataObject, numel: int, k: int, dense: int, indices: str, values: str) -> None:
    """Bytes of the right or a wrong length, from anywhere."""
    codec, k = MessageCodec.named(indices, values), min(k, numel)
    size = codec.nbytes(numel, k, dense)
    raw = data.draw(st.one_of(st.binary(max_size=300), st.binary(min_size=size, max_size=size)))
    decode_or_refuse(codec, torch.tensor(list(raw), dtype=torch.uint8), numel, k, dense, Stamp())


@settings(laws, max_examples=300)
@given(data=st.data(), numel=st.integers(0, 80), k=st.integers(0, 80), dense=st.integers(0, 9), **formats)
def test_random_bytes_behind_a_good_header(
    data: st.DataObject, numel: int, k: int, dense: int, indices: str, values: str
) -> None:
    """Header and checksum in order, everything else at random: the checks behind them must hold."""
    codec, k, stamp = MessageCodec.named(indices, values), min(k, numel), Stamp(step=9, sender=1)
    k = numel if indices == "all" else k
    count = k if indices != "elias_fano" else data.draw(st.integers(0, k))
    room = codec.nbytes(numel, k, dense) - 32
    codes = (1, codec.indices.code, codec.values.code, 0, 0, 9, 0, 1, numel, count, dense, 0)
    header = b"CD" + struct.pack("<4BHI2H4I", *codes)
    raw = header + data.draw(st.one_of(st.binary(min_size=room, max_size=room), st.just(bytes(room))))
    message = torch.tensor(list(raw), dtype=torch.uint8)
    message[28:32] = torch.tensor(list(struct.pack("<I", checksum(message))), dtype=torch.uint8)
    decode_or_refuse(codec, message, numel, k, dense, stamp)


# --- layout --------------------------------------------------------------------------------


@laws
@given(numel=st.integers(0, 2000), shards=st.integers(1, 9))
def test_partition_deals_every_element_once(numel: int, shards: int) -> None:
    """An element in two shards would count twice, one in none would never be sent."""
    part = Partition(numel, shards, ())
    flat = torch.arange(numel)
    seen = []
    for shard, mine in enumerate(part.split(flat)):
        local = torch.arange(part.local_numel(shard))
        assert torch.equal(part.to_global(local, shard), mine)
        assert torch.equal(part.to_local(mine, shard), local)
        assert torch.equal(part.to_local(flat, shard), local)
        for position in {0, min(1, numel), numel // 3, numel // 2, numel}:
            assert part.local_index(position, shard) == int((mine < position).sum())
        seen.append(mine)
    assert torch.equal(torch.cat(seen).sort().values, flat)
    sizes = [len(mine) for mine in seen]
    assert max(sizes) - min(sizes) <= 64


@settings(laws, max_examples=300)
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=9), data=st.data())
def test_deal_keeps_the_sum(sizes: list[int], data: st.DataObject) -> None:
    """Every entry of the quota goes to some shard, and none gets more than it has elements."""
    k = data.draw(st.integers(0, sum(sizes)))
    shares = deal(k, sizes, data.draw(st.integers(0, 20)))
    assert sum(shares) == k
    assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))
    assert all(
        abs(s * sum(sizes) - k * n) <= len(sizes) * sum(sizes) for s, n in zip(shares, sizes, strict=True)
    )


class Bucket(NamedTuple):
    """A bucket as the packer sees it."""

    layout: BucketLayout
    shards: int
    scope: str
    smallest: int

    def part(self, compressor: BaseCompressor) -> Partition:
        return partition(
            self.layout, self.shards, compressor.quota, scope=self.scope, min_numel=self._smallest(compressor)
        )

    def packer(self, compressor: BaseCompressor) -> Packer:
        small = small_positions(self.layout, self._smallest(compressor), CPU)
        return Packer(compressor, self.part(compressor), small)

    def _smallest(self, compressor: BaseCompressor) -> int:
        return self.smallest if compressor.small_tensors_apart else 0


@st.composite
def buckets(draw: st.DrawFn) -> Bucket:
    size = st.one_of(st.integers(1, 20), st.integers(1, 400))
    sizes = draw(st.lists(size, min_size=1, max_size=6))
    layout = BucketLayout(tuple(f"p{i}" for i in range(len(sizes))), tuple(torch.Size([n]) for n in sizes))
    return Bucket(
        layout,
        draw(st.integers(1, 4)),
        draw(st.sampled_from(["bucket", "tensor"])),
        draw(st.sampled_from([0, 10, 65, 256])),
    )


@laws
@given(bucket=buckets(), ratio=ratios, factor=st.sampled_from([0.3, 0.8, 1.0, 1.5, 4.0]))
def test_quotas_fit(bucket: Bucket, ratio: float, factor: float) -> None:
    """Ranges are disjoint, increasing, inside the shard, and large enough for their k."""
    part = bucket.part(get_compressor(ratio))
    for made in (part, resized(part, factor)):
        for shard in range(made.shards):
            end = 0
            for start, stop, k in made.quotas[shard]:
                assert end <= start and stop <= made.local_numel(shard)
                assert 0 < k <= stop - start
                end = stop
            own = made.shard(shard)
            assert (own.numel, own.k(0)) == (made.local_numel(shard), made.k(shard))


# --- packer --------------------------------------------------------------------------------


class NoClock:
    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def traffic(self, sent: int, received: int) -> None: ...


def packed(packer: Packer, rows: Tensor, stamp: Stamp) -> Tensor:
    """The sum of what ``rows`` decode to, as a receiver forms it; checks both ways of adding."""
    out = torch.full((packer.part.numel,), torch.nan)
    shards = range(packer.part.shards)
    messages = [packer.unpack(rows[s], s, stamp._replace(shard=s)) for s in shards]
    assert all(message.finite for message in messages)
    packer.sum_(out, list(enumerate(messages)), 1.0)
    for shard, whole in enumerate(packer.part.split(out)):
        local = torch.full_like(whole, torch.nan)
        packer.sum_shard_(local, shard, [messages[shard]], 1.0)
        assert torch.equal(local, whole)
    return out


@every_message
@settings(laws, max_examples=30)
@given(
    data=st.data(),
    bucket=buckets(),
    ratio=ratios,
    values=st.sampled_from(SPARSE_VALUES),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_packer_conserves(
    row: Row, data: st.DataObject, bucket: Bucket, ratio: float, values: str, dtype: torch.dtype
) -> None:
    """The law, of real messages: several shards, small tensors, each scope, gradients of any type."""
    options = {"values": values} if row in SPARSE else {}
    compressor = row.make(ratio, **options)
    bucket = bucket._replace(scope=bucket.scope if bucket.scope in compressor.scopes else "bucket")
    n = bucket.layout.numel
    gradient = data.draw(tensors(n)).clamp(-6e4, 6e4).to(dtype)
    memory = Slot(data.draw(tensors(n)))
    before, wanted = memory.old.clone(), gradient.clone()
    stamp = Stamp(seed=2, step=data.draw(st.integers(0, 5)), sender=1)
    packer = bucket.packer(compressor)
    rows = packer.pack_(gradient.clone(), memory, stamp, NoClock())
    assert rows.shape == (bucket.shards, packer.row_bytes)
    assert torch.equal(memory.old, before)
    assert_law(before, wanted, packed(packer, rows, stamp), memory.new)


@laws
@given(data=st.data(), bucket=buckets(), ratio=ratios)
def test_packer_conserves_integers_exactly(data: st.DataObject, bucket: Bucket, ratio: float) -> None:
    """Top-K with fp32 values moves integers about and changes none; small tensors go whole."""
    n = bucket.layout.numel
    gradient, owed = (data.draw(tensors(n)).clamp(-1000, 1000).round() for _ in range(2))
    memory, stamp = Slot(owed.clone()), Stamp(sender=1)
    packer = bucket.packer(get_compressor(ratio, values="fp32"))
    sent = packed(packer, packer.pack_(gradient.clone(), memory, stamp, NoClock()), stamp)
    assert torch.equal(sent + memory.new, owed + gradient)
    assert not memory.new[small_positions(bucket.layout, bucket.smallest, CPU)].any()
    without = packer.pack_((owed + gradient).clone(), None, stamp, NoClock())
    assert torch.equal(packed(packer, without, stamp), sent)


@laws
@given(data=st.data(), bucket=buckets())
def test_ratio_one_sends_everything(data: st.DataObject, bucket: Bucket) -> None:
    """Ratio 1.0 with fp32 values is plain DDP: nothing may stay behind, however the bucket is dealt."""
    gradient = data.draw(tensors(bucket.layout.numel))
    memory, stamp = Slot(torch.zeros_like(gradient)), Stamp(sender=1)
    packer = bucket.packer(get_compressor(1.0, values="fp32"))
    sent = packed(packer, packer.pack_(gradient.clone(), memory, stamp, NoClock()), stamp)
    assert torch.equal(sent, gradient)
    assert not memory.new.any()


@every_message
@settings(laws, max_examples=10)
@given(data=st.data(), bucket=buckets(), poison=st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_packer_says_not_finite(row: Row, data: st.DataObject, bucket: Bucket, poison: float) -> None:
    """One bad element anywhere, in a small tensor too, calls off all shards and touches no residual."""
    compressor = row.make()
    bucket = bucket._replace(scope="bucket")
    n = bucket.layout.numel
    gradient = torch.ones(n)
    gradient[data.draw(st.integers(0, n - 1))] = poison
    memory, stamp = Slot(torch.ones(n)), Stamp(sender=1)
    packer = bucket.packer(compressor)
    rows = packer.pack_(gradient, memory, stamp, NoClock())
    for shard in range(bucket.shards):
        assert not packer.unpack(rows[shard], shard, stamp._replace(shard=shard)).finite
    assert torch.equal(memory.old, torch.ones(n))
