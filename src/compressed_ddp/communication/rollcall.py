"""After a failed exchange: who is gone, who is silent, and the error that says so."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from ..layout import BucketLayout
from ..types import Stamp, SyncError, WireError

logger = logging.getLogger("compressed_ddp")

_ROW = struct.Struct("<16sH46s")
"""A rank's secret, port and address; port 0: it cannot be called."""
_NOTE = struct.Struct("<16sIi")
"""The secret of the rank that is called, who calls, and whom the caller knows to be at fault (-1: nobody)."""
_NOBODY = -1
_BACKLOG = 1024
"""Connections that may wait until the next look: strangers' ones too, a port scan for instance."""
_STRANGERS = 64
"""Connections that are kept open although they have said nothing."""
_ESTABLISHED = "01"


class Roll(NamedTuple):
    """What a roll call found. Who is alive and in step is in none of them."""

    gone: tuple[int, ...] = ()
    """Nobody listens where they did: the process has ended, or closed its synchroniser."""
    failed: tuple[int, ...] = ()
    """They say themselves that the fault was theirs."""
    accused: tuple[int, ...] = ()
    """Another rank says that it cannot read what they sent."""
    silent: tuple[int, ...] = ()
    """No word from them: stopped, cut off, or busy elsewhere."""

    def verdict(self) -> tuple[str, tuple[int, ...]]:
        """What can be said for certain, and about whom."""
        for ranks, said in (
            (self.gone, "gone"),
            (self.failed, "out of step by an error of its own, which its log has"),
            (self.accused, "the sender of a message that another rank cannot read"),
            (self.silent, "silent"),
        ):
            if ranks:
                numbers = ", ".join(map(str, ranks))
                return f"rank {numbers} {'is' if len(ranks) == 1 else 'are'} {said}", ranks
        return "every rank answers, so a connection between them broke", ()


class RollCall:
    """One socket that listens, from start-up on, and says nothing until an exchange has failed.

    gloo's own words do not tell whose fault it was: whoever notices closes its connections, and to the
    next rank that looks as if *it* had died. So everyone who notices calls every other rank, once. Where
    nobody listens any more a process is gone. Who is in the same trouble calls too. From who is
    stopped or cut off nothing comes. No thread, and never longer than it is told to take.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str | None,
        exchange: Callable[[bytes], list[bytes]],
        ranks: Sequence[int] | None = None,
    ) -> None:
        """All ranks together. Others reach this one at ``address``; ``exchange`` gives everyone's row.

        ``ranks`` is what the job calls them, if this is a part of it; all that is told is in those numbers.
        """
        numbers = range(world_size) if ranks is None else ranks
        self._rank, self._secret = numbers[rank], secrets.token_bytes(16)
        self._lines: list[socket.socket] = []
        """Who has called and said nothing yet."""
        self._heard: dict[int, int] = {}
        """Ranks that have called, and whom they blame."""
        self._listener = _listening(address, world_size) if address else None
        port = self._listener.getsockname()[1] if self._listener else 0
        try:
            rows = exchange(_ROW.pack(self._secret, port, (address or "").encode()))
            self._peers = {
                other: (secret, port, _address(host.rstrip(b"\0"), other))
                for other, (secret, port, host) in zip(numbers, map(_ROW.unpack, rows), strict=True)
                if other != self._rank
            }
        except BaseException:
            self.close()
            raise

    def look(self) -> None:
        """Answer who has called so far, without waiting: strangers must not keep the ranks out.

        Nobody listens until something has failed. A port scan would fill the queue of connections by then,
        and who finds it full seems silent. The notes of ranks that failed before this one noticed are kept.
        """
        listener = self._listener
        while listener is not None:
            try:
                line = listener.accept()[0]
            except OSError:  # nobody is there, or another thread has closed this
                break
            line.setblocking(False)
            self._lines.append(line)
        lines, self._lines = self._lines, []
        for line in lines:
            try:
                _hear(line.recv(_NOTE.size), self._secret, self._heard)
            except BlockingIOError:  # nothing yet
                self._lines.append(line)
                continue
            except OSError:
                pass
            line.close()
        while len(self._lines) > max(_STRANGERS, 2 * len(self._peers)):
            self._lines.pop(0).close()

    def call(self, seconds: float, *, blames: int | None = None) -> Roll | None:
        """Call everyone and listen for at most ``seconds``; None if that cannot be done.

        Who ``blames`` a rank, most often itself, tells the others so and does not ask. Works once. Never
        raises OSError: where nobody can be called (a process out of files, say) that is logged, because the
        error that is to be explained matters more.
        """
        self.look()
        listener, self._listener = self._listener, None
        try:
            if listener is not None and all(port for _, port, _ in self._peers.values()):
                return self._call(listener, seconds, blames)
        except OSError as error:
            logger.warning("rank %d cannot call the others: %s", self._rank, error)
        finally:
            self.close()
        return None

    def _call(self, listener: socket.socket, seconds: float, blames: int | None) -> Roll:
        told = _NOBODY if blames is None else blames
        with ExitStack() as opened:
            opened.enter_context(listener)
            found = _Calls(listener, self._secret, self._heard, opened)
            while self._lines:
                found.answer(self._lines.pop())
            for rank, (secret, port, host) in self._peers.items():
                found.call(rank, (host, port), _NOTE.pack(secret, self._rank, told))
            deadline = time.monotonic() + seconds
            while found.calling or (blames is None and found.missing(self._peers)):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                found.wait(left)
            for _ in range(2 * len(self._peers)):  # who sent a note before it went away is heard
                found.wait(0)
        failed = {rank for rank in self._peers if found.heard.get(rank) == rank}
        accused = set(found.heard.values()) & {self._rank, *self._peers} - failed
        gone = found.refused - found.heard.keys()
        silent = found.missing(self._peers)
        return Roll(tuple(sorted(gone)), tuple(sorted(failed)), tuple(sorted(accused)), silent)

    def close(self) -> None:
        """Safe to call twice."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        while self._lines:
            self._lines.pop().close()


