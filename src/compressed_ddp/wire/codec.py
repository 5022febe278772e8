"""A whole message: header, indices, values, and the small tensors that travel with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import CodedEntries, kernels_for
from ..kernels.reference import FLOATS, LOG_BITS
from ..layout import Partition
from ..types import NO_STAMP, Payload, Stamp, WireError
from .header import CHECKSUM_AT, HEADER_BYTES, NOT_FINITE, Header, stamped
from .indices import ELIAS_FANO, INDEX_FORMATS, IndexFormat
from .values import ValueFormat, value_format

SUMMED_AS_CODED = (*FLOATS, *LOG_BITS)
"""Value formats whose messages are added up without being decoded first."""


class Encoded(NamedTuple):
    """A message, and the values exactly as every receiver will see them."""

    message: Tensor
    values: Tensor
    dense: Tensor


class Decoded(NamedTuple):
    """A checked message. ``finite`` is False where the sender's gradient was not; then it is empty."""

    payload: Payload
    dense: Tensor
    finite: bool


class Opened(NamedTuple):
    """A message from the expected sender, undamaged; its entries are still as they travel."""

    finite: bool
    """False where the sender's gradient was not; then there are no entries and no small values."""
    indices: Tensor
    values: Tensor
    numel: int
    room: int
    entries: int
    dense: Tensor
    """The small values, decoded."""
    stamp: Stamp


