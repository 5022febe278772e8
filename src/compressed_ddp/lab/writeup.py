"""The original write-up's two ways of sending Top-K gradients, as DDP hooks, to be measured beside ours.

Both choose with ``torch.topk`` in each bucket, which is kinder than its call for each parameter, and
run on a thread of their own while backward goes on, which it did not do. Both keep what this worker
did not send (compensated less its own sparse part), so that they differ in how they travel alone.
"""

# No `from __future__ import annotations` here: DDP inspects the hook's annotations as objects.

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ..communication import TorchTransport
from ..communication.worker import Worker
from ..types import check_ratio

ENTRY_BYTES = 12
"""A float32 value and an int64 index."""

Exchange = Callable[[TorchTransport, Tensor, Tensor, Tensor], None]
"""Overwrites its second argument with the mean of all workers' ``values`` at ``indices``."""


def sparse_mean_(transport: TorchTransport, out: Tensor, values: Tensor, indices: Tensor) -> None:
    """All-gather of 12-byte entries: every worker receives everybody's, (P - 1) * k of them."""
    k = indices.numel()
    row = torch.zeros(8 * k + 8 * math.ceil(4 * k / 8), dtype=torch.uint8)  # gloo wants rows of 8 bytes
    row[: 8 * k].view(torch.int64).copy_(indices)
    row[8 * k : ENTRY_BYTES * k].view(torch.float32).copy_(values)
    rows = torch.empty(transport.world_size, row.numel(), dtype=torch.uint8)
    transport.all_gather(rows, row)
    out.zero_()
    for theirs in rows:  # in rank order, so that all workers get the same bits
        out.index_add_(
            0, theirs[: 8 * k].view(torch.int64), theirs[8 * k : ENTRY_BYTES * k].view(torch.float32)
        )
    out /= transport.world_size


def dense_mean_(transport: TorchTransport, out: Tensor, values: Tensor, indices: Tensor) -> None:
    """Decompressed first, then a dense all-reduce of a tensor that is nearly all zeros."""
    out.zero_()
    out[indices] = values
    transport.all_reduce(out)
    out /= transport.world_size


class WriteUpSync:
    """The state of a write-up hook: residuals, a thread and a process group of its own.

    Residuals belong to a bucket as it is laid out; when DDP lays buckets out anew, once, after the
    first step, they start from nothing.
    """

    def __init__(self, model: DistributedDataParallel, ratio: float, exchange: Exchange, timeout: float):
        check_ratio(ratio)
        self._ratio, self._exchange = ratio, exchange
        self._transport = TorchTransport(model.process_group, timeout)
        self._worker = Worker(self._transport.alive, "write-up")
        self._residuals: dict[tuple[int, ...], Tensor] = {}

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Queue ``bucket`` for the thread; the future completes with its own buffer."""
        buffer, key = bucket.buffer(), tuple(map(id, bucket.parameters()))
        if bucket.index() == 0 and key not in self._residuals:
            self._residuals.clear()
        future: torch.futures.Future[Tensor] = torch.futures.Future()

        def work() -> None:
            self._mean_(buffer, self._residuals.setdefault(key, torch.zeros_like(buffer)))

        self._worker.promise(future, buffer, work, lambda _: self._transport.close(failed=True))
        return future

    def _mean_(self, gradient: Tensor, residual: Tensor) -> None:
        """Overwrite ``gradient`` with the mean of what the workers send; ``residual`` with what is left."""
        compensated = residual.add_(gradient)
        k = max(1, math.ceil(self._ratio * gradient.numel()))
        indices = torch.topk(compensated.abs(), k, sorted=False).indices
        values = compensated[indices]
        compensated[indices] = 0
        self._exchange(self._transport, gradient, values, indices)

    def close(self) -> None:
        """End the thread and give the process group back. Safe to call twice."""
        self._worker.close()
        self._transport.close()


def writeup_hook(state: WriteUpSync, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook that ``attach_writeup`` registers."""
    return state.on_bucket(bucket)


def attach_writeup(
    model: DistributedDataParallel, ratio: float, exchange: Exchange, timeout: float = 60.0
) -> WriteUpSync:
    """Make ``model`` synchronise as the write-up has it. All ranks call it; keep what it returns."""
    sync = WriteUpSync(model, ratio, exchange, timeout)
    try:
        model.register_comm_hook(sync, writeup_hook)
    except BaseException:
        sync.close()
        raise
    return sync
