"""One conformance suite for every codec, the size limits, accuracy, and hostile bytes."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressed_ddp.kernels.reference import checksum, ef_low_bits
from compressed_ddp.types import MAX_NUMEL, Payload, Stamp, WireError
from compressed_ddp.wire import HEADER_BYTES, INDEX_FORMATS, Decoded, Encoded, MessageCodec, value_format
from compressed_ddp.wire.indices import seeded_indices
from compressed_ddp.wire.values import _FORMATS

CPU = torch.device("cpu")
STAMP = Stamp(seed=5, step=70000, bucket=3, shard=1, sender=2)
SIZES = (0, 1, 63, 64, 65, 511, 512, 513, 1000)
VALUES = sorted(_FORMATS)
SPEC = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()
every_codec = pytest.mark.parametrize(("indices", "values"), list(itertools.product(INDEX_FORMATS, VALUES)))


def rooms(indices: str, numel: int) -> list[int]:
    """How many entries to try for a bucket of ``numel``."""
    if indices == "all":
        return [numel]
    return sorted({0, min(1, numel), numel // 100, numel // 3, max(numel - 1, 0), numel})


def positions(indices: str, numel: int, count: int) -> Tensor:
    if indices == "seeded":
        return seeded_indices(numel, count, STAMP, CPU)
    return torch.randperm(numel)[:count].sort().values


def payload(indices: str, numel: int, count: int) -> Payload:
    return Payload(torch.randn(count), positions(indices, numel, count), torch.Size([numel]))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, and zeros have equal signs."""
    return a.dtype == b.dtype == torch.float32 and torch.equal(a.view(torch.int32), b.view(torch.int32))


# --- conformance ---------------------------------------------------------------------------


@every_codec
def test_round_trip(indices: str, values: str) -> None:
    """A receiver must see exactly what the sender subtracts from its residual, in the promised size."""
    codec = MessageCodec.named(indices, values)
    for numel in SIZES:
        for k, small in itertools.product(rooms(indices, numel), (0, 67)):
            given, dense = payload(indices, numel, k), torch.randn(small)
            before = given.values.clone()
            message, seen, seen_dense = codec.encode(given, k=k, dense=dense, stamp=STAMP)
            assert message.dtype == torch.uint8
            assert message.numel() == codec.nbytes(numel, k, small) and message.numel() % 8 == 0
            assert torch.equal(given.values, before)
            got = codec.decode(message, numel=numel, k=k, dense=small, stamp=STAMP)
            assert got.finite
            assert torch.equal(got.payload.indices, given.indices)
            assert got.payload.shape == given.shape
            assert same_bits(got.payload.values, seen) and same_bits(got.dense, seen_dense)


