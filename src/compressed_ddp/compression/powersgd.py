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


# --- the same bits on every processor ------------------------------------------------------
#
# Every worker computes what follows for itself, and replicas must not drift apart. Products and
# factorisations of BLAS and LAPACK round as the processor's instructions suggest, and so does
# torch's sum. One multiplication, addition, division or square root does not: IEEE 754 has it.

_BLOCK = 1 << 16
"""Elements of a product made at a time: they stay in the processor's cache."""


def orthogonal(matrices: Tensor) -> Tensor:
    """An orthonormal basis of the columns of each matrix (..., rows, columns), with fewer columns than rows.

    Gram and Schmidt's, each column twice, which is enough (Giraud et al., 2005). Where a column depends on
    those before it, a unit vector takes its place: a column of zeros would stay zero in all later steps.
    """
    columns = matrices.mT.contiguous()
    largest = columns.abs().amax(-1, keepdim=True)  # squares shall neither overflow nor vanish
    columns = columns / torch.where(largest == 0, 1.0, largest)
    basis = columns[..., :0, :]
    for at in range(columns.shape[-2]):
        column, lost = _beside(columns[..., at, :], basis)
        for place in range(at + 1):  # at least one of so many has enough beside the ``at`` before it
            if not bool(lost.any()):
                break
            unit = torch.zeros_like(column)
            unit[..., place] = 1.0
            other, still = _beside(unit, basis)
            column, lost = torch.where(lost, other, column), lost & still
        column = column / ordered_sum(column * column).sqrt().unsqueeze(-1)
        basis = torch.cat([basis, column.unsqueeze(-2)], -2)
    return basis.mT


def _beside(column: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """What of ``column`` (..., n) is orthogonal to all in ``basis`` (..., k, n), and whether that is nothing.

    What the first pass leaves of a column that depends on them is its rounding: as good a direction as any,
    unless the second takes most of that too. One that is not a number stays so.
    """
    if not basis.shape[-2]:
        return column, (column == 0).all(-1, keepdim=True)
    before = column
    for _ in range(2):
        before = column
        shares = ordered_sum(basis * column.unsqueeze(-2))
        for at in range(basis.shape[-2]):
            column = column - basis[..., at, :] * shares[..., at : at + 1]
    least = before.abs().amax(-1, keepdim=True) * (0.5 / (basis.shape[-2] + 1))
    return column, column.abs().amax(-1, keepdim=True) <= least


def ordered_sum(numbers: Tensor) -> Tensor:
    """The sum over the last dimension, one half added to the other until one number is left."""
    while numbers.shape[-1] > 1:
        half = numbers.shape[-1] // 2
        odd = numbers[..., 2 * half :]
        numbers = numbers[..., :half] + numbers[..., half : 2 * half]
        if odd.shape[-1]:
            numbers[..., :1] += odd
    return numbers[..., 0]


def write_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Overwrite ``out`` with ``left @ right.T``; each product is rounded before it is added, never fused."""
    rights = right.T.contiguous()
    step = max(1, _BLOCK // max(1, right.shape[0]))
    for begin in range(0, left.shape[0], step):
        lefts = left[begin : begin + step]
        total = lefts[:, :1] * rights[0]
        for at in range(1, rights.shape[0]):
            total += lefts[:, at : at + 1] * rights[at]
        out[begin : begin + step] = total
