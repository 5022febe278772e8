"""What every compressor shares: selection is the only part that a child must write."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..kernels import kernels_for
from ..kernels.reference import all_finite, take_selected
from ..layout import Partition
from ..types import Payload, Stamp, check_ratio, unknown_name
from ..wire import SPARSE_VALUES, MessageCodec


@dataclass
class CompressStats:
    """What one compressor has done so far: calls, bytes in, bytes as they would travel, time."""

    total_calls: int = 0
    total_bytes_original: int = 0
    total_bytes_compressed: int = 0
    total_time_ms: float = 0.0

    def add(self, original: int, compressed: int, seconds: float) -> None:
        """Count one call."""
        self.total_calls += 1
        self.total_bytes_original += original
        self.total_bytes_compressed += compressed
        self.total_time_ms += seconds * 1e3

    def compression_ratio(self) -> float:
        """Percent of bandwidth saved: 0 for nothing (or no call yet), 99 for a hundredth left."""
        if self.total_bytes_original == 0:
            return 0.0
        return 100.0 * (1.0 - self.total_bytes_compressed / self.total_bytes_original)


class BaseCompressor(ABC):
    """Chooses entries (``select``) and fixes how they travel (``codec``).

    A message is the chosen entries in the codec's value format. What rounding loses is not lost:
    whoever keeps a residual puts it there (see ``take_``).
    """

    name: ClassVar[str]
    index_format: ClassVar[str] = "elias_fano"
    value_formats: ClassVar[tuple[str, ...]] = SPARSE_VALUES
    """Formats the values may travel in."""
    collectives: ClassVar[tuple[str, ...]] = ("allgather", "sharded")
    """Ways this compressor can be exchanged; ``auto`` chooses among them by bytes."""
    scopes: ClassVar[tuple[str, ...]] = ("bucket", "tensor")
    small_tensors_apart: ClassVar[bool] = True
    """Whether tensors below ``min_compress_numel`` travel whole beside the chosen entries."""
    in_place: ClassVar[bool] = False
    """Whether ``take_parts`` may be given the residual itself as ``out``: it fails before it writes."""
    adapts: ClassVar[bool] = False
    """Whether it seeks the largest entries in ranges, so that shares may differ from range to range."""
    fills: ClassVar[bool] = True
    """Whether it sends as many entries as a message has room for."""
    says_zero: ClassVar[bool] = True
    """Whether a message can say that there is nothing to send for an entry."""
    contraction: bool = True
    """Compressing never leaves more error than there was signal, so error feedback converges."""
    unbiased: bool = False
    """The expectation of what is sent is the gradient itself, so it works without a residual."""

    def __init__(self, ratio: float = 1.0, *, values: str = "fp32", seed: int = 0) -> None:
        check_ratio(ratio)
        if values not in self.value_formats:
            raise unknown_name(f"value format for {self.name!r}:", values, self.value_formats)
        self.ratio = float(ratio)
        self.factors: Mapping[str, float] = {}
        """Parameters that send so many times ``ratio``; one that is not named sends ``ratio``. Replaced as a
        whole when they change."""
        self.values = values
        self.seed = seed
        self.codec = MessageCodec.named(self.index_format, values)
        self.stats = CompressStats()

    @property
    def sparse(self) -> bool:
        """Whether entries are chosen, so that ``ratio`` means something; it may change between calls."""
        return self.index_format != "all"

    def options(self) -> dict[str, Any]:
        """The settings that all workers must share, under their names in CompressionConfig."""
        return {"ratio": self.ratio, "values": self.values, "seed": self.seed}

    def feedback(self, asked: bool | None) -> bool:
        """Whether what is not sent is kept: as ``asked``, or what this compressor is made for."""
        return not self.unbiased if asked is None else asked

    def quota(self, numel: int) -> int:
        """k: how many of ``numel`` entries a message has room for; at least one, if there are any."""
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    @abstractmethod
    def select(self, flat: Tensor, k: int, stamp: Stamp) -> Tensor:
        """At most ``k`` positions in ``flat``, strictly increasing."""

    def scale(self, values: Tensor, k: int, numel: int) -> Tensor:
        """What is sent for the chosen ``values``; the values themselves, but for unbiased Random-K."""
        return values

    def compress(self, tensor: Tensor) -> Payload:
        """The entries that would travel. Reads ``tensor`` only.

        Where the rounding is the method (QSGD, sign and so on) the values are rounded; where it is
        a setting of the wire (``values=``) they are as they were.
        """
        start = time.perf_counter()
        check_gradient(tensor)
        flat = tensor.detach().reshape(-1).to(torch.float32)
        if not all_finite(flat):
            raise ValueError("cannot compress a tensor with NaN or infinite entries; skip the step")
        n, k = flat.numel(), self.quota(flat.numel())
        stamp = Stamp(self.seed, self.stats.total_calls)
        indices = self.select(flat, k, stamp)
        payload = Payload(self.scale(flat[indices], k, n), indices, tensor.shape)
        seen = self.rounded(payload, stamp)
        self.stats.add(n * tensor.element_size(), self.nbytes(tensor.shape), time.perf_counter() - start)
        return payload._replace(values=seen)

    def nbytes(self, shape: torch.Size) -> int:
        """Bytes that one tensor of ``shape`` takes on the wire, by itself."""
        return self.codec.nbytes(shape.numel(), self.quota(shape.numel()))

    def rounded(self, payload: Payload, stamp: Stamp) -> Tensor:
        """``payload``'s values after the rounding that belongs to the method itself; by default none."""
        return payload.values

    def decompress(self, values: Tensor, indices: Tensor, shape: torch.Size) -> Tensor:
        """A new tensor of ``shape`` with ``values`` at ``indices`` and zeros elsewhere."""
        shape = torch.Size(shape)
        n = shape.numel()
        if values.numel() != indices.numel():
            raise ValueError(f"{values.numel()} values for {indices.numel()} indices")
        if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= n):
            raise ValueError(f"indices reach outside a tensor of {n} elements")
        out = torch.zeros(n, device=values.device, dtype=values.dtype)
        out[indices] = values
        return out.view(shape)

    def take_(self, residual: Tensor, gradient: Tensor, *, out: Tensor | None = None) -> Payload:
        """``residual += gradient``, less what is returned: nothing is lost, only delayed.

        ``residual`` must be float32 and have the gradient's shape. A gradient that is not finite
        raises ValueError and leaves ``residual`` as it was. With ``out`` (like ``residual``) the
        result is written there and ``residual`` is only read: that takes one pass over memory,
        where in place a first one must make sure that the sum is finite.
        """
        start = time.perf_counter()
        check_gradient(gradient)
        _check_residual("residual", residual, gradient)
        as_is = type(self).scale is BaseCompressor.scale and type(self).rounded is BaseCompressor.rounded
        n, stamp = gradient.numel(), Stamp(self.seed, self.stats.total_calls)
        old = residual.reshape(-1).contiguous()
        flat = gradient.detach().reshape(-1).to(torch.float32).contiguous()
        if out is not None:
            _check_residual("out", out, gradient)
            _check_beside(out, residual)
            new = out.view(-1)
        elif self.in_place and old.data_ptr() == residual.data_ptr():
            new = old
            if not kernels_for(old).finite_sum(old, flat):
                raise ValueError(_NOT_FINITE)
        else:
            new = torch.empty_like(old)
        part = Partition.whole(n, self.quota(n))
        taken, finite = self.take_parts(old, flat, new, part, stamp)
        if not finite:
            raise ValueError(_NOT_FINITE)
        values, indices = taken[0]
        sent = Payload(values, indices, gradient.shape)
        if not as_is:
            sent = sent._replace(values=self.scale(values, indices.numel(), n))
            sent = sent._replace(values=self.rounded(sent, stamp))
            new[indices] = values - sent.values
            if not all_finite(new):
                raise ValueError("what would be sent is not finite; the residual was left as it was")
        if out is None and new is not old:
            residual.copy_(new.view(residual.shape))
        self.stats.add(n * gradient.element_size(), self.nbytes(gradient.shape), time.perf_counter() - start)
        return sent

    def take_parts(
        self, residual: Tensor | None, gradient: Tensor, out: Tensor, part: Partition, stamp: Stamp
    ) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        """``out = residual + gradient`` less each shard's choice, which is returned.

        ``(values, local indices)`` for each shard, and whether the sum was finite; if it was
        not, nothing is taken and ``out`` means nothing. ``residual`` and ``gradient`` are read.
        """
        first = stamp.shard

        def pick(shard: int, flat: Tensor, k: int) -> Tensor:
            return self.select(flat, k, stamp._replace(shard=first + shard))

        return take_selected(residual, gradient, out, part, pick)