@pytest.mark.parametrize("values", VALUES)
def test_fewer_entries_than_room(values: str) -> None:
    """Threshold compressors send what passes: the size must not tell, nor the values move."""
    codec = MessageCodec.named("elias_fano", values)
    for numel, k in ((65, 64), (1000, 700), (1000, 10), (513, 513)):
        for count in {0, 1, k // 2, k - 1, k}:
            given, dense = payload("elias_fano", numel, count), torch.randn(5)
            message, seen, seen_dense = codec.encode(given, k=k, dense=dense, stamp=STAMP)
            assert message.numel() == codec.nbytes(numel, k, 5)
            got = codec.decode(message, numel=numel, k=k, dense=5, stamp=STAMP)
            assert torch.equal(got.payload.indices, given.indices)
            assert same_bits(got.payload.values, seen) and same_bits(got.dense, seen_dense)
            full = codec.encode(given, stamp=STAMP)
            assert same_bits(full.values, seen)


ERROR = {"fp32": 0.0, "fp16": 2**-11, "bf16": 2**-8}
LEVELS = {name: fmt.levels for name, fmt in _FORMATS.items() if hasattr(fmt, "levels")}


@pytest.mark.parametrize("values", VALUES)
def test_rounding_error_is_bounded(values: str) -> None:
    """Small messages are worth nothing if the values in them are wrong."""
    x = torch.randn(3000)
    seen = encode_all(values, x).values
    error = (x - seen).abs()
    if values in ERROR:
        assert bool((error <= ERROR[values] * x.abs() + 2**-25).all())
    elif values in LEVELS:
        norm = torch.inf if values == "ternary" else 2
        for block, lost in zip(x.split(512), error.split(512), strict=True):
            assert lost.max() <= block.norm(norm) / LEVELS[values] * (1 + 1e-5)
    else:
        assert error.norm() < x.norm()
    agree = (torch.sign(seen) == torch.sign(x)) | (seen == 0)
    assert bool(agree.all())


@every_codec
def test_not_finite_message(indices: str, values: str) -> None:
    """It has the size of any other and says nothing but that the step is off."""
    codec = MessageCodec.named(indices, values)
    k = 40 if indices == "all" else 7
    message = torch.zeros(codec.nbytes(40, k, 3), dtype=torch.uint8)
    codec.encode_not_finite(message, 40, 3, STAMP)
    assert not message[HEADER_BYTES:].any()
    got = codec.decode(message, numel=40, k=k, dense=3, stamp=STAMP)
    assert not got.finite
    assert got.payload.values.numel() == got.payload.indices.numel() == got.dense.numel() == 0


def test_encoding_is_deterministic() -> None:
    """Random rounding depends on the stamp alone, so a resumed run sends the same bytes."""
    codec, x = MessageCodec.named("all", "qsgd7"), payload("all", 600, 600)
    first = codec.encode(x, stamp=STAMP).message
    torch.rand(10)
    assert torch.equal(codec.encode(x, stamp=STAMP).message, first)
    other = codec.encode(x, stamp=STAMP._replace(sender=3)).message
    assert not torch.equal(other[HEADER_BYTES:], first[HEADER_BYTES:])


def test_unknown_value_format() -> None:
    with pytest.raises(ValueError, match="did you mean 'int8'"):
        value_format("int9")


def test_every_code_is_its_own() -> None:
    """Two formats with one code would read each other's messages."""
    assert len({fmt.code for fmt in _FORMATS.values()}) == len(_FORMATS)
    assert len({fmt.code for fmt in INDEX_FORMATS.values()}) == len(INDEX_FORMATS)
    for name, fmt in _FORMATS.items():
        assert fmt.code < 256 and name in SPEC


# --- sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "limit"), [(0.01, 2.15), (0.001, 2.6)])
def test_bytes_an_entry(ratio: float, limit: float) -> None:
    """The promise of the README: header, indices, scales and values of a million elements."""
    numel = 1_000_000
    k = round(numel * ratio)
    codec = MessageCodec.named("elias_fano", "int8")
    x = torch.randn(numel)
    indices = x.abs().topk(k).indices.sort().values
    message = codec.encode(Payload(x[indices], indices, x.shape), stamp=STAMP).message
    assert message.numel() == codec.nbytes(numel, k)
    assert message.numel() / k <= limit
    assert f"{message.numel():,}" in SPEC


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "int4"])
def test_sizes_in_the_specification(values: str) -> None:
    """The worked examples of docs/wire-format.md are the library's own numbers."""
    assert f"{MessageCodec.named('elias_fano', values).nbytes(1_000_000, 10_000):,}" in SPEC
    assert f"{MessageCodec.named('all', 'sign').nbytes(10**6, 10**6):,}" in SPEC


# --- accuracy and edges --------------------------------------------------------------------


def encode_all(values: str, x: Tensor) -> Encoded:
    return MessageCodec.named("all", values).encode(Payload(x, torch.arange(x.numel()), x.shape), stamp=STAMP)


@pytest.mark.parametrize(("values", "limit"), [("int8", 0.003), ("int4", 0.04)])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_logarithmic_accuracy(values: str, limit: float, scale: float) -> None:
    """On what Top-K really sends: the largest hundredth of a gaussian."""
    x = torch.randn(1_000_000) * scale
    x = x[x.abs().topk(10_000).indices.sort().values]
    seen = encode_all(values, x).values
    assert float((x - seen).norm() / x.norm()) < limit


