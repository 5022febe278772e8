"""How a message says which entries it carries: three ways."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..kernels import kernels_for
from ..kernels.reference import ef_nbytes
from ..types import Stamp, WireError


class IndexFormat(Protocol):
    """``capacity`` is fixed by the bucket; a message may carry fewer entries (``count``)."""

    code: int

    def nbytes(self, numel: int, capacity: int) -> int: ...

    def encode(self, indices: Tensor, numel: int, capacity: int, out: Tensor) -> None:
        """Write ``nbytes`` bytes to ``out``."""
        ...

    def decode(self, data: Tensor, numel: int, capacity: int, count: int, stamp: Stamp) -> Tensor:
        """Strictly increasing indices below ``numel``; raises WireError for anything else."""
        ...


class _Implied:
    """Formats whose indices both sides know: nothing travels."""

    def nbytes(self, numel: int, capacity: int) -> int:
        return 0

    def encode(self, indices: Tensor, numel: int, capacity: int, out: Tensor) -> None:
        """Nothing to write."""


class All(_Implied):
    """Every element, in order."""

    code = 0

    def decode(self, data: Tensor, numel: int, capacity: int, count: int, stamp: Stamp) -> Tensor:
        if count != numel:
            raise WireError(f"a full message of {numel} elements carries {count}")
        return torch.arange(numel, device=data.device)


class EliasFano:
    """Any increasing index set, within half a bit an entry of the least possible."""

    code = 1

    def nbytes(self, numel: int, capacity: int) -> int:
        return ef_nbytes(numel, capacity)

    def encode(self, indices: Tensor, numel: int, capacity: int, out: Tensor) -> None:
        kernels_for(indices).ef_encode(indices, numel, capacity, out)

    def decode(self, data: Tensor, numel: int, capacity: int, count: int, stamp: Stamp) -> Tensor:
        return kernels_for(data).ef_decode(data, numel, capacity, count)


class Seeded(_Implied):
    """A random set that every worker draws from the same seed."""

    code = 2

    def decode(self, data: Tensor, numel: int, capacity: int, count: int, stamp: Stamp) -> Tensor:
        if count != capacity:
            raise WireError(f"a seeded message of {capacity} entries carries {count}")
        return seeded_indices(numel, capacity, stamp, data.device)


def seeded_indices(numel: int, k: int, stamp: Stamp, device: torch.device) -> Tensor:
    """k distinct indices below ``numel``, increasing, the same for every sender and device."""
    generator = torch.Generator().manual_seed(stamp.shared_seed())
    return torch.randperm(numel, generator=generator, device="cpu")[:k].sort().values.to(device)


ELIAS_FANO = EliasFano()
INDEX_FORMATS: dict[str, IndexFormat] = {
    "all": All(),
    "elias_fano": ELIAS_FANO,
    "seeded": Seeded(),
}
