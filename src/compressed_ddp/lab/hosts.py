"""Hosts that run commands: what a shaped lab and plain loopback have in common, and loopback itself."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from types import TracebackType
from typing import IO, Any, TypeVar

from .signals import held_back, termination_unwinds
from .tools import LabError

MOST_HOSTS = 250

Some = TypeVar("Some", bound="Network")


@dataclass(frozen=True)
class Counters:
    """What passed a host's interface since the lab was built; subtract two for what passed between.

    TCP hands the interface super-packets that stand for up to 45 frames, and the interface counts each
    as one packet with one header. A network card would send a header with every frame: ``*_bytes``
    understates a bulk transfer by about 4 %, ``*_packets`` by much more. The shaper knows how many frames
    there are and counts each with its header: ``*_wire_bytes`` and ``*_frames`` are what a cable would
    carry, less the 24 bytes of checksum, preamble and gap a frame.
    """

    tx_bytes: int
    tx_packets: int
    rx_bytes: int
    rx_packets: int
    tx_wire_bytes: int
    tx_frames: int
    rx_wire_bytes: int
    rx_frames: int

    def __sub__(self, earlier: Counters) -> Counters:
        names = [field.name for field in fields(self)]
        return Counters(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


class Network:
    """What a lab and its stand-in have in common: hosts that run commands. Use it in a ``with`` block."""

    interface: str
    rate: float | None = None
    """Bits a second of every link in each direction; None if nothing shapes it."""

    def __init__(self, hosts: int) -> None:
        if isinstance(hosts, bool) or not isinstance(hosts, int):
            raise TypeError(f"hosts must be a whole number, not {hosts!r}")
        if not 2 <= hosts <= MOST_HOSTS:
            raise ValueError(f"hosts is {hosts}; a lab has 2 to {MOST_HOSTS}")
        self.hosts = hosts
        self._processes: list[subprocess.Popen[bytes]] = []
        self._exit = ExitStack()
        self._owner = 0

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        raise NotImplementedError

    def port(self) -> int:
        """A TCP port that is free on host 0."""
        raise NotImplementedError

    def describe(self) -> str:
        """One line about it."""
        raise NotImplementedError

    def counters(self) -> list[Counters] | None:
        """What passed each host's interface so far; None where hosts cannot be told apart."""
        raise NotImplementedError

    def run(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` on a host, with ``env`` added to this process's environment.

        It leads a process group of its own, and is killed at the latest when the network is closed.
        """
        if not 0 <= host < self.hosts:
            raise ValueError(f"host {host} does not exist: there are 0 to {self.hosts - 1}")
        if not self._owner:
            raise LabError("nothing is there to run in: open the network with a `with` block")
        process = subprocess.Popen(
            [*self._enter_host(host), *command],
            env={**os.environ, **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Kill what still runs and remove everything; once that is done, nothing happens the second time."""
        # A fork of the runner must not take the lab down when it ends.
        if self._owner != os.getpid():
            return
        try:
            with held_back():
                for process in self._processes:
                    if process.poll() is None:
                        end_group(process, signal.SIGKILL)
                self._remove()
                # Not before: until everything is gone, the end of this process is one more chance.
                self._owner = 0
                atexit.unregister(self.close)
                for process in self._processes:
                    process.wait(10)
        finally:
            self._exit.close()

    def __enter__(self: Some) -> Some:
        self._exit.enter_context(termination_unwinds())
        atexit.register(self.close)
        self._owner = os.getpid()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enter_host(self, host: int) -> list[str]:
        return []

    def _build(self) -> None: ...

    def _remove(self) -> None: ...


def end_group(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """Send a signal to all that ``process`` started in its group."""
    try:
        os.killpg(process.pid, how)
    except (ProcessLookupError, PermissionError):
        pass


class Loopback(Network):
    """The stand-in where no lab can be built: all hosts are this machine, and nothing limits the rate.

    Programs run as they would in a lab; step times say nothing about a slow network, and bytes at the
    interface cannot be told apart by host.
    """

    interface = "lo0" if sys.platform == "darwin" else "lo"

    def address(self, host: int) -> str:
        return "127.0.0.1"

    def port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    def counters(self) -> None:
        return None

    def describe(self) -> str:
        return f"{self.hosts} processes on loopback, without shaping"
