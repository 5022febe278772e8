"""PowerSGD: a low-rank approximation of each weight matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..types import Payload, Stamp
from .dense import FullCompressor


class PowerSGDCompressor(FullCompressor):
    """Send a rank-r approximation of each matrix, by one step of power iteration.

    Cost: r * (rows + columns) floats a matrix in two rounds, and two matrix products each.
    Vectors and small matrices travel whole. The two rounds are communication/lowrank.py's, over
    plain all-reduce; ``compress`` here is what one worker alone would send. Vogels et al.,
    "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019.
    """

    name = "powersgd"
    value_formats = ("fp32",)
    collectives = ("lowrank",)

    def __init__(self, rank: int = 2, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank!r}")
        self.rank = rank

    def options(self) -> dict[str, Any]:
        return super().options() | {"rank": self.rank}

    def nbytes(self, shape: torch.Size) -> int:
        rows, columns = matrix_shape(shape)
        low = self.rank * (rows + columns)
        return 4 * (low if worthwhile(rows, columns, self.rank) else shape.numel())

    def rounded(self, payload: Payload, stamp: Stamp) -> Tensor:
        rows, columns = matrix_shape(payload.shape)
        if not worthwhile(rows, columns, self.rank):
            return payload.values
        matrix = payload.values.view(rows, columns)
        start = first_factor(columns, self.rank, Stamp(self.seed), matrix.device)
        with no_autocast(matrix.device):
            left = orthogonal(matrix @ start)
            return (left @ (left.T @ matrix)).view(-1)


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """A weight as a matrix: its first dimension against all the others."""
    if len(shape) < 2:
        return 1, shape.numel()
    return shape[0], shape[1:].numel()


def worthwhile(rows: int, columns: int, rank: int) -> bool:
    """Whether the factors are smaller than the matrix."""
    return rank * (rows + columns) < rows * columns


def first_factor(columns: int, rank: int, stamp: Stamp, device: torch.device) -> Tensor:
    """The right factor to begin with, the same on all workers."""
    generator = torch.Generator().manual_seed(stamp.shared_seed())
    return torch.randn(columns, rank, generator=generator, dtype=torch.float32, device="cpu").to(device)


def no_autocast(device: torch.device) -> torch.autocast:
    """For products of float32: within a loop's autocast they would be rounded to 16 bits."""
    return torch.autocast(device.type, enabled=False)


def orthogonal(matrix: Tensor) -> Tensor:
    """An orthonormal basis of the columns of ``matrix``."""
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis
