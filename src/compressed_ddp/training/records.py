"""What torch.save wrote, as its records: read so strictly that no other reader can see another file.

A zip archive can be read in several ways: from its end or by what its end says, with the first or the last of
two sizes. What is checked here is read again by torch, so it must be the same for both.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Iterator, Mapping
from typing import Any

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FLAGS = 0x808
"""Sizes behind the contents, names in UTF-8: all that torch.save and zipfile set."""
_STORED = 0
_FOLDER = 0x10
_MAX32 = 0xFFFFFFFF

_ITEM_BYTES = {
    "torch DoubleStorage": 8,
    "torch FloatStorage": 4,
    "torch HalfStorage": 2,
    "torch BFloat16Storage": 2,
    "torch LongStorage": 8,
    "torch IntStorage": 4,
    "torch ShortStorage": 2,
    "torch CharStorage": 1,
    "torch ByteStorage": 1,
    "torch BoolStorage": 1,
    "torch ComplexFloatStorage": 8,
    "torch ComplexDoubleStorage": 16,
    "torch.storage UntypedStorage": 1,
}
_GLOBALS = {
    "collections OrderedDict",
    "torch Size",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    *(f"torch {kind}" for kind in ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64")),
    *_ITEM_BYTES,
}
"""What a state of ours asks for. torch allows more, such as a bytearray of any size."""
_VALUES = ("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "GLOBAL")
_TUPLE = object()
_PUT, _GET = ("BINPUT", "LONG_BINPUT"), ("BINGET", "LONG_BINGET")


def records_of(data: bytes) -> dict[str, memoryview]:
    """The contents of each record of ``data``, without a copy and without the archive's own name before it.

    ValueError unless torch.save could have written it: one directory right before the end, nothing packed,
    one record after the other from the first byte on, each name once.
    """
    directory, size, count = _directory(data)
    entries, here = [], directory
    for _ in range(count):
        entry, here = _entry(data, here, directory + size)
        entries.append(entry)
    if here != directory + size:
        raise _foreign("its directory has other records than its end says")
    names = [name for name, _, _ in entries]
    if len({name.lower() for name in names}) < len(names):  # as torch seeks them
        raise ValueError("it has two records of one name")
    if len({name.partition(b"/")[0] for name in names}) != 1:
        raise _foreign("its records are not in one folder")
    records, end = {}, 0
    for name, offset, length in sorted(entries, key=lambda entry: entry[1]):
        if offset < end or (end == 0 and offset):
            raise _foreign(f"record {name!r} is not where the one before it ends")
        start = _contents(data, name, offset)
        end = start + length
        if end > directory:
            raise ValueError(f"its record {name!r} claims {length:,} bytes, {directory - start:,} are there")
        records[name.partition(b"/")[2].decode(errors="replace")] = memoryview(data)[start:end]
    return records


def check_state(records: Mapping[str, memoryview]) -> None:
    """Raises ValueError unless the pickle of ``records`` asks for tensors alone, each of a record's size."""
    for kind, key, numel in _storages(bytes(records.get("data.pkl", b""))):
        record = records.get(f"data/{key}")
        if record is None or numel * _ITEM_BYTES[kind] != len(record):
            found = "no bytes" if record is None else f"{len(record):,} bytes"
            raise ValueError(f"it has {found} for storage {key!r}, a {kind} of {numel:,}")


# --- the archive ---------------------------------------------------------------------------------


def _foreign(why: str) -> ValueError:
    return ValueError(f"it is not a file that torch.save wrote ({why})")


def _unpack(form: struct.Struct, magic: bytes, data: bytes, at: int) -> list[int] | None:
    """The numbers of the part of an archive at ``at``; None unless it is there and begins with ``magic``."""
    if at < 0 or at + form.size > len(data) or data[at : at + 4] != magic:
        return None
    return list(form.unpack_from(data, at)[1:])


def _directory(data: bytes) -> tuple[int, int, int]:
    """Where the directory is, its bytes and its records, by an end that is the last thing of ``data``."""
    at = len(data) - _END.size
    end = _unpack(_END, b"PK\x05\x06", data, at)
    if end is None or end[6]:
        raise _foreign("it does not end as an archive without a comment")
    disks, (here, count, size, offset) = end[:2], end[2:6]
    locator = _unpack(_LOCATOR, b"PK\x06\x07", data, at - _LOCATOR.size)
    if locator is not None:
        at -= _LOCATOR.size + _END64.size
        large = _unpack(_END64, b"PK\x06\x06", data, at)
        if large is None or locator != [0, at, 1] or large[0] != _END64.size - 12:
            raise _foreign("its two ends do not belong together")
        small = (here, count, size, offset)
        disks, (here, count, size, offset) = disks + large[3:5], large[5:9]
        for one, other, most in zip(small, large[5:9], (0xFFFF, 0xFFFF, _MAX32, _MAX32), strict=True):
            if one not in (other, most):
                raise _foreign("its two ends differ")
    if any(disks) or here != count:
        raise _foreign("it is a part of several")
    if offset + size != at:
        raise _foreign("its directory is not right before its end")
    return offset, size, count


