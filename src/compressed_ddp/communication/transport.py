"""Networks: a torch process group, or threads of one process. Both keep the same contract."""

from __future__ import annotations

import logging
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..types import SyncError, Transport
from .rollcall import RollCall, exchange_failed, grace, new_address, open_sockets

logger = logging.getLogger("compressed_ddp")

# torch 2.13 renamed it and warns about the old name.
_all_gather: Callable[..., Any] = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)


_DIRECT = 2**20
"""Rows of up to so many bytes go straight from everyone to everyone on gloo."""


class TorchTransport:
    """A process group of our own, so that our messages never interleave with the user's.

    Works with any backend that moves uint8 tensors; tested with gloo.
    """

    def __init__(
        self, parent: dist.ProcessGroup | None = None, timeout: float = 60.0, device: str = "cpu"
    ) -> None:
        """All ranks of ``parent`` (default: the world) must construct it together. Messages travel from
        devices of the type ``device``."""
        ranks = dist.get_process_group_ranks(parent or dist.group.WORLD)
        self.backend = backend_for(device, parent)
        self._whole = len(ranks) == dist.get_world_size()
        self._roll: RollCall | None = None
        before = open_sockets()
        # Only members of ``parent`` are here, so a part of the world must not wait for the rest.
        self.group: Any = dist.new_group(
            ranks=ranks,
            timeout=timedelta(seconds=timeout - grace(timeout)),
            backend=dist.get_backend(parent),
            use_local_synchronization=not self._whole,
        )
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self.ranks: Sequence[int] = dist.get_process_group_ranks(self.group)
        self.timeout = timeout
        self._closing = threading.Lock()
        try:
            if self.backend == "gloo" and self.world_size > 1:
                here = new_address(before)
                self._roll = RollCall(self.rank, self.world_size, here, self._everyones, self.ranks)
        except BaseException:  # nobody could: torch holds on to the group
            self.close(failed=True)
            raise

    def all_gather(self, out: Tensor, row: Tensor) -> None:
        """gloo's own goes round a ring: P - 1 times the latency for the same bytes."""
        flat = out.view(-1)
        if self.backend == "gloo" and row.nbytes <= _DIRECT:
            copies = row.expand(self.world_size, -1).contiguous().view(-1)
            self._exchange("all-gather", lambda group: dist.all_to_all_single(flat, copies, group=group))
        else:
            self._exchange("all-gather", lambda group: _all_gather(flat, row, group=group))

    def all_to_all(self, out: Tensor, rows: Tensor) -> None:
        flat, mine = out.view(-1), rows.view(-1)
        self._exchange("all-to-all", lambda group: dist.all_to_all_single(flat, mine, group=group))

    def all_reduce(self, tensor: Tensor) -> None:
        self._exchange("all-reduce", lambda group: dist.all_reduce(tensor, group=group))

    def _everyones(self, row: bytes) -> list[bytes]:
        out = torch.empty((self.world_size, len(row)), dtype=torch.uint8, device="cpu")
        self.all_gather(out, torch.frombuffer(bytearray(row), dtype=torch.uint8))
        return [bytes(found.tolist()) for found in out]

    def alive(self) -> bool:
        try:
            return self.group is not None and dist.is_initialized() and dist.get_rank(self.group) >= 0
        except (RuntimeError, ValueError):
            return False

    def close(self, *, failed: bool = False, blamed: int | None = None) -> None:
        """Give the group back; if the user destroyed all groups already, only let go of it.

        torch names a locally synchronised group after its members and how many groups there are,
        so destroying one would let the next take its name, and its stale addresses: such a group
        lives until the user destroys them all. After a failure it goes at once, so that peers hear
        of it now and not when they time out.
        """
        with self._closing:  # one of several threads takes it: for torch, no group means all of them
            alive, roll, self._roll = self.alive(), self._roll, None
            ends, group = self._whole or failed or not alive, self.group
            if ends:
                self.group = None
        if roll is not None:
            if failed and alive:  # the others learn whose fault it was before they lose this rank
                roll.call(grace(self.timeout), blames=self.ranks[self.rank] if blamed is None else blamed)
            roll.close()
        if ends and alive:
            _destroy(group)
        # The last reference goes here, and with it the sockets and gloo's threads.

    def _exchange(self, what: str, operation: Callable[[Any], object]) -> None:
        """``operation`` with the group. Another thread may close this, and torch takes None for the world."""
        group, roll = self.group, self._roll
        if group is None:
            raise SyncError(f"{what} after the end: this synchroniser was closed, or failed before")
        if roll is not None:
            roll.look()  # a system call: nothing beside an exchange
        try:
            operation(group)
        except RuntimeError as error:
            # Whoever keeps the error must not keep the group by it, and gloo's threads with that.
            group = None
            traceback.clear_frames(error.__traceback__)
            roll, self._roll = self._roll, None
            self.close(failed=True)
            me, job = self.ranks[self.rank], dist.get_world_size() if dist.is_initialized() else 0
            world_size = max(job, self.world_size)  # no group is left if the user has destroyed them
            raise exchange_failed(what, me, world_size, roll, self.timeout, error) from error


