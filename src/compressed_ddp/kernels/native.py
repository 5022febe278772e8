"""The C++ kernels (csrc/) behind the same signatures as the reference, and with the same bits.

Tensors are checked here; the extension sees addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import Partition
from ..types import WireError
from . import _native, reference
from .reference import (
    FLOATS,
    LOG_BITS,
    CodedEntries,
    check_room,
    check_shard,
    ef_low_bits,
    ef_nbytes,
    in_message,
    log_nbytes,
)

# kernels.h: enum cddp_status
_NOT_FINITE, _NO_MEMORY, _WRONG_COUNT, _OUT_OF_RANGE, _NOT_INCREASING, _BAD_SCALE = 1, 2, 3, 4, 5, 6


def isa() -> str:
    """The instruction set that the inner loops use on this machine."""
    return _native.isa()


def topk_indices(flat: Tensor, k: int) -> Tensor:
    """Positions of the k largest magnitudes, increasing; ties go to the lower index."""
    n = flat.numel()
    part = Partition.whole(n, min(k, n))
    taken, finite = take_topk(None, flat, torch.empty_like(flat), part)
    return taken[0][1] if finite else reference.topk_indices(flat, k)


def take_topk(
    residual: Tensor | None, gradient: Tensor, out: Tensor, part: Partition, *, exact: bool = True
) -> tuple[list[tuple[Tensor, Tensor]], bool]:
    """``out = residual + gradient`` less each shard's largest entries, which are returned."""
    n, table = part.numel, part.table
    for tensor in (gradient, out) if residual is None else (residual, gradient, out):
        _check(tensor, torch.float32, n)
    values, indices = _room(part.total, torch.float32), _room(part.total, torch.int64)
    taken = _room(table.shape[0], torch.int64)
    status = _native.take_topk(
        0 if residual is None else residual.data_ptr(),
        gradient.data_ptr(),
        out.data_ptr(),
        n,
        part.shards,
        table.data_ptr(),
        table.shape[0],
        values.data_ptr(),
        indices.data_ptr(),
        taken.data_ptr(),
        exact,
        torch.get_num_threads(),
    )
    if status == _NOT_FINITE:
        return [], False
    _check_status(status)
    if not exact:
        values, indices, rooms = _close_gaps(values, indices, part, taken.tolist())
    else:
        rooms = part.rooms
    if part.shards == 1:
        return [(values, indices)], True
    return list(zip(torch.split(values, rooms), torch.split(indices, rooms), strict=True)), True


def _close_gaps(
    values: Tensor, indices: Tensor, part: Partition, taken: list[int]
) -> tuple[Tensor, Tensor, list[int]]:
    """Push together what quotas took when some took fewer than they might; and how many each shard did."""
    rooms, keep, at = [0] * part.shards, [], 0
    for (shard, _, _, k), count in zip(part.table.tolist(), taken, strict=True):
        keep.append(slice(at, at + count))
        rooms[shard] += count
        at += k
    if sum(rooms) == part.total:
        return values, indices, rooms
    return torch.cat([values[run] for run in keep]), torch.cat([indices[run] for run in keep]), rooms


def finite_sum(residual: Tensor | None, gradient: Tensor) -> bool:
    """Whether ``residual + gradient`` is finite everywhere. Reads only."""
    n = gradient.numel()
    _check(gradient, torch.float32, n)
    if residual is not None:
        _check(residual, torch.float32, n)
    return _native.all_finite(0 if residual is None else residual.data_ptr(), gradient.data_ptr(), n)


def accumulate_(
    out: Tensor, part: Partition, pieces: Sequence[tuple[int, Tensor, Tensor]], scale: float
) -> None:
    """``out = 0``, then ``out[position] += value * scale`` for each piece in order."""
    if any(values.numel() == part.numel for _, values, _ in pieces):
        return reference.accumulate_(out, part, pieces, scale)  # nothing sparse: torch's own loops
    _check(out, torch.float32, part.numel)
    rows = []
    for shard, values, indices in pieces:
        _check(values, torch.float32, indices.numel())
        _check(indices, torch.int64, values.numel())
        rows.append((values.data_ptr(), indices.data_ptr(), values.numel(), shard))
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    about = out.data_ptr(), part.numel, part.shards, table.data_ptr(), len(rows)
    _check_status(_native.accumulate(*about, scale, torch.get_num_threads()))


def sum_coded_(
    out: Tensor,
    part: Partition,
    messages: Sequence[CodedEntries],
    values: int,
    scale: float,
) -> None:
    """As ``accumulate_``, from entries as they travel, all checked first: raises WireError."""
    _check(out, torch.float32, part.numel)
    rows = []
    for at, (shard, index_part, value_part, numel, capacity, count) in enumerate(messages):
        check_shard(part, shard, numel)
        with in_message(at):
            low, bitmap = _check_sizes(index_part, numel, capacity)
            check_room(count, capacity)
            bits = LOG_BITS.get(values)
            size = count * FLOATS[values].itemsize if bits is None else log_nbytes(bits, count)
            if value_part.numel() != size:
                raise WireError(f"value part has {value_part.numel()} bytes, not {size}")
        _check(value_part, torch.uint8, size)
        where = index_part.data_ptr(), value_part.data_ptr()
        rows.append((*where, count, shard, numel, capacity, low, bitmap))
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    about = out.data_ptr(), part.numel, part.shards, table.data_ptr(), len(rows), values, scale
    status, which, found = _native.sum_messages(*about, torch.get_num_threads())
    if status not in (0, _NO_MEMORY):
        with in_message(which):
            raise _wire_error(status, found, messages[which].entries, messages[which].numel)
    _check_status(status)