def _entry(data: bytes, at: int, end: int) -> tuple[tuple[bytes, int, int], int]:
    """A record's name, offset and length by its entry in the directory, and where the next entry is."""
    entry = _unpack(_ENTRY, b"PK\x01\x02", data, at)
    if entry is None:
        raise _foreign("its directory is damaged")
    flags, method, packed, length = entry[2], entry[3], entry[7], entry[8]
    names, extras, comments, disk, attributes, offset = *entry[9:13], *entry[14:]
    start = at + _ENTRY.size
    after = start + names + extras
    if after + comments > end or comments or disk:
        raise _foreign("its directory is damaged")
    if method != _STORED:
        raise ValueError("it has packed records, which torch.save does not write")
    name = data[start : start + names]
    # Of a folder torch reads nothing, and returns the memory that it meant to read into.
    folder = attributes & _FOLDER or name.endswith(b"/")
    if flags & ~_FLAGS or folder or b"\0" in name or b"/" not in name:
        raise _foreign(f"record {name!r} is of another kind")
    large = iter(_large(data[start + names : after]))
    # In this order, and those alone that do not fit.
    length, packed, offset = (next(large, v) if v == _MAX32 else v for v in (length, packed, offset))
    if length != packed or next(large, None) is not None:
        raise _foreign(f"record {name!r} has two sizes")
    return (name, offset, length), after


def _large(extra: bytes) -> list[int]:
    """The 64-bit numbers of an entry, which are in a field of their own; none or one such field."""
    found: list[list[int]] = []
    while extra:
        kind, size = struct.unpack_from("<2H", extra) if len(extra) >= 4 else (0, len(extra))
        field, extra = extra[4 : 4 + size], extra[4 + size :]
        if len(field) < size or (kind == 1 and size % 8):
            raise _foreign("its directory is damaged")
        if kind == 1:
            found.append(list(struct.unpack(f"<{size // 8}Q", field)))
    if len(found) > 1:
        raise _foreign("a record has two sizes")
    return found[0] if found else []


def _contents(data: bytes, name: bytes, offset: int) -> int:
    """Where the contents of record ``name`` begin: behind a header that says the same."""
    header = _unpack(_LOCAL, b"PK\x03\x04", data, offset)
    if header is None or header[2] != _STORED:
        raise _foreign(f"record {name!r} is not where the directory says")
    start = offset + _LOCAL.size
    if data[start : start + header[8]] != name:
        raise _foreign(f"record {name!r} has another name inside")
    return start + header[8] + header[9]


# --- the pickle ----------------------------------------------------------------------------------


def _opcodes(pickle: bytes) -> Iterator[tuple[str, Any]]:
    try:
        for opcode, value, _ in pickletools.genops(pickle):
            yield opcode.name, value
    except (ValueError, OverflowError, LookupError, struct.error) as error:
        raise ValueError(f"torch cannot read it (its pickle is damaged: {error})") from error


def _storages(pickle: bytes) -> list[tuple[str, str, int]]:
    """Kind, key and number of elements of each storage, by the opcodes alone: nothing is built or called."""
    found, memo = [], dict[int, Any]()
    last: list[Any] = []
    """What was pushed since the last mark; None for what is not a plain value."""
    for name, value in _opcodes(pickle):
        if name == "GLOBAL" and value not in _GLOBALS:
            what = str(value).replace(" ", ".")
            raise ValueError(f"it holds more than tensors and plain values: it asks for {what}")
        if name == "MARK":
            last = []
        elif name in _PUT:
            known = last[-1] if last else None
            memo[value] = None if known is _TUPLE else known
        elif name == "BINPERSID":
            found.append(_storage(last))
            last = [None]
        else:
            plain = value if name in _VALUES else memo.get(value) if name in _GET else None
            last.append(_TUPLE if name == "TUPLE" else plain)
    return found


def _storage(pushed: list[Any]) -> tuple[str, str, int]:
    """One that was asked for as torch.save does it: five values, made a tuple right before."""
    if len(pushed) == 6 and pushed[5] is _TUPLE:
        what, kind, key, _, numel, _ = pushed
        if what == "storage" and kind in _ITEM_BYTES and isinstance(key, str) and isinstance(numel, int):
            return kind, key, numel
    raise ValueError("torch cannot read it (a tensor's memory is not named as torch.save does it)")
