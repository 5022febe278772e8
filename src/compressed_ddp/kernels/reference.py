"""Every kernel in plain torch: the definition of the right answer, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import Partition
from ..types import WireError
from .selection import all_finite, take_selected, take_topk, topk_indices


class CodedEntries(NamedTuple):
    """The entries of one message as they travel: Elias-Fano indices and values, about ``shard``."""

    shard: int
    indices: Tensor
    values: Tensor
    numel: int
    """Elements of the shard."""
    capacity: int
    entries: int


# --- sums ----------------------------------------------------------------------------------


def finite_sum(residual: Tensor | None, gradient: Tensor) -> bool:
    """Whether ``residual + gradient`` is finite everywhere. Reads only."""
    return all_finite(gradient if residual is None else residual + gradient)


def accumulate_(
    out: Tensor, part: Partition, pieces: Sequence[tuple[int, Tensor, Tensor]], scale: float
) -> None:
    """``out = 0``, then ``out[position] += value * scale`` for each piece in order."""
    out.zero_()
    _add(out, part, pieces, scale)


def sum_coded_(
    out: Tensor,
    part: Partition,
    messages: Sequence[CodedEntries],
    values: int,
    scale: float,
) -> None:
    """As ``accumulate_``, from entries as they travel, all checked first: raises WireError."""
    pieces = []
    for which, (shard, index_part, value_part, numel, capacity, count) in enumerate(messages):
        check_shard(part, shard, numel)
        with in_message(which):
            indices = ef_decode(index_part, numel, capacity, count)
            if values in FLOATS:
                numbers = float_decode(value_part, FLOATS[values], count)
            else:
                numbers = log_decode(value_part, LOG_BITS[values], count)
        pieces.append((shard, numbers, indices))
    out.zero_()
    _add(out, part, pieces, scale)


@contextmanager
def in_message(which: int) -> Iterator[None]:
    """A WireError out of this block knows of which message it is."""
    try:
        yield
    except WireError as error:
        error.which = which
        raise


def check_shard(part: Partition, shard: int, numel: int) -> None:
    """Raises ValueError unless ``part`` has such a shard, of ``numel`` elements."""
    if not 0 <= shard < part.shards or numel != part.local_numel(shard):
        found = part.local_numel(shard) if 0 <= shard < part.shards else "no"
        raise ValueError(f"message about {numel} elements; shard {shard} has {found}")


def _add(out: Tensor, part: Partition, pieces: Sequence[tuple[int, Tensor, Tensor]], scale: float) -> None:
    for shard, values, indices in pieces:
        if values.numel() == part.numel:  # all of them: no positions to look up
            out += values * scale
        else:
            out[part.to_global(indices, shard)] += values * scale


def put_difference_(out: Tensor, part: Partition, shard: int, indices: Tensor, a: Tensor, b: Tensor) -> None:
    """``out[position] = a - b`` for a shard's entries."""
    if indices.numel() == part.numel:
        torch.sub(a, b, out=out)
    else:
        out[part.to_global(indices, shard)] = a - b


# --- bits ----------------------------------------------------------------------------------


