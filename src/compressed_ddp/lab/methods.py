"""The methods that are measured side by side: a registry. Adding one means adding a row."""

# No `from __future__ import annotations` here: DDP inspects the hook's annotations as objects.

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ..communication import attach
from ..metrics import Ledger
from ..types import CompressionConfig, unknown_name
from .writeup import Exchange, attach_writeup, dense_mean_, sparse_mean_

VALUES = ("fp32", "fp16", "bf16", "int8", "int4")
RANKS = (1, 2, 4)


@dataclass(frozen=True)
class Settings:
    """What every method is told; each takes what concerns it."""

    ratio: float = 0.01
    min_compress_numel: int = 256
    """Ours: smaller tensors travel whole. A model that was scaled down wants it scaled as well."""
    seed: int = 0
    timeout: float = 60.0


class Handle(Protocol):
    """What attaching a method returns."""

    def close(self) -> None:
        """End threads and give process groups back."""
        ...


class NoHandle:
    """Of methods that leave nothing to close."""

    def close(self) -> None: ...


Attach = Callable[[DistributedDataParallel, Settings], Handle]


@dataclass(frozen=True)
class Method:
    """A way to synchronise gradients under DDP."""

    about: str
    attach: Attach
    """To be called on all ranks, once for each DDP object; raises where the method cannot run."""
    sparse: bool = False
    """Whether the ratio means something to it."""
    one_bucket: bool = False
    """Whether it runs on gloo only if DDP has a single bucket, and so cannot overlap with backward."""
    low_rank: bool = False
    """Whether its bytes shrink with the square root of a model's size, and not with the size."""
    passes: int = 2
    """How often a bucket's data go round the ring of all hosts; an all-reduce takes two, a gather one."""
    direct: int = 0
    """Rounds in which every host sends to all others at once."""

    def rounds(self, hosts: int) -> int:
        """Messages of a bucket that must wait for the one before."""
        return self.passes * (hosts - 1) + self.direct

    def note(self, *, scaled: bool) -> str:
        """What a reader of its figures must know."""
        notes = []
        if self.one_bucket:
            notes.append("in one bucket: with several, torch's hook aborts on gloo")
        if self.low_rank and scaled:
            notes.append("scaled model: factors shrink with the square root, so bytes are overstated")
        return "; ".join(notes)


def ledger_of(handle: Handle) -> Ledger | None:
    """The ledger of a method that keeps one: ours."""
    stats = getattr(handle, "stats", None)
    return stats if isinstance(stats, Ledger) else None


def nothing_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leaves the local gradient as it is: every rank keeps its own."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _none(model: DistributedDataParallel, settings: Settings) -> Handle:
    model.register_comm_hook(None, nothing_hook)
    return NoHandle()


def _plain(model: DistributedDataParallel, settings: Settings) -> Handle:
    return NoHandle()


def _torch_hook(name: str, model: DistributedDataParallel, settings: Settings) -> Handle:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model.register_comm_hook(model.process_group, getattr(default_hooks, name))
    return NoHandle()


def _torch_powersgd(rank: int, model: DistributedDataParallel, settings: Settings) -> Handle:
    # Imported here: it needs numpy, which nothing else does.
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        model.process_group,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=2,  # the earliest it takes: DDP lays its buckets out anew before that
        random_seed=settings.seed,
    )
    # Not its batched twin: that fails an assertion of its own.
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return NoHandle()


def _writeup(exchange: Exchange, model: DistributedDataParallel, settings: Settings) -> Handle:
    return attach_writeup(model, settings.ratio, exchange, settings.timeout)


def _ours(options: dict[str, Any], model: DistributedDataParallel, settings: Settings) -> Handle:
    config = CompressionConfig(
        ratio=settings.ratio,
        min_compress_numel=settings.min_compress_numel,
        seed=settings.seed,
        sync_timeout=settings.timeout,
        **options,
    )
    return attach(model, config)


def _ours_topk(collective: str, values: str) -> Method:
    options = {"compressor": "topk", "collective": collective, "values": values}
    about = f"ours: Top-K, {collective}, {values} values"
    return Method(
        about, partial(_ours, options), sparse=True, passes=0, direct=2 if collective == "sharded" else 1
    )


def _torch_rank(rank: int) -> Method:
    run = partial(_torch_powersgd, rank)
    return Method(f"torch's PowerSGD hook, rank {rank}", run, one_bucket=True, low_rank=True, passes=6)


def _ours_rank(rank: int) -> Method:
    run = partial(_ours, {"compressor": "powersgd", "rank": rank})
    return Method(f"ours: PowerSGD, rank {rank}", run, low_rank=True, passes=4)


METHODS: dict[str, Method] = {
    "none": Method(
        "no communication at all: the floor, and the CPU of the emulation itself", _none, passes=0
    ),
    "plain": Method("DDP without a hook: dense float32", _plain),
    "fp16": Method("torch's fp16_compress_hook", partial(_torch_hook, "fp16_compress_hook")),
    "bf16": Method("torch's bf16_compress_hook", partial(_torch_hook, "bf16_compress_hook")),
    **{f"powersgd-{rank}": _torch_rank(rank) for rank in RANKS},
    "writeup-dense": Method(
        "the write-up: decompressed, then dense", partial(_writeup, dense_mean_), sparse=True
    ),
    "writeup-sparse": Method(
        "the write-up's 12-byte entries", partial(_writeup, sparse_mean_), sparse=True, passes=1
    ),
    **{f"ours-allgather-{values}": _ours_topk("allgather", values) for values in VALUES},
    **{f"ours-sharded-{values}": _ours_topk("sharded", values) for values in VALUES},
    **{f"ours-powersgd-{rank}": _ours_rank(rank) for rank in RANKS},
}

TABLE = "none,plain,fp16,bf16,powersgd-*,writeup-*,ours-allgather-int8,ours-sharded-*"
"""What is compared unless somebody asks for something else."""


def pick(patterns: Iterable[str]) -> list[str]:
    """The methods that names and patterns (``plain``, ``ours-*``, ``all``) mean, in the registry's order.

    Raises ValueError for one that means none.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        found = [name for name in METHODS if pattern == "all" or fnmatchcase(name, pattern)]
        if not found:
            raise unknown_name("method", pattern, [*METHODS, "all"])
        chosen.update(found)
    if not chosen:
        raise ValueError(f"no method was named; choose from: {', '.join(METHODS)}, or all")
    return [name for name in METHODS if name in chosen]
