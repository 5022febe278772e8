"""When a step ends: DDP's buckets become ready one after the other, and each is then synchronised in turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .emulate import layers, model_shapes, scaled_shapes

ELEMENT = 4
"""Bytes of a float32."""


class Bucket(NamedTuple):
    """A part of the gradients that is synchronised at once."""

    elements: int
    ready: float
    """Seconds after backward began."""


def fill_buckets(shapes: Sequence[torch.Size], cap: float, compute: float) -> list[Bucket]:
    """The buckets of ``cap`` bytes that DDP fills in a backward pass of ``compute`` seconds.

    Gradients come from the last layer to the first, all layers take the same time (``EmulatedModel``),
    and the tensor that fills a bucket is its last.
    """
    groups, found, held = layers(shapes), [], 0
    for done, group in enumerate(reversed(groups), 1):
        ready = compute * done / len(groups)
        for at in group:
            held += shapes[at].numel()
            if ELEMENT * held >= cap:
                found.append(Bucket(held, ready))
                held = 0
    return [*found, Bucket(held, compute)] if held else found


def buckets_of(
    model: str, elements: int | None, bucket_mb: float, compute: float, *, one: bool = False
) -> list[Bucket]:
    """The buckets of a model, scaled with it to ``elements``; or a single one, which is ready at the end."""
    full = model_shapes(model)
    shapes = full if elements is None else scaled_shapes(full, elements)
    total, whole = (sum(shape.numel() for shape in each) for each in (shapes, full))
    if one:
        return [Bucket(total, compute)]
    return fill_buckets(shapes, bucket_mb * 2**20 * total / whole, compute)


def step_seconds(buckets: Iterable[Bucket], work: Iterable[float]) -> float:
    """When the last bucket is done. Each takes its ``work`` once it is ready and the one before is done."""
    now = 0.0
    for bucket, seconds in zip(buckets, work, strict=True):
        now = max(now, bucket.ready) + seconds
    return now
