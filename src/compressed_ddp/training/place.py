"""Where a worker is: its rank, its device, its process group."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, rendezvous  # type: ignore[attr-defined]

from ..communication.rollcall import RollCall, exchange_failed, grace, new_address, open_sockets
from ..types import SyncError
from .config import Running

T = TypeVar("T")
_LONGEST = 2**20
"""Bytes that rank 0 may say at once."""


@dataclass(frozen=True)
class Place:
    """One worker among ``world_size``. All its methods but ``main`` are for all workers together."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    timeout: float = 60.0
    """Seconds after which a silent worker is an error."""
    roll: RollCall | None = None
    """Finds out which one it is."""

    @property
    def main(self) -> bool:
        """Whether this is the worker that talks and writes."""
        return self.rank == 0

    @property
    def _wire(self) -> torch.device:
        """Where a tensor must lie to be sent: gloo takes it from the CPU alone."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums of ``values`` over all workers."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self._wire)
        with self._named("summing up"):
            dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def gather(self, row: bytes, what: str = "gathering") -> list[bytes]:
        """Every worker's ``row``, in rank order; all have the same length. ``what`` names it in errors."""
        mine = torch.tensor(list(row), dtype=torch.uint8, device=self._wire)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        with self._named(what):
            dist.all_gather(rows, mine)
        return [bytes(row.tolist()) for row in rows]

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each of ``tensors`` by its mean over all workers."""
        for tensor in tensors:
            shared = tensor.detach().to(self._wire, torch.float32)
            with self._named("averaging"):
                dist.all_reduce(shared)
            tensor.copy_(shared.div_(self.world_size))

    def say(self, text: str) -> str:
        """Rank 0's ``text``, on every worker."""
        data = text.encode() if self.main else b""
        length = self.total([len(data)])[0]
        if not 0 <= length <= _LONGEST:  # nor where it is not a number
            raise SyncError(
                f"rank 0 says {length:g} bytes, more than {_LONGEST:,}; is it one of ours?", ranks=(0,)
            )
        tensor = torch.zeros(int(length), dtype=torch.uint8, device=self._wire)
        if self.main:
            tensor.copy_(torch.tensor(list(data), dtype=torch.uint8))
        with self._named("listening to rank 0"):
            dist.broadcast(tensor, 0)
        try:
            return bytes(tensor.tolist()).decode()
        except UnicodeDecodeError:
            raise SyncError("what rank 0 says is no text: it was damaged on its way", ranks=(0,)) from None

    def together(self, what: str, work: Callable[[], T]) -> T:
        """Call ``work`` on every worker. If it fails on one, all of them raise: nobody waits for ever."""
        failure: Exception | None = None
        result: T
        try:
            result = work()
        except Exception as error:
            failure = error
        failed = [rank for rank, row in enumerate(self.gather(bytes([failure is not None]), what)) if row[0]]
        if failure is not None:
            raise failure
        if failed:
            numbers = ", ".join(map(str, failed))
            raise SyncError(
                f"{what} failed on rank {numbers}; see its message", phase=what, ranks=tuple(failed)
            )
        return result

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        if self.roll is not None:
            self.roll.look()
        try:
            yield
        except RuntimeError as error:
            raise exchange_failed(what, self.rank, self.world_size, self.roll, self.timeout, error) from error


def under_launcher() -> bool:
    """Whether torchrun (or its like) started this process and set its rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def restarts() -> int:
    """How often torchrun has started this job's workers again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def job_id() -> str:
    """The same for all starts of one job by one torchrun, and for nothing else."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}:{socket.gethostname()}:{os.getppid()}"


def pick_device(name: str, local_rank: int) -> torch.device:
    """The device that ``name`` means for this worker; ValueError if it is not here."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if cuda else "mps" if mps else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}; auto, cpu, cuda, cuda:N or mps") from None
    if device.type == "cuda":
        if not cuda:
            raise ValueError(f"device {name!r}: no CUDA device is usable here; --device cpu")
        index = local_rank % torch.cuda.device_count() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ValueError(f"device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", index)
    if device.type == "mps" and not mps:
        raise ValueError("device 'mps': it is not usable here; --device cpu")
    if device.type not in ("cpu", "mps"):
        raise ValueError(f"device {name!r} is not one that this program knows; auto, cpu, cuda or mps")
    return device


def pick_backend(name: str, device: torch.device) -> str:
    """The process group's backend; ValueError if it does not serve ``device``."""
    if name == "auto":
        name = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    if name == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        why = (
            "this torch has no nccl" if device.type == "cuda" else f"nccl needs CUDA, the device is {device}"
        )
        raise ValueError(f"backend 'nccl': {why}; --backend gloo")
    return name


def meet(store: Any, rank: int, world_size: int, timeout: float) -> Any:
    """A part of ``store`` that is of this start of the job alone.

    A restarted job finds its old store, and the addresses in there are of the dead. torchrun's count
    of restarts does not help: it may differ from host to host. So rank 0 offers a new name, and
    goes on when all have answered; who answered a dead rank 0 sees that it is not on the list.
    """
    mine = uuid.uuid4().hex
    store.set_timeout(timedelta(seconds=timeout))
    if rank == 0:
        store.set("offer", mine)
        here = [store.get(f"{mine}/{other}").decode() for other in range(1, world_size)]
        store.set(f"{mine}/all", ",".join(here))
        return PrefixStore(mine, store)
    end, answered = time.monotonic() + timeout, ""
    while time.monotonic() < end:
        offer = store.get("offer").decode()
        if offer != answered:
            store.set(f"{offer}/{rank}", mine)
            answered = offer
        if store.check([f"{offer}/all"]) and mine in store.get(f"{offer}/all").decode().split(","):
            return PrefixStore(offer, store)
        time.sleep(0.05)
    raise SyncError(f"rank 0 did not gather all {world_size} workers within {timeout} s")


@contextmanager
def joined(running: Running, timeout: float) -> Iterator[Place]:
    """This worker's place in the job, with the process group up; it is taken down at the end."""
    here = under_launcher()
    rank, world_size, local_rank = (
        int(os.environ.get(name, default)) if here else int(default)
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    device = pick_device(running.device, local_rank)
    backend = pick_backend(running.backend, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store: Any = HashStore()
    if here:
        store, rank, world_size = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
        store = meet(store, rank, world_size, timeout)
    before, patience = open_sockets(), timedelta(seconds=timeout - grace(timeout))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=patience)
    place = Place(rank, world_size, local_rank, device, backend, timeout)
    try:
        if backend == "gloo" and world_size > 1:
            place = replace(place, roll=RollCall(rank, world_size, new_address(before), place.gather))
        yield place
    finally:
        if place.roll is not None:
            place.roll.close()
        dist.destroy_process_group()