LARGEST = torch.finfo(torch.float32).max
TINY = 2.0**-149
EDGES = {
    "zeros": [0.0, -0.0, 0.0],
    "zeros and one": [0.0, 1.0, -0.0],
    "denormals": [TINY, -TINY, 3 * TINY, 2.0**-127, -(2.0**-130), 0.0],
    "denormals and one": [TINY, 2.0**-127, 1.0],
    "smallest normal": [2.0**-126, -(2.0**-126)],
    "largest": [LARGEST, -LARGEST, LARGEST],
    "largest and smallest": [LARGEST, TINY, -TINY, 1.0],
    "ten of the largest": [LARGEST] * 10,
    "all equal": [-0.1] * 130,
    "one outlier": [0.001] * 70 + [1e6] + [-0.001] * 70,
    "powers of two": [2.0**e for e in range(-140, 128, 3)],
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("edge", EDGES, ids=lambda name: name.replace(" ", "-"))
def test_edge_values(values: str, edge: str) -> None:
    """Extreme but finite input gives a finite message that takes nothing of the wrong sign."""
    x = torch.tensor(EDGES[edge], dtype=torch.float32)
    message, seen, _ = encode_all(values, x)
    assert bool(torch.isfinite(seen).all())
    codec = MessageCodec.named("all", values)
    decoded = codec.decode(message, numel=x.numel(), k=x.numel(), stamp=STAMP)
    assert same_bits(decoded.payload.values, seen)
    if values in ("sign", "onebit"):
        x = x + 0.0
        x[x == 0] = 1.0  # a zero is sent as a plus
    wrong = (seen * torch.sign(x)) < 0
    assert not bool(wrong.any())
    if not x.any():
        assert not seen.any()


@pytest.mark.parametrize("edge", EDGES, ids=lambda name: name.replace(" ", "-"))
def test_fp32_keeps_every_bit(edge: str) -> None:
    x = torch.tensor(EDGES[edge], dtype=torch.float32)
    assert same_bits(encode_all("fp32", x).values, x)


@pytest.mark.parametrize("values", ["int8", "int4"])
def test_logarithmic_edges(values: str) -> None:
    """Equal values come back nearly equal; an outlier must not cost its neighbours in other blocks."""
    equal = torch.full((64,), -0.1)
    torch.testing.assert_close(encode_all(values, equal).values, equal, rtol=1e-3, atol=0)
    largest = torch.tensor([LARGEST, -LARGEST])
    torch.testing.assert_close(encode_all(values, largest).values, largest, rtol=0.005, atol=0)
    blocks = torch.full((192,), 0.001)
    blocks[100] = 1e6
    seen = encode_all(values, blocks).values
    torch.testing.assert_close(seen[:64], blocks[:64], rtol=1e-3, atol=0)
    torch.testing.assert_close(seen[128:], blocks[128:], rtol=1e-3, atol=0)
    assert float(seen[100]) == pytest.approx(1e6, rel=0.01)
    assert not seen[64:100].any()


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_rounding_never_adds_error(values: str) -> None:
    """Value by value, |x - seen| <= |x|, so that rounding keeps any contraction a contraction."""
    bits = torch.randint(0x00800000 + (16 << 23), 0x7F7FFFFF, (6400,), dtype=torch.int32)
    x = bits.view(torch.float32) * torch.where(torch.rand(6400) < 0.5, -1.0, 1.0)
    seen = encode_all(values, x).values
    assert bool(((x.double() - seen.double()).abs() <= x.double().abs()).all())


@pytest.mark.parametrize(("values", "limit"), [("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)])
def test_saturation(values: str, limit: float) -> None:
    """A value beyond the type's range must not become an infinity."""
    x = torch.tensor([limit, -limit, LARGEST, -LARGEST, limit * (1 + 2**-20) if values == "fp16" else limit])
    assert torch.equal(encode_all(values, x).values, torch.tensor([limit, -limit, limit, -limit, limit]))


def test_largest_bucket() -> None:
    """Indices up to 2^31 - 2 fit."""
    indices = torch.tensor([0, 1, MAX_NUMEL // 2, MAX_NUMEL - 2, MAX_NUMEL - 1])
    codec = MessageCodec.named("elias_fano", "fp32")
    message = codec.encode(Payload(torch.ones(5), indices, torch.Size([MAX_NUMEL])), stamp=STAMP).message
    got = codec.decode(message, numel=MAX_NUMEL, k=5, stamp=STAMP)
    assert torch.equal(got.payload.indices, indices)


# --- hostile bytes -------------------------------------------------------------------------


@dataclass
class Sample:
    """A good message and what its receiver expects; ``broken`` copies it to be damaged."""

    codec: MessageCodec
    message: Tensor
    numel: int
    k: int
    dense: int

    def decode(self, message: Tensor, stamp: Stamp = STAMP) -> Decoded:
        return self.codec.decode(message, numel=self.numel, k=self.k, dense=self.dense, stamp=stamp)

    def rejects(self, message: Tensor, why: str | None = None, stamp: Stamp = STAMP) -> None:
        with pytest.raises(WireError, match=why):
            self.decode(message, stamp)

    def broken(self, at: int, data: bytes, *, sealed: bool = True) -> Tensor:
        """The message with ``data`` written at byte ``at``; ``sealed``: with a right checksum."""
        message = self.message.clone()
        message[at : at + len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        return seal(message) if sealed else message

    @property
    def values_at(self) -> int:
        return HEADER_BYTES + self.codec.indices.nbytes(self.numel, self.k)

    @property
    def dense_at(self) -> int:
        return self.values_at + self.codec.values.nbytes(self.k)


def seal(message: Tensor) -> Tensor:
    """Write the right checksum: what an attacker, or a bug in a sender, would do."""
    message[28:32] = 0
    message[28:32] = torch.tensor(list(struct.pack("<I", checksum(message))), dtype=torch.uint8)
    return message


def sample(
    indices: str = "elias_fano", values: str = "int8", *, numel: int = 40, count: int = 6, k: int = 7
) -> Sample:
    if indices != "elias_fano":
        k = count = numel if indices == "all" else k
    codec = MessageCodec.named(indices, values)
    message = codec.encode(payload(indices, numel, count), k=k, dense=torch.randn(3), stamp=STAMP).message
    return Sample(codec, message, numel, k, 3)


def flips(message: Tensor) -> Iterator[Tensor]:
    for bit in range(8 * message.numel()):
        broken = message.clone()
        broken[bit // 8] ^= 1 << bit % 8
        yield broken


def is_sound(got: Decoded, numel: int, k: int, dense: int) -> bool:
    """Whatever was accepted can be added into a bucket of ``numel`` without harm."""
    values, indices, shape = got.payload
    if not got.finite:
        return values.numel() == indices.numel() == got.dense.numel() == 0
    inside = indices.numel() == 0 or (int(indices[0]) >= 0 and int(indices[-1]) < numel)
    return (
        inside
        and shape == torch.Size([numel])
        and indices.dtype == torch.int64
        and values.numel() == indices.numel() <= k
        and got.dense.numel() == dense
        and bool((indices[1:] > indices[:-1]).all())
        and bool(torch.isfinite(values).all() and torch.isfinite(got.dense).all())
    )


def test_truncation_at_every_length() -> None:
    """A message cut short, or with something after it, is refused before it is read."""
    good = sample()
    good.decode(good.message)
    for length in range(good.message.numel()):
        good.rejects(good.message[:length], "bytes, expected")
    for extra in (1, 4, 8):
        good.rejects(torch.cat([good.message, torch.zeros(extra, dtype=torch.uint8)]), "bytes, expected")


@every_codec
def test_every_bit_flip_is_found(indices: str, values: str) -> None:
    """One damaged bit anywhere, padding included, must not reach the gradient."""
    good = sample(indices, values, numel=20, k=4, count=4)
    for broken in flips(good.message):
        good.rejects(broken)


@every_codec
def test_every_bit_flip_with_a_right_checksum(indices: str, values: str) -> None:
    """A sender's bug passes the checksum: still no other exception, and nothing unsound."""
    good = sample(indices, values, numel=20, k=4, count=3)
    for broken in flips(good.message):
        try:
            got = good.decode(seal(broken))
        except WireError:
            continue
        assert is_sound(got, good.numel, good.k, good.dense)


HEADER = {
    "magic": (0, b"CE", "not a compressed-ddp message"),
    "version": (2, b"\x02", "wire version 2"),
    "index format": (3, b"\x02", "indices is 2, expected 1"),
    "unknown index format": (3, b"\xff", "indices is 255"),
    "value format": (4, b"\x04", "values is 4, expected 3"),
    "unknown value format": (4, b"\x63", "values is 99"),
    "unknown flag": (5, b"\x80", "unknown flags 0x80"),
    "owner flag": (5, b"\x02", "flags"),
    "shard": (6, struct.pack("<H", 9), "shard is 9, expected"),
    "step": (8, struct.pack("<I", STAMP.step + 1), "step is 70001, expected 70000"),
    "bucket": (12, struct.pack("<H", 4), "bucket is 4, expected 3"),
    "sender": (14, struct.pack("<H", 0), "sender is 0, expected 2"),
    "numel": (16, struct.pack("<I", 41), "numel is 41, expected 40"),
    "numel beyond the limit": (16, b"\xff\xff\xff\xff", "numel is 4294967295"),
    "count above room": (20, struct.pack("<I", 8), "8 entries, room for 7"),
    "count huge": (20, b"\xff\xff\xff\xff", "room for 7"),
    "count too small": (20, struct.pack("<I", 5), "holds 6 entries, its header says 5"),
    "count too large": (20, struct.pack("<I", 7), "holds 6 entries, its header says 7"),
    "count zero": (20, struct.pack("<I", 0), "holds 6 entries, its header says 0"),
    "dense": (24, struct.pack("<I", 2), "dense is 2, expected 3"),
}


@pytest.mark.parametrize("what", HEADER, ids=lambda name: name.replace(" ", "-"))
def test_header_that_lies(what: str) -> None:
    """A foreign message, or one out of turn, is named for what it is."""
    good = sample()
    at, data, why = HEADER[what]
    good.rejects(good.broken(at, data), why)
    good.rejects(good.broken(at, data, sealed=False))


def test_wrong_checksum() -> None:
    good = sample()
    good.rejects(good.broken(28, b"\0\0\0\0", sealed=False), "checksum")


@pytest.mark.parametrize(
    "stamp",
    [
        STAMP._replace(step=1),
        STAMP._replace(step=STAMP.step + 1),
        STAMP._replace(bucket=0),
        STAMP._replace(sender=1),
        STAMP._replace(phase=1),
    ],
)
def test_message_out_of_turn(stamp: Stamp) -> None:
    """A good message that belongs elsewhere must not be added here."""
    good = sample()
    good.rejects(good.message, "rank", stamp)


def test_expectation_that_differs() -> None:
    """A receiver with another idea of bucket, room or small values refuses, whatever the size."""
    good = sample()
    for numel, k, dense in itertools.product((39, 40, 41, 80), (6, 7, 8, 20), (0, 2, 3, 4)):
        if (numel, dense) != (good.numel, good.dense) or k < 6:
            with pytest.raises(WireError):
                good.codec.decode(good.message, numel=numel, k=k, dense=dense, stamp=STAMP)


@pytest.mark.parametrize(("indices", "values"), [("all", "int8"), ("seeded", "int8"), ("elias_fano", "fp32")])
def test_other_formats_are_foreign(indices: str, values: str) -> None:
    """Workers with another configuration."""
    good = sample()
    other = MessageCodec.named(indices, values)
    with pytest.raises(WireError):
        other.decode(good.message, numel=good.numel, k=good.k, dense=good.dense, stamp=STAMP)


@pytest.mark.parametrize("indices", ["all", "seeded"])
def test_implied_indices_need_every_value(indices: str) -> None:
    good = sample(indices)
    good.rejects(good.broken(20, struct.pack("<I", good.k - 1)), "carries")


# Indices of a sealed message: 1000 elements, four entries, so 7 low bits (an index's lower 7
# bits) and a bitmap of 4 + 7 + 1 bits behind 28 bits of low parts.
NUMEL, LOW, BITMAP = 1000, 7, HEADER_BYTES + 4


def four(indices: list[int]) -> Sample:
    codec = MessageCodec.named("elias_fano", "fp32")
    given = Payload(torch.ones(4), torch.tensor(indices), torch.Size([NUMEL]))
    return Sample(codec, codec.encode(given, stamp=STAMP).message, NUMEL, 4, 0)


def bits(good: Sample, start: int, stop: int) -> int:
    return int.from_bytes(bytes(good.message[start:stop].tolist()), "little")


def test_the_four_lie_where_these_tests_think() -> None:
    good = four([3, 9, 300, 999])
    assert ef_low_bits(NUMEL, 4) == LOW
    assert bits(good, HEADER_BYTES, BITMAP) == 3 | 9 << 7 | (300 % 128) << 14 | (999 % 128) << 21
    assert bits(good, BITMAP, BITMAP + 2) == 1 << 0 | 1 << 1 | 1 << 2 + 2 | 1 << 7 + 3


@pytest.mark.parametrize(("first", "second"), [(9, 9), (9, 3), (127, 0)])
def test_indices_that_do_not_increase(first: int, second: int) -> None:
    """Twice the same index, or one out of order, would add an entry in a wrong place."""
    good = four([3, 9, 300, 999])
    lows = first | second << 7 | (300 % 128) << 14 | (999 % 128) << 21
    good.rejects(good.broken(HEADER_BYTES, struct.pack("<I", lows)), "strictly increasing")


@pytest.mark.parametrize("low", [1000 % 128, 127])
def test_index_outside_the_bucket(low: int) -> None:
    """The first index past the end, in the last element's own high part."""
    good = four([3, 9, 300, 999])
    lows = 3 | 9 << 7 | (300 % 128) << 14 | low << 21
    good.rejects(good.broken(HEADER_BYTES, struct.pack("<I", lows)), "outside a bucket of 1000")


def test_high_part_outside_the_bucket() -> None:
    """A one in the bitmap's last bits is past the end whatever its low bits say."""
    good = four([3, 9, 300, 999])
    for last in range(11, 16):
        broken = good.broken(BITMAP, struct.pack("<H", 1 << 0 | 1 << 1 | 1 << 4 | 1 << last))
        good.rejects(broken, "outside a bucket of 1000")


@pytest.mark.parametrize("bitmap", [0, 0b11, 0b10000010010, 0b10000011111, 0xFFFF])
def test_wrong_number_of_ones(bitmap: int) -> None:
    good = four([3, 9, 300, 999])
    good.rejects(good.broken(BITMAP, struct.pack("<H", bitmap)), "its header says 4")


def test_every_two_flips_of_the_bitmap() -> None:
    """A one that moved keeps their number right: the index must still be sound."""
    good = four([3, 9, 300, 999])
    for a, b in itertools.combinations(range(16), 2):
        flipped = bits(good, BITMAP, BITMAP + 2) ^ (1 << a | 1 << b)
        try:
            got = good.decode(good.broken(BITMAP, struct.pack("<H", flipped)))
        except WireError:
            continue
        assert is_sound(got, NUMEL, 4, 0)


# --- hostile values ------------------------------------------------------------------------

NOT_NUMBERS = {
    "fp32": [struct.pack("<f", x) for x in (torch.nan, torch.inf, -torch.inf)],
    "fp16": [struct.pack("<e", x) for x in (torch.nan, torch.inf, -torch.inf)],
    "bf16": [b"\xc0\x7f", b"\x80\x7f", b"\x80\xff"],
}


@pytest.mark.parametrize("values", NOT_NUMBERS)
@pytest.mark.parametrize("indices", INDEX_FORMATS)
def test_values_that_are_not_numbers(indices: str, values: str) -> None:
    """A NaN that gets in stays in every worker's residual for ever."""
    good = sample(indices, values)
    for data in NOT_NUMBERS[values]:
        good.rejects(good.broken(good.values_at, data), "NaN or an infinity")
        good.rejects(good.broken(good.dense_at, data), "NaN or an infinity")


@pytest.mark.parametrize("values", ["sign", "onebit", "ternary", "qsgd1", "qsgd7", "qsgd127"])
@pytest.mark.parametrize("scale", [torch.nan, torch.inf, -torch.inf, -1.0])
def test_scales_that_are_not_magnitudes(values: str, scale: float) -> None:
    """One bad scale would spoil 512 values."""
    good = sample("all", values)
    data = struct.pack("<f", scale)
    good.rejects(good.broken(good.values_at, data), "scale")
    good.rejects(good.broken(good.dense_at, data), "scale")
    if values == "onebit":
        good.rejects(good.broken(good.values_at + 4, data), "scale")


@pytest.mark.parametrize("values", ["int8", "int4"])
@pytest.mark.parametrize(
    ("low16", "high16"), [(2, 1), (0, 0x7F80), (0x7F80, 0x7F80), (0, 0xFFFF), (0x8000, 0)]
)
def test_scales_that_are_not_keys(values: str, low16: int, high16: int) -> None:
    """Keys above the largest float's would decode to NaN or infinity."""
    good = sample("elias_fano", values)
    data = struct.pack("<2H", low16, high16)
    good.rejects(good.broken(good.values_at, data), "smallest magnitude")
    good.rejects(good.broken(good.dense_at, data), "smallest magnitude")


@pytest.mark.parametrize("values", ["int8", "int4"])
def test_every_code_under_the_largest_scale_is_finite(values: str) -> None:
    """The highest scale that passes the check still decodes to floats."""
    good = sample("elias_fano", values)
    blocks_end = good.values_at + 4
    for low16, code in itertools.product((0, 0x7F7E, 0x7F7F), range(256)):
        broken = good.broken(good.values_at, struct.pack("<2H", low16, 0x7F7F))
        broken[blocks_end : good.dense_at] = code
        assert is_sound(good.decode(seal(broken)), good.numel, good.k, good.dense)


def test_encoding_what_is_not_finite() -> None:
    """The caller's mistake is an error at the sender, not a message."""
    with pytest.raises(WireError):
        encode_all("fp32", torch.tensor([1.0, torch.nan]))
