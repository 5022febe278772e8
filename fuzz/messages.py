"""A message from anyone, read by the library and by a decoder that was written from the specification alone.

``one_message(data)`` is the body of the fuzz target python_messages.py. The first bytes of ``data`` choose
who receives it and how the rest is repaired: a message has a checksum, and a fuzzer that never gets past it
tests little. What must hold:

- both kernels, C++ and torch, accept the same messages, refuse the others with the same words, read the same;
- what is accepted is what docs/wire-format.md allows, no more and no less, and says what is specified there;
- a sum of what is refused was not begun: not one element of the result has changed.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from compressed_ddp import get_compressor, kernels
from compressed_ddp.communication.packer import Packer
from compressed_ddp.layout import BucketLayout, Partition, Quota, partition, small_positions
from compressed_ddp.metrics import Ledger
from compressed_ddp.types import Stamp, WireError
from compressed_ddp.wire import MessageCodec, Opened

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
sys.path.insert(0, str(GOLDEN))
import make  # noqa: E402  (what golden messages are made of)
import spec_decoder as spec  # noqa: E402

SIZE, HEADER, CHECKSUM, COUNT = 1, 2, 4, 8
"""Repairs: cut or filled up to the right size; the expected header, but for flags and entries; a right
checksum; as many entries as the bitmap has ones."""
SCALE = 1.0 / 3.0
LONG = 100_000
"""Buckets above this are read, not summed."""
UNTOUCHED = 7.0


class Case(NamedTuple):
    """What a receiver expects, and a good message."""

    name: str
    codec: MessageCodec
    part: Partition
    shard: int
    room: int
    small: Tensor
    stamp: Stamp
    message: bytes
    packer: Packer | None = None

    @property
    def numel(self) -> int:
        return self.part.local_numel(self.shard)

    @property
    def header(self) -> tuple[object, ...]:
        """Every field but the last three and the flags, as they travel."""
        at = self.stamp
        codes = self.codec.indices.code, self.codec.values.code
        return (
            *(b"CD", 1, *codes),
            *(at.shard % 2**16, at.step % 2**32, at.bucket % 2**16, at.sender % 2**16, self.numel),
            self.small.numel(),
        )

    @property
    def cuts(self) -> tuple[int, int, int, int]:
        """Where the low bits, the bitmap, the values and the small values end, by the specification."""
        code = self.codec.values.code
        low, high = spec.elias_fano_bytes(self.numel, self.room) if self.codec.indices.code == 1 else (0, 0)
        values = 32 + low + high + spec.value_bytes(code, self.room)
        return 32 + low, 32 + low + high, values, values + spec.value_bytes(code, self.small.numel())


def _golden_cases() -> Iterator[Case]:
    for path in sorted(GOLDEN.glob("*.json")):
        golden = make.load(path)
        quotas = ((Quota(0, golden.numel, golden.room),),) if golden.numel else ((),)
        yield Case(
            *(path.stem, MessageCodec.named(golden.indices, golden.values)),
            *(Partition(golden.numel, 1, quotas), 0, golden.room),
            torch.arange(len(golden.input_dense)),
            Stamp(**golden.stamp),
            golden.data,
        )


def _packed_cases() -> Iterator[Case]:
    """As workers make them: three shards, small tensors that travel whole, each of the formats."""
    layout = BucketLayout(("w", "b", "v"), (torch.Size([30, 8]), torch.Size([12]), torch.Size([170])))
    gradient = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    for values in ("fp32", "fp16", "bf16", "int8", "int4"):
        compressor = get_compressor(0.1, values=values)
        part = partition(layout, 3, compressor.quota, min_numel=64)
        packer = Packer(compressor, part, small_positions(layout, 64, torch.device("cpu")))
        stamp = Stamp(seed=3, step=70_000, bucket=1, sender=2)
        rows = packer.pack_(gradient.clone(), None, stamp, Ledger("", "", False, False))
        for shard in range(3):
            at = stamp._replace(shard=shard)
            size = compressor.codec.nbytes(
                part.local_numel(shard), part.k(shard), packer.small[shard].numel()
            )
            yield Case(
                *(f"packed_{values}_{shard}", compressor.codec, part, shard, part.k(shard)),
                *(packer.small[shard], at, bytes(rows[shard, :size].tolist()), packer),
            )


@functools.cache
def cases() -> list[Case]:
    return [*_golden_cases(), *_packed_cases()]


def seeds() -> list[bytes]:
    """Good messages, as they are and to be repaired after any change."""
    return [
        bytes([at, repairs]) + case.message
        for at, case in enumerate(cases())
        for repairs in (0, CHECKSUM, SIZE | HEADER | CHECKSUM, SIZE | HEADER | CHECKSUM | COUNT)
    ]


# --- the input -----------------------------------------------------------------------------


def repaired(case: Case, data: bytes, repairs: int) -> bytes:
    message = bytearray(data)
    low_end, high_end, _, end = case.cuts
    size = -(-end // 8) * 8
    if repairs & SIZE:
        message = message[:size].ljust(size, b"\0")
    if len(message) < 32:
        return bytes(message)
    if repairs & HEADER:
        magic, version, index, value, shard, step, bucket, sender, numel, dense = case.header
        flags = message[5] & 1 | (2 if case.stamp.phase else 0)
        count = struct.unpack_from("<I", message, 20)[0]
        struct.pack_into(
            "<2s4BHI2H", message, 0, magic, version, index, value, flags, shard, step, bucket, sender
        )
        struct.pack_into("<3I", message, 16, numel, count, dense)
    if repairs & COUNT:
        ones = int.from_bytes(message[low_end:high_end], "little").bit_count()
        struct.pack_into("<I", message, 20, ones if case.codec.indices.code == 1 else case.room)
    if repairs & CHECKSUM and len(message) % 4 == 0:
        struct.pack_into("<I", message, 28, spec.checksum(bytes(message)))
    return bytes(message)


# --- the specification's verdict -----------------------------------------------------------


class Plain(NamedTuple):
    """What a message says: entries and small values; nothing of either where it is not finite."""

    finite: bool
    indices: list[int]
    values: list[float]
    dense: list[float]


def plain(case: Case, data: bytes) -> Plain | None:
    """What the specification makes of ``data``; None if it must be refused."""
    _, high_end, dense_at, end = case.cuts
    if len(data) != -(-end // 8) * 8:
        return None
    *first, flags, shard, step, bucket, sender, numel, count, dense, check = struct.unpack_from(
        "<2s4BHI2H4I", data
    )
    if (*first, shard, step, bucket, sender, numel, dense) != case.header:
        return None
    if flags & ~1 != (2 if case.stamp.phase else 0) or count > case.room or check != spec.checksum(data):
        return None
    if flags & 1:
        return Plain(False, [], [], []) if count == 0 else None
    indices = _indices(case, data[32:high_end], count)
    code = case.codec.values.code
    parts = (data[high_end:dense_at], count), (data[dense_at:end], dense)
    if indices is None or not all(_sound(part, code, m) for part, m in parts):
        return None
    values, small = (spec.read_values(part, code, m) for part, m in parts)
    return Plain(True, indices, values, small)


def _indices(case: Case, part: bytes, count: int) -> list[int] | None:
    numel, room, at = case.numel, case.room, case.stamp
    if case.codec.indices.code == 0:
        return list(range(numel)) if count == numel else None
    if case.codec.indices.code == 2:
        return _drawn(numel, room, f"{at.seed},{at.step},{at.bucket},{at.shard}") if count == room else None
    bitmap = part[spec.elias_fano_bytes(numel, room)[0] :]
    if int.from_bytes(bitmap, "little").bit_count() != count:
        return None
    found = spec.elias_fano(part, numel, room, count)
    rising = all(a < b for a, b in pairwise(found))
    return found if rising and (not found or found[-1] < numel) else None


_drawn = functools.cache(spec.seeded)


def _sound(part: bytes, code: int, m: int) -> bool:
    """Whether a value part of ``m`` values is one that an encoder can have written."""
    if code in spec.FLOATS:
        return all(map(math.isfinite, spec.read_values(part, code, m)))
    if code in spec.LOGARITHMIC:
        scales = struct.unpack_from(f"<{2 * spec.ceil(m, 64)}H", part)
        return all(low <= high <= 0x7F7F for low, high in zip(scales[::2], scales[1::2], strict=True))
    magnitudes = struct.unpack_from(f"<{spec.ONE_BIT.get(code, 1) * spec.ceil(m, 512)}f", part)
    return all(math.isfinite(scale) and scale >= 0 for scale in magnitudes)


# --- the library's -------------------------------------------------------------------------


class Read(NamedTuple):
    """What the library made of a message: why it was refused, or what it says, and what its sum is."""

    why: str
    said: Plain | None
    total: Tensor | None


@contextmanager
def using(choice: kernels._Choice) -> Iterator[None]:
    """The library with these kernels."""
    before, kernels._choice = kernels._choice, lambda: choice
    try:
        yield
    finally:
        kernels._choice = before


@functools.cache
def choices() -> list[kernels._Choice]:
    """The torch kernels, and the C++ ones where they are built."""
    both = [kernels._Choice(None, "for comparison")]
    try:
        from compressed_ddp.kernels import native
    except ImportError:
        return both
    return [*both, kernels._Choice(native, "for comparison")]


def read(case: Case, data: bytes) -> Read:
    row = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    numel, dense = case.numel, case.small.numel()
    out = torch.full((case.part.numel if case.part.numel <= LONG else 0,), UNTOUCHED)
    try:
        if case.packer is not None:
            opened = case.packer.unpack(row, case.shard, case.stamp)
        else:
            opened = case.codec.open(row, numel=numel, k=case.room, dense=dense, stamp=case.stamp)
        payload = case.codec.read(opened)
        if opened.finite and case.part.numel <= LONG:
            _sum_(case, out, opened)
    except WireError as error:
        if not bool((out == UNTOUCHED).all()):
            raise AssertionError(f"refused ({error}), and yet something was written") from error
        _sum_alone(case, row[: len(case.message)] if case.packer else row)
        return Read(str(error), None, None)
    said = Plain(opened.finite, payload.indices.tolist(), payload.values.tolist(), opened.dense.tolist())
    return Read("", said, out if opened.finite else None)


def _sum_(case: Case, out: Tensor, opened: Opened) -> None:
    if case.packer is not None:
        case.packer.sum_(out, [(case.shard, opened)], SCALE)
    else:
        case.codec.sum_(out, case.part, [(case.shard, opened)], SCALE)
        if case.small.numel():
            out[case.small] += opened.dense * SCALE


def _sum_alone(case: Case, row: Tensor) -> None:
    """What a frame that passes leads to in a collective: the sum, without the entries read before it."""
    try:
        opened = case.codec.open(
            row, numel=case.numel, k=case.room, dense=case.small.numel(), stamp=case.stamp
        )
    except WireError:
        return
    if case.part.numel > LONG:
        return
    out = torch.full((case.part.numel,), UNTOUCHED)
    try:
        case.codec.sum_(out, case.part, [(case.shard, opened)], SCALE)
    except WireError:
        assert bool((out == UNTOUCHED).all()), "a sum was begun and then refused"
    else:
        raise AssertionError("entries that are refused when they are read were added up")


def one_message(data: bytes) -> bool:
    """Whether ``data``, read as a message, is accepted; AssertionError if anything is not as it must be."""
    case = cases()[data[0] % len(cases())] if data else cases()[0]
    message = repaired(case, data[2:], data[1] if len(data) > 1 else 0)
    # A packer's rows are as long as the longest: what follows a message is cut off.
    wanted = plain(case, message[: len(case.message)] if case.packer else message)
    found = []
    for choice in choices():
        with using(choice):
            found.append(read(case, message))
    for why, said, total in found:
        assert why == found[0].why, f"{case.name}: refused as {why!r} and as {found[0].why!r}"
        assert (said is None) == (wanted is None), f"{case.name}: {why or 'accepted'}; specified: {wanted}"
        if wanted is None or said is None:
            continue
        assert said.finite == wanted.finite and said.indices == wanted.indices, f"{case.name}: other indices"
        assert _bits(said.values) == _bits(wanted.values), f"{case.name}: other values"
        assert _bits(said.dense) == _bits(wanted.dense), f"{case.name}: other small values"
        if total is not None and case.part.numel <= LONG:
            assert torch.equal(total.view(torch.int32), _sum(case, wanted).view(torch.int32)), (
                f"{case.name}: another sum"
            )
    return wanted is not None


def _bits(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _sum(case: Case, wanted: Plain) -> Tensor:
    """The specification's places of a shard's elements, in plain arithmetic."""
    out, shards = torch.zeros(case.part.numel), case.part.shards
    where = [i // 64 * 64 * shards + case.shard * 64 + i % 64 for i in wanted.indices]
    out[torch.tensor(where, dtype=torch.int64)] += torch.tensor(wanted.values) * SCALE
    if wanted.dense:
        out[case.small] += torch.tensor(wanted.dense) * SCALE
    return out
