"""Plain DistributedDataParallel behind the face of GradientSync: the baseline, with a ledger."""

# No `from __future__ import annotations` here: DDP inspects the hook's annotations as objects.

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ..metrics import Ledger


class PlainSync:
    """DDP's own all-reduce, which adds up as without a hook, and a clock beside it.

    The ledger has what a ring moves, computed, and the seconds that backward stood still, measured:
    with gloo, that is; nccl calls its work done when it is queued.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.stats = Ledger("plain DDP", "torch", error_feedback=False, unbiased=True)
        self.loss_scale = 1.0
        self.ratio = 1.0
        self.error: BaseException | None = None
        self._group = model.process_group
        self._world_size = self._group.size()
        model.register_comm_hook(self, timed_all_reduce)

    def set_ratio(self, ratio: float) -> None:
        """Everything is sent, always."""
        raise ValueError("plain DDP sends every entry: it has no ratio to change")

    def residual_norm(self) -> float:
        """Nothing is ever owed."""
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        """Plain DDP remembers nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing back; ValueError if there is something, for then the run was a compressed one."""
        if state:
            raise ValueError(
                "this checkpoint is of a compressed run, with residuals, or of local steps; resume it with "
                "--compress, or --local-steps"
            )

    def close(self) -> None:
        """Nothing to give back."""

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's own all-reduce of ``bucket``."""
        nbytes = bucket.buffer().numel() * bucket.buffer().element_size()
        self.stats.bucket(nbytes, self._world_size)
        ring = 2 * (self._world_size - 1) * nbytes // self._world_size
        self.stats.traffic(ring, ring)
        future = default_hooks.allreduce_hook(self._group, bucket)
        if not bucket.is_last():
            return future
        # Runs on a thread of the process group: it must not hold the last reference to that group,
        # whose end joins its threads. So it knows the ledger, and not this object.
        stats, submitted = self.stats, time.perf_counter()

        def done(result: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            value = result.value()
            stats.close_step(finite=True)
            stats.exposed(time.perf_counter() - submitted)
            return value

        return future.then(done)


def timed_all_reduce(state: PlainSync, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook of plain runs."""
    return state.on_bucket(bucket)
