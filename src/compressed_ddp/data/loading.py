"""Datasets by name, and which part of them: a hold-out for choosing settings, a limit for small runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .catalogue import describe
from .dataset import Dataset, Subset
from .images import cifar10, digits, idx_images
from .text import text as load_text


def load(
    name: str,
    data_dir: str | Path = "data",
    *,
    text: str | Path | None = None,
    block: int = 128,
    validation: int = 0,
    limit: int | None = None,
) -> Dataset:
    """Dataset ``name`` in memory, from files under ``data_dir`` where it needs any.

    ``text`` and ``block`` are for dataset ``text``. With ``validation`` > 0 that many *training*
    examples are held out and stand in for the test set, so that settings can be chosen without
    looking at it: the same ones in every run whatever its seed, for text the last of the training
    bytes. ``limit`` keeps that many training examples of what is left, again always the same.
    """
    describe(name)
    if text is not None and name != "text":
        raise ValueError(f"text={str(text)!r} goes with dataset 'text', not with {name!r}; leave it out")
    if name == "text":
        dataset = load_text(text, block)
    elif name == "digits":
        dataset = digits()
    elif name == "cifar10":
        dataset = cifar10(data_dir)
    else:
        dataset = idx_images(name, data_dir)
    return _part(dataset, validation, limit)


def _part(dataset: Dataset, validation: int, limit: int | None) -> Dataset:
    n = len(dataset.train)
    if not 0 <= validation < n:
        raise ValueError(
            f"validation must be 0 (off) to {n - 1:,}, got {validation}: "
            f"{dataset.name} has {n:,} training examples"
        )
    rest = n - validation
    if limit is not None and not 1 <= limit <= rest:
        raise ValueError(
            f"limit must be 1 to {rest:,}, got {limit}: {dataset.name} has {n:,} training examples, "
            f"{validation:,} of them held out; leave it out for all of them"
        )
    if not validation and limit is None:
        return dataset
    if dataset.kind == "text":
        held, kept = torch.arange(rest, n), _permutation(rest)
    else:
        held, kept = _permutation(n).tensor_split([validation])
    train = Subset(dataset.train, kept[:limit])
    about = f"{dataset.about}; trained on {len(train):,} examples"
    if not validation:
        return replace(dataset, train=train, about=about)
    about += f", tested on {validation:,} held out of the training set"
    return replace(dataset, train=train, test=Subset(dataset.train, held), about=about)


def _permutation(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))
