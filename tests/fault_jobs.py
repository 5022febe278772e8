"""What the processes of a pool do in tests about ranks that fail or are slow."""

from __future__ import annotations

import contextlib
import gc
import logging
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compressed_ddp import (
    CompressionConfig,
    DistributedBackend,
    ErrorFeedbackBuffer,
    LocalSync,
    SyncError,
    attach,
    get_compressor,
)
from compressed_ddp.communication import rollcall
from compressed_ddp.optim import SplitSGD


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


def part_of_the_job(rank: int, world: int, what: str) -> tuple[str, list[int]]:
    """Ranks 1 and 2 of three differ, or rank 2 sends what cannot be read, or fails: what is said of it."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return "", []
    model = nn.Linear(64, 64)
    model(torch.randn(4, 64)).sum().backward()
    config = CompressionConfig(ratio=0.1 * rank if what == "differs" else 0.1, guard_every=0)
    backend = DistributedBackend(None, ErrorFeedbackBuffer(), config=config, group=group)
    try:
        if what != "differs":
            backend.load_state_dict({}, model.named_parameters())
            assert backend._reducer is not None
            net = backend._reducer.transport
            real = net.all_gather

            def damaging(out: torch.Tensor, row: torch.Tensor) -> None:
                row[-1] ^= rank - 1  # rank 2's message
                real(out, row)

            if what == "unreadable":
                net.all_gather = damaging  # type: ignore[method-assign]
            elif rank == 2:
                net.close(failed=True)
        backend.allreduce_gradients(model.named_parameters())
    except SyncError as error:
        return str(error), list(error.ranks)
    return "nothing was said", []


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


def clean_up_fails(rank: int, world: int) -> tuple[str, str]:
    """Rank 1 fails, out of files and with its groups destroyed: what backward and a later step say."""

    def fail(*_: object) -> None:
        raise ArithmeticError("no")

    def full(*_: object) -> None:
        raise OSError(24, "Too many open files")

    def unknown(*_: object) -> None:
        raise ValueError("Invalid process group specified")

    model = DistributedDataParallel(nn.Linear(64, 64))
    sync = attach(model, CompressionConfig(ratio=0.05, sync_timeout=4))
    real = rollcall._Calls.call, dist.destroy_process_group
    if rank == 1:
        sync._reducer.compressor.take_parts = fail  # type: ignore[assignment, method-assign]
        rollcall._Calls.call = full  # type: ignore[assignment, method-assign]
        dist.destroy_process_group = unknown
    said = []
    try:
        for _ in range(2):
            try:
                model(torch.randn(4, 64)).sum().backward()
            except RuntimeError as error:
                said.append(f"{type(error).__name__}: {error}")
    finally:
        rollcall._Calls.call, dist.destroy_process_group = real  # type: ignore[method-assign]
    sync.close()
    return said[0], said[1]


def bad_message(rank: int, world: int, way: str) -> tuple[str, list[int]]:
    """What rank 2 sends is damaged, by all-to-all only to rank 0: the error that each rank gets, and whom it
    blames."""
    model = DistributedDataParallel(nn.Linear(64, 64))
    config = CompressionConfig(ratio=0.05, collective=way, sync_timeout=30, guard_every=0)
    sync = attach(model, config)
    name = "all_gather" if way == "allgather" else "all_to_all"
    real = getattr(sync._transport, name)

    def damaging(out: torch.Tensor, rows: torch.Tensor) -> None:
        damaged = rows.clone()
        damaged.view(-1)[60] ^= 0xFF
        real(out, damaged)

    if rank == 2:
        setattr(sync._transport, name, damaging)
    with contextlib.suppress(RuntimeError):
        model(torch.randn(4, 64)).sum().backward()
    found = sync.error
    sync.close()
    assert isinstance(found, SyncError)
    return str(found), list(found.ranks)


def guard_fails(rank: int, world: int, what: str) -> tuple[str, list[int], bool]:
    """The guard of a hand-written loop finds a drift, or itself fails on rank 1: the error, whom it blames,
    and whether the group is closed."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    config = CompressionConfig(sync_timeout=30, guard_every=1)
    backend = DistributedBackend(get_compressor(0.05), ErrorFeedbackBuffer(), config=config)
    for step in range(2):
        model(torch.randn(4, 64)).sum().backward()
        if step and rank == 1:
            if what == "drift":
                model.bias.data[3] += 1
            elif what == "gradient":
                model.bias.grad = torch.zeros(64).to_sparse()
            else:
                assert backend._reducer is not None
                backend._reducer._guard._pace = lambda _: 1 / 0  # type: ignore[method-assign, assignment]
        try:
            backend.allreduce_gradients(model.named_parameters())
        except Exception as error:
            found: Exception = error
    assert backend._reducer is not None
    closed = not backend._reducer.transport.alive()
    backend.close()
    ranks = list(found.ranks) if isinstance(found, SyncError) else []
    return f"{type(found).__name__}: {found}", ranks, closed


