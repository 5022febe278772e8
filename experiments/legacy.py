"""The write-up's own residual, to measure what it costs. Not part of the library, on purpose.

It subtracts from a worker's residual the average of all workers' messages, where the law subtracts what
this worker sent itself: e' = e + g - mean instead of e' = e + g - sent. Whatever the others sent is then owed
back, and what this worker sent is owed again but for its P-th part.

Importing this registers a compressor and a collective, both under the name `legacy_average_error`: the way
in which anybody may add a method without touching the library.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressed_ddp.communication import COLLECTIVES
from compressed_ddp.communication.collectives import AllGather
from compressed_ddp.compression.factory import COMPRESSORS
from compressed_ddp.compression.topk import TopKCompressor
from compressed_ddp.types import Clock, Held, Slot, Stamp

NAME = "legacy_average_error"


class LegacyTopK(TopKCompressor):
    """Top-K whose residual is the write-up's."""

    name = NAME
    collectives = (NAME,)


class AverageError(AllGather):
    """All-gather; afterwards the residual lacks the mean, and not what was sent."""

    def mean_(
        self,
        bucket: Tensor,
        memory: Slot | None,
        stamp: Stamp,
        clock: Clock,
        held: Held = (),
        sent: list[Tensor] | None = None,
    ) -> bool:
        wanted = bucket.to(torch.float32, copy=True)
        finite = super().mean_(bucket, memory, stamp, clock, held, sent)
        if memory is not None and finite:
            torch.add(memory.old, wanted, out=memory.new).sub_(bucket)
        return finite


COMPRESSORS[NAME] = LegacyTopK
COLLECTIVES[NAME] = AverageError
