"""The hot operations, one signature each.

``reference`` is plain torch and runs on any device; ``native`` is C++ for contiguous CPU tensors
and returns the same bits. ``kernels_for`` picks one by tensor, ``describe`` says which one and
why. Nothing above this package knows which one runs. ``COMPRESSED_DDP_KERNELS=reference`` leaves
the extension alone, ``=native`` insists on it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ..layout import Partition, Quota
from . import reference
from .reference import CodedEntries

VARIABLE = "COMPRESSED_DDP_KERNELS"

logger = logging.getLogger("compressed_ddp")


class Kernels(Protocol):
    """The operations a backend provides. Callers own every buffer; inputs are contiguous."""

    def topk_indices(self, flat: Tensor, k: int) -> Tensor:
        """Positions of the k largest magnitudes, increasing; ties go to the lower index."""
        ...

    def take_topk(
        self,
        residual: Tensor | None,
        gradient: Tensor,
        out: Tensor,
        part: Partition,
        *,
        exact: bool = True,
    ) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        """``out = residual + gradient`` less each shard's largest entries, which are returned.

        Returns ``(values, local indices)`` for each shard, and whether the sum was finite; where
        it was not, nothing is taken and ``out`` is without meaning. ``out`` may be ``residual``.
        ``exact=False`` may take somewhat fewer, and not quite the largest.
        """
        ...

    def finite_sum(self, residual: Tensor | None, gradient: Tensor) -> bool:
        """Whether ``residual + gradient`` is finite everywhere. Reads only."""
        ...

    def accumulate_(
        self, out: Tensor, part: Partition, pieces: Sequence[tuple[int, Tensor, Tensor]], scale: float
    ) -> None:
        """``out = 0``, then ``out[position] += value * scale`` for each piece in order.

        A piece is ``(shard, values, local indices)`` with strictly increasing indices.
        """
        ...

    def sum_coded_(
        self,
        out: Tensor,
        part: Partition,
        messages: Sequence[CodedEntries],
        values: int,
        scale: float,
    ) -> None:
        """As ``accumulate_``, from entries as they travel in value format ``values``.

        All of them are checked first; WireError leaves ``out`` as it was.
        """
        ...

    def put_difference_(
        self, out: Tensor, part: Partition, shard: int, indices: Tensor, a: Tensor, b: Tensor
    ) -> None:
        """``out[position] = a - b`` for a shard's entries."""
        ...

    def ef_encode(self, indices: Tensor, numel: int, capacity: int, out: Tensor | None = None) -> Tensor: ...

    def ef_decode(self, data: Tensor, numel: int, capacity: int, count: int) -> Tensor: ...

    def log_encode(self, values: Tensor, bits: int, out: Tensor | None = None) -> Tensor: ...

    def log_decode(self, data: Tensor, bits: int, count: int) -> Tensor: ...

    def checksum(self, message: Tensor, skip: int = -1) -> int:
        """A message's 32-bit check, its 32-bit word ``skip`` taken as zero."""
        ...

    def fingerprint(self, data: Tensor) -> int:
        """A 64-bit check of contiguous bytes, a multiple of 4 of them: no change of one word goes unseen."""
        ...


class _Choice(NamedTuple):
    native: Kernels | None
    reason: str


@functools.cache
def _choice() -> _Choice:
    """Looked up once, at first use: importing the package loads nothing and reads nothing."""
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "reference", "native"):
        raise ValueError(f"{VARIABLE}={wish!r}: use 'reference' or 'native', or leave it unset")
    if wish == "reference":
        return _Choice(None, f"{VARIABLE}=reference")
    try:
        native = importlib.import_module(".native", __package__)
    except ImportError as error:
        built = importlib.util.find_spec("._native", __package__) is not None
        reason = f"the extension does not load: {error}" if built else "the extension was not built"
        if wish == "native":
            raise ImportError(
                f"{VARIABLE}=native, but {reason}; install a C++ compiler and reinstall the package, or "
                "unset the variable"
            ) from error
        logger.warning(
            "compressed-ddp runs on torch operations: %s. Selection is many times slower on CPUs; install a "
            "C++ compiler and reinstall the package",
            reason,
        )
        return _Choice(None, reason)
    return _Choice(cast(Kernels, native), "C++ for float32 on CPU")


_NATIVE_TYPES = (torch.float32, torch.uint8, torch.int64)  # sums, messages, indices


def kernels_for(tensor: Tensor) -> Kernels:
    """The implementation that serves ``tensor``: native for contiguous CPU tensors, if it is there."""
    if tensor.is_cpu and tensor.is_contiguous() and tensor.dtype in _NATIVE_TYPES:
        return _choice().native or reference
    return reference


def describe(device: torch.device | None = None) -> str:
    """Which kernels run for gradients on ``device``, and why."""
    if device is not None and device.type != "cpu":
        return f"reference (torch operations on {device.type})"
    native, reason = _choice()
    if native is None:
        return f"reference (torch operations; {reason})"
    from .native import isa

    return f"native ({reason}, {isa()})"


def same_bits() -> bool | None:
    """Whether both kernels agree on small steps from selection to sum; None without the native ones."""
    native = _choice().native
    if native is None:
        return None
    generator = torch.Generator().manual_seed(0)
    residual, gradient = torch.randn(
        2, 50_000, generator=generator, dtype=torch.float32, device="cpu"
    ).unbind()
    part = Partition(50_000, 3, tuple((Quota(100, 16_600, 165),) for _ in range(3)))
    return all(
        _step(native, residual, gradient, part, exact) == _step(reference, residual, gradient, part, exact)
        for exact in (True, False)
    )


def _step(kernels: Kernels, residual: Tensor, gradient: Tensor, part: Partition, exact: bool) -> list[bytes]:
    """Everything that one small step gives, as bytes: every operation but for the plain ones."""
    out, total = torch.empty_like(gradient), torch.empty_like(gradient)
    taken, _ = kernels.take_topk(residual, gradient, out, part, exact=exact)
    results: list[Tensor] = []
    messages: dict[int, list[CodedEntries]] = {code: [] for code in range(5)}
    pieces = []
    for shard, (values, indices) in enumerate(taken):
        local, count = part.local_numel(shard), values.numel()
        packed = kernels.ef_encode(indices, local, count)
        results += [packed, indices, kernels.ef_decode(packed, local, count, count)]
        for code, coded in messages.items():
            if code in reference.FLOATS:
                data = values.to(reference.FLOATS[code]).view(torch.uint8)
            else:
                data = kernels.log_encode(values, reference.LOG_BITS[code])
                seen = kernels.log_decode(data, reference.LOG_BITS[code], count)
            coded.append(CodedEntries(shard, packed, data, local, count, count))
        kernels.put_difference_(out, part, shard, indices, values, seen)
        pieces.append((shard, seen, indices))
        results.append(data)
    kernels.accumulate_(total, part, pieces, 0.25)
    results += [out.clone(), total.clone()]
    for code, coded in messages.items():
        kernels.sum_coded_(total, part, coded, code, 1 / 3)
        results.append(total.clone())
    data = total.view(torch.uint8)
    sums = kernels.checksum(data, 7), kernels.fingerprint(data), kernels.finite_sum(out, gradient)
    return [bytes(result.view(torch.uint8).tolist()) for result in results] + [str(sums).encode()]


__all__ = ["CodedEntries", "Kernels", "describe", "kernels_for", "same_bits"]