def unfit_at_first(rank: int, world: int) -> str:
    """Rank 1's first gradient cannot be compressed."""
    model = nn.Linear(64, 64)
    model(torch.randn(4, 64)).sum().backward()
    if rank == 1:
        model.bias.grad = torch.zeros(64).to_sparse()
    backend = DistributedBackend(get_compressor(0.05), config=CompressionConfig(sync_timeout=30))
    try:
        backend.allreduce_gradients(model.named_parameters())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def unfit_bucket(rank: int, world: int) -> tuple[str, list[int]]:
    """Rank 1's hook fails before its bucket is queued."""

    def fail(*_: object) -> None:
        raise TypeError("unfit")

    model = DistributedDataParallel(nn.Linear(64, 64))
    sync = attach(model, CompressionConfig(ratio=0.05, sync_timeout=30))
    model(torch.randn(4, 64)).sum().backward()
    if rank == 1:
        sync._layout = fail  # type: ignore[assignment, method-assign]
    with contextlib.suppress(RuntimeError, TypeError):
        model(torch.randn(4, 64)).sum().backward()
    sync.close()
    ranks = list(sync.error.ranks) if isinstance(sync.error, SyncError) else []
    return f"{type(sync.error).__name__}: {sync.error}", ranks


def sockets_left(rank: int, world: int, what: str) -> int:
    """How many sockets a synchroniser leaves that could not start, or was forgotten."""
    model: nn.Module = nn.Linear(64, 64)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    model(torch.randn(4, 64)).sum().backward()
    named = list(model.named_parameters())
    if what == "masking":
        model = DistributedDataParallel(model)
    dist.barrier()
    before = len(rollcall.open_sockets())
    if what == "masking":
        local = SplitSGD(model.parameters(), lr=0.1)
        try:
            attach(model, CompressionConfig(ratio=0.1, memory="ef21"), optimizer=local)
        except ValueError as error:
            assert "momentum masking" in str(error)
    elif what == "local":
        LocalSync(model, CompressionConfig(ratio=0.1), steps=1).step()
    else:
        ratio = 0.1 + (0.1 * rank if what == "differs" else 0.0)
        backend = DistributedBackend(get_compressor(ratio), ErrorFeedbackBuffer())
        try:
            backend.allreduce_gradients(named)
        except SyncError:
            assert what == "differs"
        else:
            assert what == "forgotten"
            del backend
    gc.collect()
    return len(rollcall.open_sockets()) - before


def frozen_drift(rank: int, world: int) -> str:
    """Rank 1's frozen weight changes by one bit."""
    layers = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64))
    model = DistributedDataParallel(layers)
    with attach(model, CompressionConfig(ratio=0.05, guard_every=2)) as sync:
        for step in range(3):
            if step == 1 and rank == 1:
                layers[0].weight.view(torch.int32)[5, 7] ^= 1
            with contextlib.suppress(RuntimeError):
                model(torch.randn(4, 64)).sum().backward()
        return str(sync.error)
