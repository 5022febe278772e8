"""What the processes of a pool do in tests about ranks that fail or are slow."""

from __future__ import annotations

import logging
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compressed_ddp import (
    CompressionConfig,
    DistributedBackend,
    ErrorFeedbackBuffer,
    SyncError,
    attach,
    get_compressor,
)


def own_fault(rank: int, world: int, way: str) -> tuple[str, list[int]]:
    """Rank 1 cannot select in its second step: the error that each rank gets, and whom it blames."""

    def fail(*_: object) -> None:
        raise ArithmeticError("no")

    torch.manual_seed(0)
    model: nn.Module = nn.Linear(64, 64)
    if way == "attach":
        model = DistributedDataParallel(model)
        sync = attach(model, CompressionConfig(ratio=0.05, sync_timeout=30))
        compressor, close = sync._reducer.compressor, sync.close
    else:
        compressor = get_compressor(0.05)
        config = CompressionConfig(sync_timeout=30)
        backend = DistributedBackend(compressor, ErrorFeedbackBuffer(), config=config)
        close = backend.close
    try:
        for step in range(2):
            if step and rank == 1:
                compressor.take_parts = fail  # type: ignore[assignment, method-assign]
            model(torch.randn(4, 64)).sum().backward()
            if way == "backend":
                backend.allreduce_gradients(model.named_parameters())
    except Exception as error:
        found = sync.error if way == "attach" else error
    close()
    ranks = list(found.ranks) if isinstance(found, SyncError) else []
    return f"{type(found).__name__}: {found}", ranks


def straggling(rank: int, world: int) -> tuple[list[str], list[float]]:
    """Rank 1 takes longer for every step: what was logged here, and the ledger's waits."""
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("compressed_ddp")
    logger.addHandler(listener)
    model = DistributedDataParallel(nn.Linear(64, 64))
    with attach(model, CompressionConfig(ratio=0.05, guard_every=3)) as sync:
        for _ in range(7):
            if rank == 1:
                time.sleep(0.3)
            model(torch.randn(4, 64)).sum().backward()
        waits = list(sync.stats.waits)
    logger.removeHandler(listener)
    return said, waits