class _Calls:
    """The calls that are under way, ours and theirs."""

    def __init__(
        self, listener: socket.socket, secret: bytes, heard: dict[int, int], opened: ExitStack
    ) -> None:
        self._listener, self._secret, self._opened = listener, secret, opened
        self._ready = opened.enter_context(selectors.DefaultSelector())
        self._ready.register(listener, selectors.EVENT_READ)
        self.calling: dict[int, bytes] = {}
        self.heard = heard
        self.refused: set[int] = set()

    def missing(self, peers: dict[int, tuple[bytes, int, str]]) -> tuple[int, ...]:
        return tuple(rank for rank in peers if rank not in self.heard and rank not in self.refused)

    def call(self, rank: int, where: tuple[str, int], note: bytes) -> None:
        line = self._opened.enter_context(socket.socket(_family(where[0])))
        line.setblocking(False)
        self.calling[rank] = note
        code = line.connect_ex(where)
        if code == errno.EINPROGRESS:
            self._ready.register(line, selectors.EVENT_WRITE, rank)
        else:
            self._answered(rank, line, code)

    def wait(self, seconds: float) -> None:
        """Deal with what happens next, within ``seconds``."""
        for key, _ in self._ready.select(seconds):
            line = key.fileobj
            assert isinstance(line, socket.socket)
            if line is self._listener:
                self._accept()
            elif key.data is not None:
                self._ready.unregister(line)
                self._answered(key.data, line, line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            else:
                self._ready.unregister(line)
                self._listen(line)

    def _answered(self, rank: int, line: socket.socket, code: int) -> None:
        note = self.calling.pop(rank)
        if code == errno.ECONNREFUSED:
            self.refused.add(rank)
        elif code == 0:
            try:
                line.send(note)
            except OSError:  # gone after all; it is not heard from
                pass

    def _accept(self) -> None:
        try:
            line = self._listener.accept()[0]
        except OSError:  # whoever it was has hung up
            return
        line.setblocking(False)
        self.answer(line)

    def answer(self, line: socket.socket) -> None:
        """Wait for what ``line`` says; it is closed in the end."""
        self._ready.register(self._opened.enter_context(line), selectors.EVENT_READ)

    def _listen(self, line: socket.socket) -> None:
        try:
            _hear(line.recv(_NOTE.size), self._secret, self.heard)
        except OSError:
            return


def _hear(note: bytes, secret: bytes, heard: dict[int, int]) -> None:
    """Write down who calls and whom it blames, if it knows the ``secret``."""
    if len(note) == _NOTE.size:
        told, rank, blames = _NOTE.unpack(note)
        if hmac.compare_digest(told, secret):
            heard[rank] = blames


def grace(timeout: float) -> float:
    """How much of ``timeout`` is kept for a roll call, so that the error comes within it."""
    return min(1.0, timeout / 4)


def exchange_failed(
    what: str, rank: int, world_size: int, roll: RollCall | None, timeout: float, error: BaseException
) -> SyncError:
    """The error for exchange ``what``, after calling the roll."""
    found = roll.call(grace(timeout)) if roll else None
    said, ranks = found.verdict() if found else (f"a peer is gone or silent for {timeout:g} s", ())
    return SyncError(
        f"{what} failed on rank {rank} of {world_size}: {said} ({error})", phase=what, ranks=ranks
    )


def blamed(error: BaseException) -> int | None:
    """Who sent what this rank could not read; None where that was not what failed."""
    told = isinstance(error, SyncError) and error.phase == "decode" and error.ranks
    return told[0] if told else None


def _unreadable(error: WireError, rank: int, ranks: Sequence[int] | None) -> SyncError:
    """``rank`` cannot read a message: whose it is. ``ranks`` is what the job calls them."""
    told = rank if ranks is None else ranks[rank]
    if error.sender is None:
        return SyncError(f"decode failed on rank {told}: {error}", phase="decode")
    sender = error.sender if ranks is None else ranks[error.sender]
    # The error itself counts as the group does.
    also = "" if sender == error.sender else f", {error.sender} of its group,"
    whose = f"(rank {sender}{also} sent it)"
    return SyncError(f"decode failed on rank {told}: {error} {whose}", phase="decode", ranks=(sender,))


@contextmanager
def in_bucket(layout: BucketLayout, stamp: Stamp, ranks: Sequence[int] | None = None) -> Iterator[None]:
    """What others did wrong in this block leaves it as a SyncError that names the bucket, and them as the
    job does (``ranks``)."""
    try:
        yield
    except (SyncError, WireError) as error:
        told = _unreadable(error, stamp.sender, ranks) if isinstance(error, WireError) else error
        more = f" and {len(layout.names) - 1} more" if len(layout.names) > 1 else ""
        where = f"step {stamp.step}, bucket {stamp.bucket} ({layout.names[0]!r}{more})"
        raise SyncError(
            f"{where}: {told}", phase=told.phase, bucket=stamp.bucket, ranks=told.ranks
        ) from error


# --- where others reach us ---------------------------------------------------------------------


def open_sockets() -> set[int]:
    """The numbers (inodes) of all sockets of this process; none where there is no /proc."""
    found = set()
    for link in Path("/proc/self/fd").glob("*"):
        try:
            target = os.readlink(link)
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


def new_address(before: set[int]) -> str | None:
    """This host's address in TCP connections that were made since ``before``; None if there are none."""
    new = open_sockets() - before
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path = Path("/proc/self/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, local, _, state, *rest = line.split()
            if state == _ESTABLISHED and int(rest[5]) in new:
                words = local.split(":")[0]
                packed = b"".join(
                    struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8)
                )
                return socket.inet_ntop(family, packed).removeprefix("::ffff:")
    return None


def _listening(address: str, world_size: int) -> socket.socket | None:
    try:
        backlog = max(_BACKLOG, 2 * world_size)
        listener = socket.create_server((address, 0), family=_family(address), backlog=backlog)
    except OSError:  # an address of a kind that needs more; then nobody is called
        return None
    listener.setblocking(False)
    return listener


def _address(told: bytes, rank: int) -> str:
    """What ``rank`` gave as its address: a number, for a name would be looked up; or nothing."""
    try:
        text = told.decode("ascii")
        if text:
            ipaddress.ip_address(text)
    except ValueError:
        raise SyncError(
            f"rank {rank} gave {told!r} as its address; is it one of ours?", ranks=(rank,)
        ) from None
    return text


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
