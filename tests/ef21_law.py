"""What EF21 keeps to, step by step: g_i moves by the worker's own message, and towards what it estimates."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from compressed_ddp.communication.packer import Packer
from compressed_ddp.types import Clock, Held, Slot, Stamp


def astray(target: Tensor, old: Tensor, new: Tensor, message: Tensor) -> float:
    """By how much g_i went elsewhere than ``message`` says, as a share; infinite if away from ``target``."""
    if (target - new).norm() > (target - old).norm() * (1 + 1e-6):
        return math.inf
    return float((new - old - message).abs().max() / max(old.abs().max(), message.abs().max()))


@contextlib.contextmanager
def own_messages() -> Iterator[list[Tensor]]:
    """What this process's own messages decode to, bucket by bucket, as its peers read them."""
    found: list[Tensor] = []
    pack_ = Packer.pack_

    def listening(
        self: Packer,
        gradient: Tensor,
        memory: Slot | None,
        stamp: Stamp,
        clock: Clock,
        held: Held = (),
        sent: list[Tensor] | None = None,
    ) -> Tensor:
        rows = pack_(self, gradient, memory, stamp, clock, held, sent)
        if self.scaled:  # not an owner's result
            shards = range(self.part.shards)
            opened = [(s, self.unpack(rows[s], s, stamp._replace(shard=stamp.shard + s))) for s in shards]
            out = torch.full((self.part.numel,), torch.nan)
            if all(message.finite for _, message in opened):
                self.sum_(out, opened, 1.0)
            found.append(out)
        return rows

    Packer.pack_ = listening  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Packer.pack_ = pack_  # type: ignore[method-assign]


def by_name(messages: list[Tensor], state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The messages of the step that ended in ``state``, which lists its buckets in their order."""
    found: dict[str, Tensor] = {}
    for bucket, message in zip(state["buckets"], messages, strict=True):
        shapes = [torch.Size(shape) for shape in bucket["shapes"]]
        parts = message.split([shape.numel() for shape in shapes])
        found |= {
            name: part.view(shape) for name, part, shape in zip(bucket["names"], parts, shapes, strict=True)
        }
    return found


def handed_over(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether buckets changed: owners then take back from their own g_i what they had not passed on."""
    old, new = ([bucket["names"] for bucket in state["buckets"]] for state in (before, after))
    return bool(old) and old != new