def put_difference_(out: Tensor, part: Partition, shard: int, indices: Tensor, a: Tensor, b: Tensor) -> None:
    """``out[position] = a - b`` for a shard's entries."""
    n = indices.numel()
    _check(out, torch.float32, part.numel)
    _check(indices, torch.int64, n)
    _check(a, torch.float32, n)
    _check(b, torch.float32, n)
    entries = indices.data_ptr(), a.data_ptr(), b.data_ptr(), n
    _check_status(_native.put_difference(out.data_ptr(), part.numel, part.shards, shard, *entries))


def ef_encode(indices: Tensor, numel: int, capacity: int, out: Tensor | None = None) -> Tensor:
    """Strictly increasing indices below ``numel``, at most ``capacity``, as Elias-Fano bytes."""
    _check(indices, torch.int64, indices.numel())
    out = _room(ef_nbytes(numel, capacity), torch.uint8) if out is None else out
    low, bitmap = _check_sizes(out, numel, capacity)
    status = _native.ef_encode(
        indices.data_ptr(), indices.numel(), numel, capacity, low, bitmap, out.data_ptr()
    )
    if status:
        raise ValueError(
            f"cannot encode {indices.numel()} indices: at most {capacity}, strictly increasing, "
            f"from 0 to {numel - 1}, is what a message of this size holds"
        )
    return out


def ef_decode(data: Tensor, numel: int, capacity: int, count: int) -> Tensor:
    """The inverse of ``ef_encode``; raises WireError for anything it could not have written."""
    low, bitmap = _check_sizes(data, numel, capacity)
    check_room(count, capacity)
    if capacity == 0:
        return _room(0, torch.int64)
    indices = _room(count, torch.int64)
    status, found = _native.ef_decode(
        data.data_ptr(), capacity, low, bitmap, numel, count, indices.data_ptr()
    )
    if status not in (0, _NO_MEMORY):
        raise _wire_error(status, found, count, numel)
    _check_status(status)
    return indices


def _check_sizes(data: Tensor, numel: int, capacity: int) -> tuple[int, int]:
    """How many low bits an index has in ``data``, and how many bytes the bitmap; both as they must be."""
    size, low = ef_nbytes(numel, capacity), ef_low_bits(numel, capacity)
    if data.numel() != size:
        raise WireError(f"index part has {data.numel()} bytes, not {size}")
    _check(data, torch.uint8, size)
    return low, size - -(-low * capacity // 8)


def _wire_error(status: int, found: int, count: int, numel: int) -> WireError:
    """What is wrong with a message, in the reference's words."""
    if status == _WRONG_COUNT:
        return WireError(f"index part holds {found} entries, its header says {count}")
    if status == _OUT_OF_RANGE:
        return WireError(f"index {found} is outside a bucket of {numel} elements")
    if status == _NOT_INCREASING:
        return WireError("indices are not strictly increasing")
    if status == _BAD_SCALE:
        return WireError("value part has a block whose smallest magnitude exceeds its largest")
    return WireError("value part holds a NaN or an infinity")


def log_encode(values: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Finite float32 values to bytes (``log_nbytes`` of them)."""
    count = values.numel()
    _check(values, torch.float32, count)
    out = _room(log_nbytes(bits, count), torch.uint8) if out is None else out
    _check(out, torch.uint8, log_nbytes(bits, count))
    _native.log_encode(values.data_ptr(), count, bits, out.data_ptr())
    return out


def log_decode(data: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of ``log_encode``; raises WireError for scales it could not have written."""
    if data.numel() != log_nbytes(bits, count):
        raise WireError(f"value part has {data.numel()} bytes, not {log_nbytes(bits, count)}")
    _check(data, torch.uint8, data.numel())
    values = _room(count, torch.float32)
    status = _native.log_decode(data.data_ptr(), count, bits, values.data_ptr())
    if status:
        raise _wire_error(status, 0, count, 0)
    return values


def checksum(message: Tensor, skip: int = -1) -> int:
    """A message's 32-bit check, its word ``skip`` taken as zero."""
    return _native.checksum(message.data_ptr(), _words(message), skip)


def fingerprint(data: Tensor) -> int:
    """A 64-bit check of bytes."""
    return _native.fingerprint(data.data_ptr(), _words(data))


def _words(data: Tensor) -> int:
    _check(data, torch.uint8, data.numel())
    if data.numel() % 4:
        raise ValueError(f"a message is made of 32-bit words; {data.numel()} bytes are not")
    return data.numel() // 4


def _room(numel: int, dtype: torch.dtype) -> Tensor:
    """Where the extension writes: on the CPU and of ``dtype``, whatever torch's defaults are set to."""
    return torch.empty(numel, dtype=dtype, device="cpu")


def _check(tensor: Tensor, dtype: torch.dtype, numel: int) -> None:
    """What the extension takes on trust, so it is made sure of here."""
    if tensor.dtype is dtype and tensor.numel() == numel and tensor.is_cpu and tensor.is_contiguous():
        return
    raise ValueError(
        f"native kernels need a contiguous CPU tensor of {numel} {dtype} elements, got "
        f"{tensor.numel()} {tensor.dtype} on {tensor.device}"
        f"{'' if tensor.is_contiguous() else ', not contiguous'}"
    )


def _check_status(status: int) -> None:
    if status == _NO_MEMORY:
        raise MemoryError("the kernels could not get scratch memory")
    if status == _OUT_OF_RANGE:
        raise ValueError("indices are not strictly increasing, or reach outside their shard")
    if status:
        raise RuntimeError(f"a kernel failed with status {status}")