@dataclass(frozen=True)
class MessageCodec:
    """One index format and one value format. Message sizes depend on the bucket alone."""

    indices: IndexFormat
    values: ValueFormat

    @classmethod
    def named(cls, indices: str, values: str) -> MessageCodec:
        return cls(INDEX_FORMATS[indices], value_format(values))

    def nbytes(self, numel: int, k: int, dense: int = 0) -> int:
        """Size of a message with room for ``k`` of ``numel`` entries and ``dense`` small values."""
        size = HEADER_BYTES + self.indices.nbytes(numel, k)
        size += self.values.nbytes(k) + self.values.nbytes(dense)
        return -(-size // 8) * 8

    def encode(
        self,
        payload: Payload,
        *,
        k: int | None = None,
        dense: Tensor | None = None,
        stamp: Stamp = NO_STAMP,
        out: Tensor | None = None,
    ) -> Encoded:
        """Reads its arguments only. ``k`` is the room for entries, where it exceeds their number.

        ``out``, zeros of the message's size, becomes the message.
        """
        values, indices, shape = payload
        numel, count = shape.numel(), values.numel()
        k = count if k is None else k
        dense = values.new_empty(0) if dense is None else dense
        size = self.nbytes(numel, k, dense.numel())
        message = torch.zeros(size, dtype=torch.uint8, device=values.device) if out is None else out
        if message.numel() != size:
            raise ValueError(f"out has {message.numel()} bytes, the message has {size}")
        cuts = self._cuts(numel, k, count, dense.numel())
        seed = stamp.private_seed()
        seen, seen_dense = values, dense
        self.indices.encode(indices, numel, k, message[cuts[0] : cuts[1]])
        if count:
            self.values.encode(values, seed, message[cuts[1] : cuts[2]])
            seen = self.values.decode(message[cuts[1] : cuts[2]], count)
        if dense.numel():
            self.values.encode(dense, seed + 1, message[cuts[3] : cuts[4]])
            seen_dense = self.values.decode(message[cuts[3] : cuts[4]], dense.numel())
        self._seal(message, self._header(stamp, numel, count, dense.numel()))
        return Encoded(message, seen, seen_dense)

    def encode_not_finite(self, message: Tensor, numel: int, dense: int, stamp: Stamp) -> None:
        """Make ``message`` (zeros) say: my gradient was not finite, nobody may use this step."""
        header = self._header(stamp, numel, 0, dense)
        self._seal(message, replace(header, flags=header.flags | NOT_FINITE))

    def decode(
        self, message: Tensor, *, numel: int, k: int, dense: int = 0, stamp: Stamp = NO_STAMP
    ) -> Decoded:
        """Check ``message`` against what the receiver expects, then read all of it.

        Raises WireError, before anything is written anywhere, if it is truncated, damaged,
        foreign, from another step, bucket or sender, or inconsistent in itself.
        """
        opened = self.open(message, numel=numel, k=k, dense=dense, stamp=stamp)
        return Decoded(self.read(opened), opened.dense, opened.finite)

    def open(self, message: Tensor, *, numel: int, k: int, dense: int = 0, stamp: Stamp = NO_STAMP) -> Opened:
        """Check ``message``'s size, header and checksum, and read its small values; raises WireError."""
        if message.dtype is not torch.uint8 or message.dim() != 1 or not message.is_contiguous():
            raise TypeError(
                f"a message is a contiguous row of uint8, not {message.dtype} of shape "
                f"{tuple(message.shape)} and strides {message.stride()}"
            )
        with _sent_by(stamp):
            if message.numel() != self.nbytes(numel, k, dense):
                raise WireError(
                    f"message from rank {stamp.sender} has {message.numel()} bytes, "
                    f"expected {self.nbytes(numel, k, dense)}"
                )
            header = Header.unpack(bytes(message[:HEADER_BYTES].tolist()))
            header.check(self._header(stamp, numel, k, dense))
            if header.checksum != _checksum(message):
                raise WireError(f"message from rank {stamp.sender} is damaged: its checksum does not match")
            cuts = self._cuts(numel, k, header.count, dense)
            finite = not header.flags & NOT_FINITE
            small = torch.empty(0, dtype=torch.float32, device=message.device)
            if dense and finite:
                small = self.values.decode(message[cuts[3] : cuts[4]], dense)
        indices, values = message[cuts[0] : cuts[1]], message[cuts[1] : cuts[2]]
        return Opened(finite, indices, values, numel, k, header.count, small, stamp)

    def read(self, opened: Opened) -> Payload:
        """The entries of a message, checked; raises WireError. There are none where it is not finite."""
        _, indices, values, numel, k, count, _, stamp = opened
        shape = torch.Size([numel])
        if not opened.finite:
            nothing = torch.empty(0, dtype=torch.float32, device=values.device)
            return Payload(nothing, nothing.to(torch.int64), shape)
        with _sent_by(stamp):
            at = self.indices.decode(indices, numel, k, count, stamp)
            return Payload(self.values.decode(values, count), at, shape)

    def sum_(
        self, out: Tensor, part: Partition, messages: Sequence[tuple[int, Opened]], scale: float
    ) -> None:
        """Overwrite ``out`` with ``scale`` times the sum of messages, each about a shard of ``part``.

        The entries are checked first: WireError leaves ``out`` as it was. Small values are not in it.
        """
        kernels = kernels_for(out)
        if self.indices is ELIAS_FANO and self.values.code in SUMMED_AS_CODED:
            coded = [
                CodedEntries(shard, m.indices, m.values, m.numel, m.room, m.entries) for shard, m in messages
            ]
            try:
                kernels.sum_coded_(out, part, coded, self.values.code, scale)
            except WireError as error:
                if error.which is not None:
                    error.sender = messages[error.which][1].stamp.sender
                raise
        else:
            payloads = [(shard, self.read(message)) for shard, message in messages]
            pieces = [(shard, payload.values, payload.indices) for shard, payload in payloads]
            kernels.accumulate_(out, part, pieces, scale)

    def _header(self, stamp: Stamp, numel: int, count: int, dense: int) -> Header:
        return stamped(stamp, self.indices.code, self.values.code, numel, count, dense)

    def _cuts(self, numel: int, k: int, count: int, dense: int) -> tuple[int, int, int, int, int]:
        """Where the parts begin: indices, values, end of values, dense values, end."""
        values = HEADER_BYTES + self.indices.nbytes(numel, k)
        rest = values + self.values.nbytes(k)
        return (
            HEADER_BYTES,
            values,
            values + self.values.nbytes(count),
            rest,
            rest + self.values.nbytes(dense),
        )

    @staticmethod
    def _seal(message: Tensor, header: Header) -> None:
        """Write the header, then the checksum over everything else."""
        _write(message, 0, header.pack())
        _write(message, CHECKSUM_AT, _checksum(message).to_bytes(4, "little"))


@contextmanager
def _sent_by(stamp: Stamp) -> Iterator[None]:
    """A WireError out of this block knows who sent the message."""
    try:
        yield
    except WireError as error:
        error.sender = stamp.sender
        raise


def _write(message: Tensor, at: int, data: bytes) -> None:
    message[at : at + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _checksum(message: Tensor) -> int:
    """The checksum of ``message`` with its checksum field taken as zero."""
    return kernels_for(message).checksum(message, CHECKSUM_AT // 4)
