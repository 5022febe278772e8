"""The hot operations, one signature each.

``reference`` is plain torch and runs on any device. A native implementation has the same
signatures and must return the same bits; ``kernels_for`` picks one by tensor, ``describe`` says
which one and why. Nothing above this package knows which one runs.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..layout import Partition
from . import reference


class Kernels(Protocol):
    """The operations a backend provides. Callers own every buffer; inputs are contiguous."""

    def topk_indices(self, flat: Tensor, k: int) -> Tensor:
        """Positions of the k largest magnitudes, increasing; ties go to the lower index."""
        ...

    def take_topk(
        self, residual: Tensor | None, gradient: Tensor, out: Tensor, part: Partition
    ) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        """``out = residual + gradient`` less each shard's largest entries, which are returned.

        Returns ``(values, local indices)`` for each shard, and whether the sum was finite; where
        it was not, nothing is taken and ``out`` is without meaning. ``out`` may be ``residual``.
        """
        ...

    def ef_encode(self, indices: Tensor, numel: int, capacity: int) -> Tensor: ...

    def ef_decode(self, data: Tensor, numel: int, capacity: int, count: int) -> Tensor: ...

    def log_encode(self, values: Tensor, bits: int) -> Tensor: ...

    def log_decode(self, data: Tensor, bits: int, count: int) -> Tensor: ...

    def checksum(self, message: Tensor) -> int: ...


def kernels_for(tensor: Tensor) -> Kernels:
    """The implementation that serves ``tensor``'s device and dtype."""
    return reference


def describe() -> str:
    """Which kernels run, and why."""
    return "reference (torch operations; this build has no native extension)"


__all__ = ["Kernels", "describe", "kernels_for"]
