"""A whole message: header, indices, values, and the small tensors that travel with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import kernels_for
from ..types import NO_STAMP, Payload, Stamp, WireError
from .header import CHECKSUM_AT, HEADER_BYTES, NOT_FINITE, Header, stamped
from .indices import INDEX_FORMATS, IndexFormat
from .values import ValueFormat, value_format


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
        message = out
        if message is None:
            size = self.nbytes(numel, k, dense.numel())
            message = torch.zeros(size, dtype=torch.uint8, device=values.device)
        cuts = self._cuts(numel, k, count, dense.numel())
        seed = stamp.private_seed()
        seen, seen_dense = values, dense
        message[cuts[0] : cuts[1]] = self.indices.encode(indices, numel, k)
        if count:
            message[cuts[1] : cuts[2]] = self.values.encode(values, seed)
            seen = self.values.decode(message[cuts[1] : cuts[2]], count)
        if dense.numel():
            message[cuts[3] : cuts[4]] = self.values.encode(dense, seed + 1)
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
        """Check ``message`` against what the receiver expects, then read it.

        Raises WireError, before anything is written anywhere, if it is truncated, damaged,
        foreign, from another step, bucket or sender, or inconsistent in itself.
        """
        if message.numel() != self.nbytes(numel, k, dense):
            raise WireError(
                f"message from rank {stamp.sender} has {message.numel()} bytes, "
                f"expected {self.nbytes(numel, k, dense)}"
            )
        header = Header.unpack(bytes(message[:HEADER_BYTES].tolist()))
        header.check(self._header(stamp, numel, k, dense))
        if header.checksum != _checksum(message):
            raise WireError(f"message from rank {stamp.sender} is damaged: its checksum does not match")
        shape = torch.Size([numel])
        if header.flags & NOT_FINITE:
            nothing = torch.empty(0, device=message.device)
            return Decoded(Payload(nothing, nothing.to(torch.int64), shape), nothing, False)
        cuts = self._cuts(numel, k, header.count, dense)
        indices = self.indices.decode(message[cuts[0] : cuts[1]], numel, k, header.count, stamp)
        values = self.values.decode(message[cuts[1] : cuts[2]], header.count)
        rest = self.values.decode(message[cuts[3] : cuts[4]], dense)
        return Decoded(Payload(values, indices, shape), rest, True)

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


def _write(message: Tensor, at: int, data: bytes) -> None:
    message[at : at + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _checksum(message: Tensor) -> int:
    """The checksum of ``message`` with its checksum field taken as zero."""
    return kernels_for(message).checksum(message, CHECKSUM_AT // 4)
