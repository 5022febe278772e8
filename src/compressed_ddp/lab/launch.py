"""Starting a distributed program on every host of a network, one process each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO

from .hosts import Network, end_group
from .tools import LabError

POLL = 0.02
GRACE = 5.0
"""Seconds that processes have to end after SIGTERM."""

HEARING = 60.0
"""Seconds that ``listen`` has for what rank 0 printed last."""

SHOWN = 40
"""Lines that are shown of what a failed rank wrote."""

Listener = Callable[[str], "str | None"]


class LaunchFailed(LabError):
    """A rank failed, and all others were ended. ``codes``: exit codes by rank, negative for signals."""

    def __init__(self, message: str, codes: list[int], first: int) -> None:
        super().__init__(message)
        self.codes = codes
        self.first = first
        """The rank that failed first."""


def environment(network: Network, rank: int, port: int) -> dict[str, str]:
    """What torch's ``env://`` and gloo must know on a host: the variables that torchrun would set."""
    threads = max(1, (os.cpu_count() or 1) // network.hosts)
    return {
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(network.hosts),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GLOO_SOCKET_IFNAME": network.interface,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }


def find_program(command: Sequence[str]) -> None:
    """Raises ValueError unless the program of a command is there."""
    if not command or shutil.which(command[0]) is None:
        name = command[0] if command else ""
        raise ValueError(f"command {name!r} cannot be found: name a program, such as: python my_train.py")


def launch(
    network: Network,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    listen: Listener | None = None,
    errors: IO[bytes] | None = None,
    timeout: float | None = None,
) -> list[int]:
    """Run ``command`` on every host until all have ended; their exit codes, which are all 0.

    If one fails, the others are ended and LaunchFailed is raised with what the failed one wrote. What
    rank 0 writes goes through; of the others it is kept for that case. ``env`` is added to, and wins
    over, ``environment``. ``listen`` gets each line that rank 0 prints instead, and what it returns (if
    anything) is written to rank 0's input as a line; it is called in another thread. ``errors``, a file
    that can be read, gets what rank 0 writes to its standard error; LaunchFailed then quotes it too.
    """
    find_program(command)
    port = network.port()
    with ExitStack() as stack:
        logs: list[IO[bytes] | None] = [errors]
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, ranks)
        for rank in range(network.hosts):
            settings = {**environment(network, rank, port), **(env or {})}
            if rank == 0:
                pipe = subprocess.PIPE if listen else None
                ranks.append(network.run(rank, command, settings, stdin=pipe, stdout=pipe, stderr=errors))
                continue
            log = stack.enter_context(tempfile.TemporaryFile())
            logs.append(log)
            nothing = subprocess.DEVNULL
            ranks.append(
                network.run(rank, command, settings, stdin=nothing, stdout=log, stderr=subprocess.STDOUT)
            )
        conversation = _Conversation(ranks[0], listen) if listen else None
        try:
            failed = _wait(ranks, conversation, timeout)
        finally:
            _end(ranks)
            if conversation is not None:
                conversation.finish()
        if conversation is not None and conversation.error is not None:
            raise conversation.error
        codes = [rank.wait() for rank in ranks]
        if failed:
            # Where rank 0 was ended because of others, its words may still say more than theirs.
            quoted = failed[:3] + ([0] if errors is not None and 0 not in failed else [])
            shown = [_report(rank, codes[rank], logs[rank]) for rank in quoted]
            raise LaunchFailed("\n".join(shown), codes, failed[0])
        return codes


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], conversation: _Conversation | None, timeout: float | None
) -> list[int]:
    """Wait until all have ended or some have failed; the ranks that failed, at once if several."""
    deadline = None if timeout is None else time.monotonic() + timeout
    running = dict(enumerate(ranks))
    while running:
        codes = {rank: process.poll() for rank, process in running.items()}
        for rank in [rank for rank, code in codes.items() if code is not None]:
            end_group(running.pop(rank), signal.SIGKILL)  # what it left behind ends with it
        failed = [rank for rank, code in codes.items() if code]
        if failed:
            return failed
        if conversation is not None and conversation.error is not None:
            raise conversation.error
        if deadline is not None and time.monotonic() > deadline:
            raise LabError(f"ranks {sorted(running)} did not end within {timeout:g} s, and were ended")
        time.sleep(POLL)
    return []


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs: SIGTERM, and SIGKILL to those that do not mind it."""
    running = [rank for rank in ranks if rank.poll() is None]
    for rank in running:
        end_group(rank, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for rank in running:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        end_group(rank, signal.SIGKILL)
        rank.wait()


def _report(rank: int, code: int, log: IO[bytes] | None) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    if log is None:
        return f"rank {rank} {how}; what it wrote is above"
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - 64_000))
    lines = log.read().decode(errors="replace").splitlines()
    if not lines:
        return f"rank {rank} {how}, and wrote nothing"
    return "\n  | ".join([f"rank {rank} {how}; the end of what it wrote:", *lines[-SHOWN:]])


class _Conversation:
    """A thread that hands rank 0's lines to ``listen`` and its answers back."""

    def __init__(self, process: subprocess.Popen[bytes], listen: Listener) -> None:
        self.error: BaseException | None = None
        self._process = process
        self._listen = listen
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._thread.start()

    def _talk(self) -> None:
        heard, spoken = self._process.stdout, self._process.stdin
        assert heard is not None and spoken is not None
        try:
            for line in heard:
                answer = self._listen(line.decode(errors="replace").rstrip("\n"))
                if answer is not None:
                    spoken.write(answer.encode() + b"\n")
                    spoken.flush()
        except BrokenPipeError:
            pass  # it has ended: its exit code says how
        except BaseException as error:  # raised again by the thread that waits
            self.error = error

    def finish(self) -> None:
        """Rank 0 has ended: wait until its last line has been heard, and close the pipes."""
        self._thread.join(HEARING)
        for pipe in (self._process.stdout, self._process.stdin):
            if pipe is not None and not self._thread.is_alive():
                with suppress(BrokenPipeError):
                    pipe.close()