_NOT_FINITE = "the gradient is not finite; the residual was left as it was"


def _check_residual(name: str, residual: Tensor, gradient: Tensor) -> None:
    if residual.shape != gradient.shape or residual.dtype != torch.float32:
        raise ValueError(
            f"{name} is {residual.dtype} {tuple(residual.shape)}, expected float32 {tuple(gradient.shape)}"
        )


def _check_beside(out: Tensor, residual: Tensor) -> None:
    """``out`` must be memory of its own, or a gradient that is not finite would cost the residual."""
    if out.untyped_storage().data_ptr() == residual.untyped_storage().data_ptr() and out.numel():
        raise ValueError("out shares memory with residual; leave it out to work in place")
    if not out.is_contiguous() or out.device != residual.device:
        raise ValueError(f"out must be contiguous and on {residual.device}, like residual")


def check_gradient(tensor: Tensor) -> None:
    """Raises TypeError for what cannot be compressed, and says what to do instead."""
    if tensor.layout != torch.strided:
        raise TypeError(
            f"cannot compress a gradient of layout {tensor.layout}; build the embedding with sparse=False, "
            "or keep that parameter out of this DDP model"
        )
    if not tensor.dtype.is_floating_point:
        raise TypeError(
            f"cannot compress a gradient of dtype {tensor.dtype}; only real floating point gradients "
            "have magnitudes to choose by (view complex parameters as real)"
        )
