"""A decoder written from docs/wire-format.md alone: integers and struct, nothing of the library.

If it disagrees with the golden files, the specification is wrong. It reads every format but
trusts its input: the checks of the specification are the library's, and tests/unit/test_wire.py's.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

FLOATS = {0: (4, "f"), 1: (2, "e"), 2: (2, None)}
LOGARITHMIC = {3: 8, 4: 4}
ONE_BIT = {5: 1, 6: 2}
"""Scales a block."""
STOCHASTIC = {7: 1, 17: 1, 18: 3, 19: 7, 20: 15, 21: 31, 22: 63, 23: 127}
"""Levels."""


class Message(NamedTuple):
    step: int
    bucket: int
    sender: int
    numel: int
    finite: bool
    from_owner: bool
    indices: list[int]
    values: list[float]
    dense: list[float]


def decode(data: bytes, room: int, seed: int = 0, shard: int = 0) -> Message:
    """``room``, ``seed`` and ``shard`` are what the workers agreed on before."""
    magic, version, index_format, value_format, flags, about = struct.unpack_from("<2s4BH", data)
    step, bucket, sender, numel, count, dense, check = struct.unpack_from("<I2H4I", data, 8)
    assert magic == b"CD" and version == 1 and flags < 4 and about == shard and count <= room
    assert check == checksum(data)
    low_bytes, high_bytes = elias_fano_bytes(numel, room) if index_format == 1 else (0, 0)
    values_at = 32 + low_bytes + high_bytes
    dense_at = values_at + value_bytes(value_format, room)
    end = dense_at + value_bytes(value_format, dense)
    assert len(data) == ceil(end, 8) * 8 and not any(data[end:])
    if flags & 1:
        assert count == 0 and not any(data[32:])
        return Message(step, bucket, sender, numel, False, bool(flags & 2), [], [], [])
    if index_format == 0:
        indices = list(range(numel))
    elif index_format == 1:
        indices = elias_fano(data[32:values_at], numel, room, count)
    else:
        indices = seeded(numel, room, f"{seed},{step},{bucket},{shard}")
    return Message(
        *(step, bucket, sender, numel, True, bool(flags & 2)),
        indices,
        read_values(data[values_at:dense_at], value_format, count),
        read_values(data[dense_at:end], value_format, dense),
    )


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def f32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def from_bits(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def uints(data: bytes, width: int, count: int) -> list[int]:
    """``count`` numbers of ``width`` bits, lowest bit first: the bytes are one long integer."""
    stream = int.from_bytes(data, "little")
    return [(stream >> (i * width)) & ((1 << width) - 1) for i in range(count)]


def checksum(data: bytes) -> int:
    words = list(struct.unpack(f"<{len(data) // 4}I", data))
    words[7] = 0
    total = sum(word * ((j * 0x9E3779B1 + 0x85EBCA6B) | 1) for j, word in enumerate(words)) % 2**64
    return (total ^ (total >> 32)) % 2**32


def low_bits(numel: int, room: int) -> int:
    return (numel // room).bit_length() - 1


def elias_fano_bytes(numel: int, room: int) -> tuple[int, int]:
    if room == 0:
        return 0, 0
    low = low_bits(numel, room)
    return ceil(low * room, 8), ceil(room + (numel >> low) + 1, 8)


def elias_fano(part: bytes, numel: int, room: int, count: int) -> list[int]:
    if room == 0:
        return []
    low, (low_bytes, _) = low_bits(numel, room), elias_fano_bytes(numel, room)
    bitmap = uints(part[low_bytes:], 1, 8 * (len(part) - low_bytes))
    ones = [position for position, bit in enumerate(bitmap) if bit]
    assert len(ones) == count
    lows = uints(part[:low_bytes], low, count)
    return [((p - i) << low) | lows[i] for i, p in enumerate(ones)]


def seeded(numel: int, room: int, text: str) -> list[int]:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    random = mt19937((int.from_bytes(digest, "little") >> 1) % 2**32)
    r = list(range(numel))
    for i in range(numel - 1):
        other = i + next(random) % (numel - i)
        r[i], r[other] = r[other], r[i]
    return sorted(r[:room])


def mt19937(seed: int) -> Iterator[int]:
    """Matsumoto and Nishimura's generator, started by init_genrand."""
    s = [seed]
    for i in range(1, 624):
        s.append((1812433253 * (s[-1] ^ (s[-1] >> 30)) + i) % 2**32)
    while True:
        for i in range(624):
            y = (s[i] & 0x80000000) | (s[(i + 1) % 624] & 0x7FFFFFFF)
            s[i] = s[(i + 397) % 624] ^ (y >> 1) ^ (0x9908B0DF if y & 1 else 0)
        for y in s:
            y ^= y >> 11
            y ^= (y << 7) & 0x9D2C5680
            y ^= (y << 15) & 0xEFC60000
            yield y ^ (y >> 18)


def value_bytes(code: int, m: int) -> int:
    if code in FLOATS:
        return FLOATS[code][0] * m
    if code in LOGARITHMIC:
        return 4 * ceil(m, 64) + ceil(LOGARITHMIC[code] * m, 8)
    if code in ONE_BIT:
        return 4 * ONE_BIT[code] * ceil(m, 512) + ceil(m, 8)
    return 4 * ceil(m, 512) + ceil((STOCHASTIC[code].bit_length() + 1) * m, 8)


def read_values(part: bytes, code: int, m: int) -> list[float]:
    if code == 2:
        return [from_bits(upper << 16) for upper in uints(part, 16, m)]
    if code in FLOATS:
        return list(struct.unpack_from(f"<{m}{FLOATS[code][1]}", part))
    if code in LOGARITHMIC:
        return logarithmic(part, LOGARITHMIC[code], m)
    if code in ONE_BIT:
        columns = ONE_BIT[code]
        scales = struct.unpack_from(f"<{columns * ceil(m, 512)}f", part)
        bits = uints(part[4 * len(scales) :], 1, m)
        blocks = [scales[i // 512 * columns :][:columns] for i in range(m)]
        return [-block[-1] if bit else block[0] for bit, block in zip(bits, blocks, strict=True)]
    levels = STOCHASTIC[code]
    scales = struct.unpack_from(f"<{ceil(m, 512)}f", part)
    codes = uints(part[4 * len(scales) :], levels.bit_length() + 1, m)
    sizes = [f32(f32((c & levels) / levels) * scales[i // 512]) for i, c in enumerate(codes)]
    return [-size if c > levels else size for c, size in zip(codes, sizes, strict=True)]


def logarithmic(part: bytes, width: int, m: int) -> list[float]:
    top = (1 << (width - 1)) - 1
    scales = struct.unpack_from(f"<{2 * ceil(m, 64)}H", part)
    values = []
    for i, code in enumerate(uints(part[2 * len(scales) :], width, m)):
        low16, high16 = scales[i // 64 * 2 :][:2]
        step = max(1, ((high16 - low16) << 16) // (top - 1))
        level, sign = code & top, code >> (width - 1)
        key = (low16 << 16) + (level - 1) * step if level else 0
        values.append(from_bits(sign << 31 | key))
    return values