def pack_bits(bits: Tensor) -> Tensor:
    """Zeros and ones to bytes, the first bit lowest; the last byte is filled up with zeros."""
    padded = torch.zeros(-(-bits.numel() // 8) * 8, dtype=torch.uint8, device=bits.device)
    padded[: bits.numel()] = bits
    weights = 1 << torch.arange(8, device=bits.device)
    return (padded.view(-1, 8) * weights).sum(1).to(torch.uint8)


def unpack_bits(data: Tensor) -> Tensor:
    """Bytes to zeros and ones, eight a byte, the lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data.view(-1, 1) >> shifts) & 1).view(-1)


def pack_uints(numbers: Tensor, width: int) -> Tensor:
    """Each number's ``width`` lowest bits, end to end, as bytes."""
    shifts = torch.arange(width, device=numbers.device)
    return pack_bits(((numbers.view(-1, 1) >> shifts) & 1).view(-1).to(torch.uint8))


def unpack_uints(data: Tensor, width: int, count: int) -> Tensor:
    """The inverse of ``pack_uints``: ``count`` numbers as int64."""
    bits = unpack_bits(data)[: width * count].view(count, width).to(torch.int64)
    return (bits << torch.arange(width, device=data.device)).sum(1)


# --- Elias-Fano index sets -----------------------------------------------------------------


def ef_low_bits(numel: int, capacity: int) -> int:
    """How many of each index's low bits are stored as they are."""
    return max((numel // capacity).bit_length() - 1, 0) if capacity else 0


def ef_nbytes(numel: int, capacity: int) -> int:
    """Size of ``capacity`` indices below ``numel``: fixed, whatever the indices are."""
    if capacity == 0:
        return 0
    low = ef_low_bits(numel, capacity)
    return -(-low * capacity // 8) + -(-(capacity + (numel >> low) + 1) // 8)


def check_room(count: int, capacity: int) -> None:
    """Raises WireError unless ``count`` entries fit where there is room for ``capacity``."""
    if not 0 <= count <= capacity:
        raise WireError(f"index part of {count} entries, where there is room for {capacity}")


def ef_encode(indices: Tensor, numel: int, capacity: int, out: Tensor | None = None) -> Tensor:
    """Strictly increasing indices below ``numel``, at most ``capacity``, as Elias-Fano bytes.

    The low bits of each index are packed; the high part of index i is a one at bit
    ``high + i`` of a bitmap. Fewer indices than ``capacity`` leave zeros behind them. Written to
    ``out`` (of the right size) if that is given.
    """
    if out is None:
        out = torch.empty(ef_nbytes(numel, capacity), dtype=torch.uint8, device=indices.device)
    out.zero_()
    if indices.numel() == 0:
        return out
    low = ef_low_bits(numel, capacity)
    lows = pack_uints(indices, low)
    out[: lows.numel()] = lows
    split = -(-low * capacity // 8)
    bitmap = torch.zeros((out.numel() - split) * 8, dtype=torch.uint8, device=indices.device)
    bitmap[(indices >> low) + torch.arange(indices.numel(), device=indices.device)] = 1
    out[split:] = pack_bits(bitmap)
    return out


def ef_decode(data: Tensor, numel: int, capacity: int, count: int) -> Tensor:
    """The inverse of ``ef_encode``; raises WireError for anything it could not have written."""
    if data.numel() != ef_nbytes(numel, capacity):
        raise WireError(f"index part has {data.numel()} bytes, not {ef_nbytes(numel, capacity)}")
    check_room(count, capacity)
    if capacity == 0:
        return torch.empty(0, dtype=torch.int64, device=data.device)
    low = ef_low_bits(numel, capacity)
    split = -(-low * capacity // 8)
    ones = unpack_bits(data[split:]).nonzero().view(-1)
    if ones.numel() != count:
        raise WireError(f"index part holds {ones.numel()} entries, its header says {count}")
    high = ones - torch.arange(count, device=data.device)
    indices = (high << low) | unpack_uints(data[:split], low, count)
    if count and int(indices[-1]) >= numel:
        raise WireError(f"index {int(indices[-1])} is outside a bucket of {numel} elements")
    if not bool((indices[1:] > indices[:-1]).all()):
        raise WireError("indices are not strictly increasing")
    return indices


# --- values --------------------------------------------------------------------------------

FLOATS = {0: torch.float32, 1: torch.float16, 2: torch.bfloat16}
LOG_BITS = {3: 8, 4: 4}
"""Value formats that ``sum_coded_`` reads, by their codes on the wire."""


def float_decode(data: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """``count`` numbers to float32; raises WireError for a NaN or an infinity."""
    if data.numel() != count * dtype.itemsize:
        raise WireError(f"value part has {data.numel()} bytes, not {count * dtype.itemsize}")
    # A copy first: a slice of a message need not be aligned to the type.
    values = data.clone().view(dtype).to(torch.float32)
    if not all_finite(values):
        raise WireError("value part holds a NaN or an infinity")
    return values


# --- logarithmic value codes ---------------------------------------------------------------
#
# A float32's bits below the sign, read as an integer, are a piecewise linear logarithm of its
# magnitude. Quantising that integer is logarithmic quantisation without a logarithm: nothing
# but integer arithmetic, so every machine gets the same bits. See docs/adr/0003.

LOG_BLOCK = 64
_OCTAVE = 1 << 23
_LARGEST = 0x7F7F
_OCTAVES = {8: 15, 4: 4}
"""How far below a block's largest magnitude codes reach; what is smaller becomes zero."""


def log_nbytes(bits: int, count: int) -> int:
    """Size of ``count`` codes: four bytes for each block of 64, then the codes."""
    return 4 * -(-count // LOG_BLOCK) + -(-count * bits // 8)


def log_encode(values: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Finite float32 values to bytes (``log_nbytes`` of them), to ``out`` if that is given."""
    count = values.numel()
    keys = values.view(torch.int32).to(torch.int64)
    negative, keys = keys < 0, keys & 0x7FFFFFFF
    padded = torch.zeros(-(-count // LOG_BLOCK) * LOG_BLOCK, dtype=torch.int64, device=keys.device)
    padded[:count] = keys
    blocks = padded.view(-1, LOG_BLOCK)
    highest = blocks.amax(1)
    lowest = torch.where(blocks == 0, _LARGEST << 16, blocks).amin(1)
    lowest = torch.maximum(lowest, highest - _OCTAVES[bits] * _OCTAVE).minimum(highest)
    low16, high16 = lowest >> 16, ((highest + 0xFFFF) >> 16).clamp(max=_LARGEST)
    base, step, top = _log_steps(low16, high16, bits)
    # Round to the nearest step; below the lowest step, to zero or to that step.
    codes = ((blocks - base + step // 2) // step + 1).clamp(1, top)
    codes = torch.where((blocks == 0) | (blocks < base - _OCTAVE), 0, codes)
    scales = torch.stack([low16, high16], 1).view(-1)
    codes = codes.view(-1)[:count] | ((negative & (codes.view(-1)[:count] > 0)) << (bits - 1))
    return torch.cat([pack_uints(scales, 16), pack_uints(codes, bits)], out=out)


def log_decode(data: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of ``log_encode``; raises WireError for scales it could not have written."""
    if data.numel() != log_nbytes(bits, count):
        raise WireError(f"value part has {data.numel()} bytes, not {log_nbytes(bits, count)}")
    n_blocks = -(-count // LOG_BLOCK)
    scales = unpack_uints(data[: 4 * n_blocks], 16, 2 * n_blocks).view(n_blocks, 2)
    low16, high16 = scales[:, 0], scales[:, 1]
    if not bool(((low16 <= high16) & (high16 <= _LARGEST)).all()):
        raise WireError("value part has a block whose smallest magnitude exceeds its largest")
    base, step, top = _log_steps(low16, high16, bits)
    codes = unpack_uints(data[4 * n_blocks :], bits, count)
    levels, negative = codes & top, (codes > top).to(torch.int64)
    block = torch.arange(count, device=data.device) // LOG_BLOCK
    keys = torch.where(levels == 0, 0, base.view(-1)[block] + (levels - 1) * step.view(-1)[block])
    return (keys - (negative << 31)).to(torch.int32).view(torch.float32)


def _log_steps(low16: Tensor, high16: Tensor, bits: int) -> tuple[Tensor, Tensor, int]:
    """Key of code 1, distance between codes (both a column), and the highest code."""
    top = (1 << (bits - 1)) - 1
    step = (((high16 - low16) << 16) // (top - 1)).clamp(min=1)
    return (low16 << 16).view(-1, 1), step.view(-1, 1), top


# --- checksum ------------------------------------------------------------------------------

_WORDS = 1 << 20


def checksum(message: Tensor, skip: int = -1) -> int:
    """A 32-bit check: the message's 32-bit words, each times an odd weight of its position.

    Word ``skip`` is taken as zero. The sum wraps at 64 bits and its halves are folded together.
    Damage goes unseen about once in 2^32; it finds accidents and is no signature.
    """
    total = fingerprint(message)
    if skip >= 0:
        word = int(message.view(torch.int32)[skip]) & 0xFFFFFFFF
        total = (total - word * ((skip * 0x9E3779B1 + 0x85EBCA6B) | 1)) & 0xFFFFFFFFFFFFFFFF
    return (total ^ (total >> 32)) & 0xFFFFFFFF


def fingerprint(data: Tensor) -> int:
    """A 64-bit check of bytes: their 32-bit words, each times an odd weight of its position, added up.

    No change of a single word goes unseen, and any other about once in 2^64.
    """
    total = 0
    every = data.view(torch.int32)
    for start in range(0, every.numel(), _WORDS):  # or temporaries would be large
        words = every[start : start + _WORDS].to(torch.int64) & 0xFFFFFFFF
        position = torch.arange(start, start + words.numel(), device=data.device)
        total += int((words * ((position * 0x9E3779B1 + 0x85EBCA6B) | 1)).sum())
    return total & 0xFFFFFFFFFFFFFFFF


__all__ = [
    "FLOATS",
    "LOG_BITS",
    "CodedEntries",
    "accumulate_",
    "all_finite",
    "check_room",
    "check_shard",
    "checksum",
    "ef_decode",
    "ef_encode",
    "ef_low_bits",
    "ef_nbytes",
    "fingerprint",
    "finite_sum",
    "float_decode",
    "log_decode",
    "log_encode",
    "log_nbytes",
    "pack_bits",
    "pack_uints",
    "put_difference_",
    "sum_coded_",
    "take_selected",
    "take_topk",
    "topk_indices",
    "unpack_bits",
    "unpack_uints",
]