def backend_for(device: str, group: dist.ProcessGroup | None = None) -> str:
    """Which backend of ``group`` carries tensors on devices of this type.

    A group that was asked for none, or for one for each kind ("cpu:gloo,cuda:nccl"), has no name to go by.
    """
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {kind: name for kind, _, name in pairs}.get(device, dist.get_backend(group))


def close_when_forgotten(owner: object, transport: Transport) -> weakref.finalize[..., Any] | None:
    """Give gloo's group back when ``owner`` is forgotten, and at interpreter exit; ``detach`` once it was."""
    if isinstance(transport, TorchTransport) and transport.backend == "gloo":
        return weakref.finalize(owner, transport.close)
    return None


def _destroy(group: Any) -> None:
    """Give ``group`` back. If that fails, someone else has: the user destroys all groups at once."""
    try:
        dist.destroy_process_group(group)
    except (OSError, RuntimeError, ValueError) as error:  # no reason to hide what this is the end of
        logger.warning("the process group could not be destroyed: %s", error)


class InProcessTransport:
    """One rank of a network of threads. For tests, teaching and simulation."""

    def __init__(self, hub: InProcessHub, rank: int) -> None:
        self._hub, self.rank, self.world_size = hub, rank, hub.world_size
        self.ranks: Sequence[int] = range(hub.world_size)

    def all_gather(self, out: Tensor, row: Tensor) -> None:
        rows = self._hub.exchange(self.rank, row, "all-gather")
        out.view(self.world_size, -1).copy_(torch.stack(rows).view(self.world_size, -1))
        self._hub.wait("all-gather")

    def all_to_all(self, out: Tensor, rows: Tensor) -> None:
        all_rows = self._hub.exchange(self.rank, rows.view(self.world_size, -1), "all-to-all")
        out.view(self.world_size, -1).copy_(torch.stack([theirs[self.rank] for theirs in all_rows]))
        self._hub.wait("all-to-all")

    def all_reduce(self, tensor: Tensor) -> None:
        total = torch.stack(self._hub.exchange(self.rank, tensor, "all-reduce")).sum(0)
        self._hub.wait("all-reduce")
        tensor.copy_(total)

    def alive(self) -> bool:
        return not self._hub.broken()

    def close(self, *, failed: bool = False, blamed: int | None = None) -> None:
        if failed:
            self._hub.abort()


def alone() -> InProcessTransport:
    """A network of one."""
    return InProcessTransport(InProcessHub(1), 0)


class InProcessHub:
    """What the threads of an in-process network share."""

    def __init__(self, world_size: int, timeout: float = 60.0) -> None:
        self.world_size = world_size
        self._slots: list[Tensor | None] = [None] * world_size
        self._timeout = timeout
        self._met = threading.Condition()
        self._here, self._meetings, self._broken = 0, 0, False

    def exchange(self, rank: int, tensor: Tensor, what: str) -> list[Tensor]:
        """Everyone's tensor; the caller must read it before its next ``wait``."""
        self._slots[rank] = tensor
        self.wait(what)
        return [slot for slot in self._slots if slot is not None]

    def wait(self, what: str) -> None:
        """Until all are here. Who was here with all others goes on, though one of them has aborted since:
        threading.Barrier has it otherwise, and what all ranks raise alike would then be luck."""
        with self._met:
            meeting = self._meetings
            self._here += 1
            if self._here == self.world_size and not self._broken:
                self._here, self._meetings = 0, meeting + 1
                self._met.notify_all()
            self._met.wait_for(lambda: self._meetings != meeting or self._broken, self._timeout)
            if self._meetings != meeting:
                return
            self._broken = True
            self._met.notify_all()
        raise SyncError(f"{what} failed: a peer of this in-process network is gone or silent", phase=what)

    def broken(self) -> bool:
        return self._broken

    def abort(self) -> None:
        with self._met:
            self._broken = True
            self._met.notify_all()


def run_in_process(world_size: int, work: Callable[[Transport], Any], timeout: float = 60.0) -> list[Any]:
    """Run ``work(transport)`` on one thread a rank; their results in rank order.

    The first error of any rank is raised, after all threads have ended.
    """
    hub = InProcessHub(world_size, timeout)
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            results[rank] = work(InProcessTransport(hub, rank))
        except BaseException as error:  # handed to the caller below, whatever it is
            errors.append(error)
            hub.abort()

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
