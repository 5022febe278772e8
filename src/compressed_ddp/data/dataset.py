"""What a dataset is to a training loop: two splits in memory, asked for batches by index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Split(Protocol):
    """One part of a dataset, in memory."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """The examples at ``indices`` as new tensors: inputs, int64 targets.

        Inputs are normalised float32 images or int64 tokens. With a ``generator`` the batch is for
        training, and augmented where the dataset does that; all randomness is the generator's.
        """
        ...


@dataclass(frozen=True)
class Subset:
    """The examples of ``split`` at ``indices``, numbered from 0."""

    split: Split
    indices: Tensor

    def __len__(self) -> int:
        return self.indices.numel()

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        return self.split.batch(self.indices[indices], generator)


@dataclass(frozen=True)
class Dataset:
    """A training split, a test split, and what a model has to know about them."""

    name: str
    kind: str
    """``image`` (classify) or ``text`` (predict the next byte)."""
    shape: tuple[int, ...]
    """Of one input: (channels, height, width), or (block,)."""
    classes: int
    train: Split
    test: Split
    about: str
    """What was really loaded, in words, for logs and reports."""
