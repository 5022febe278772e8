"""The 32 bytes in front of every message."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..types import Stamp, WireError
from ..version import WIRE_VERSION

MAGIC = b"CD"
NOT_FINITE = 1
"""The sender's gradient held a NaN or an infinity; the rest of the message is zeros."""
FROM_OWNER = 2
"""A shard owner's reduced result rather than a worker's own contribution."""

_LAYOUT = struct.Struct("<2s4BHI2H4I")
HEADER_BYTES = _LAYOUT.size
CHECKSUM_AT = HEADER_BYTES - 4


@dataclass(frozen=True)
class Header:
    """What a message says about itself."""

    indices: int
    values: int
    flags: int
    shard: int
    step: int
    bucket: int
    sender: int
    numel: int
    count: int
    dense: int
    checksum: int = 0

    def pack(self) -> bytes:
        return _LAYOUT.pack(
            MAGIC,
            WIRE_VERSION,
            self.indices,
            self.values,
            self.flags,
            self.shard,
            self.step,
            self.bucket,
            self.sender,
            self.numel,
            self.count,
            self.dense,
            self.checksum,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Raises WireError unless ``data`` begins like a message of this version."""
        if len(data) < HEADER_BYTES:
            raise WireError(f"message of {len(data)} bytes is shorter than its {HEADER_BYTES}-byte header")
        magic, version, *fields = _LAYOUT.unpack(data[:HEADER_BYTES])
        if magic != MAGIC:
            raise WireError(f"not a compressed-ddp message: it begins with {magic!r}, not {MAGIC!r}")
        if version != WIRE_VERSION:
            raise WireError(
                f"message has wire version {version}, this library speaks {WIRE_VERSION}: "
                "install the same release on all workers"
            )
        return cls(*fields)

    def check(self, expected: Header) -> None:
        """Raises WireError naming the first field that is not what the receiver expects."""
        for name in ("indices", "values", "shard", "step", "bucket", "sender", "numel", "dense"):
            mine, theirs = getattr(expected, name), getattr(self, name)
            if mine != theirs:
                raise WireError(f"message from rank {expected.sender}: {name} is {theirs}, expected {mine}")
        if self.flags & ~NOT_FINITE != expected.flags:
            raise WireError(f"message from rank {expected.sender}: unknown flags {self.flags:#04x}")
        if self.flags & NOT_FINITE and self.count:
            raise WireError(
                f"message from rank {expected.sender}: not finite, and yet it has {self.count} entries"
            )
        if self.count > expected.count:
            raise WireError(
                f"message from rank {expected.sender}: {self.count} entries, room for {expected.count}"
            )


def stamped(stamp: Stamp, indices: int, values: int, numel: int, count: int, dense: int) -> Header:
    """The header of a message made at ``stamp``."""
    return Header(
        indices=indices,
        values=values,
        flags=FROM_OWNER if stamp.phase else 0,
        shard=stamp.shard & 0xFFFF,
        step=stamp.step & 0xFFFFFFFF,
        bucket=stamp.bucket & 0xFFFF,
        sender=stamp.sender & 0xFFFF,
        numel=numel,
        count=count,
        dense=dense,
    )
