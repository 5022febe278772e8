"""Which labs there are, whose they are, and removing what a dead runner left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .tools import LabError, call, call_all

NAMESPACES = Path("/var/run/netns")
RECORDS = Path("/var/run/compressed-ddp-lab")
"""One file a lab: written before its first namespace, removed after the last."""

NAME = re.compile(r"(cddp-[0-9a-f]{8})-(?:sw|h\d+)")
PREFIX = re.compile(r"cddp-[0-9a-f]{8}")
PART = re.compile(r"(cddp-[0-9a-f]{8})\.(\d+)\.part")
"""A record that is being written, by the process with this number."""


@dataclass(frozen=True)
class Runner:
    """The process that a lab belongs to. A process number comes again; with its start time it does not."""

    pid: int
    started: int

    @staticmethod
    def me() -> Runner:
        return Runner(os.getpid(), _started(os.getpid()) or 0)

    def alive(self) -> bool:
        return _started(self.pid) == self.started


def _started(pid: int) -> int | None:
    """When a process started, in clock ticks after boot; None if it is not there or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def record(prefix: str) -> None:
    """Write down that the lab ``prefix`` belongs to this process; ``forget`` undoes it."""
    RECORDS.mkdir(mode=0o700, exist_ok=True)
    unfinished = RECORDS / f"{prefix}.{os.getpid()}.part"
    unfinished.write_text(json.dumps(asdict(Runner.me())))
    unfinished.rename(RECORDS / prefix)


def forget(prefix: str) -> None:
    (RECORDS / prefix).unlink(missing_ok=True)


def runner_of(prefix: str) -> Runner | None:
    """Whose lab it is; None if nothing is written down."""
    try:
        facts = json.loads((RECORDS / prefix).read_text())
        return Runner(int(facts["pid"]), int(facts["started"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(
            f"{RECORDS / prefix} cannot be read ({error}), so nobody knows whether that lab is in use: "
            "remove the file if it is not, and clean again"
        ) from None


def namespaces(prefix: str | None = None) -> list[str]:
    """The namespaces of labs, or of one."""
    names = sorted(path.name for path in NAMESPACES.iterdir()) if NAMESPACES.is_dir() else []
    matches = [match for name in names if (match := NAME.fullmatch(name))]
    return [match[0] for match in matches if prefix is None or match[1] == prefix]


def remove(prefix: str) -> int:
    """Kill what runs in a lab, and remove its namespaces and its record; how many processes were killed."""
    names = namespaces(prefix)
    killed = _kill_inside(names)
    if names:
        # Links go with their namespace. What somebody else removed meanwhile is as good as removed by us.
        call(["ip", "-force", "-batch", "-"], [f"netns del {name}" for name in names], check=False)
    left = namespaces(prefix)
    if left:
        raise LabError(f"namespaces {', '.join(left)} cannot be removed; try `compressed-ddp lab clean`")
    forget(prefix)
    return killed


def _kill_inside(names: Sequence[str]) -> int:
    """Kill all processes in these namespaces, until none is left; how many there were."""
    killed: set[int] = set()
    deadline = time.monotonic() + 10
    while True:
        outputs = call_all([(["ip", "netns", "pids", name], ()) for name in names], check=False)
        alive = {int(pid) for output in outputs for pid in output.split()} - {os.getpid()}
        if not alive:
            return len(killed)
        if time.monotonic() > deadline:
            raise LabError(f"processes {sorted(alive)} in {names[0]} and others do not end")
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        killed |= alive
        time.sleep(0.01)


@dataclass(frozen=True)
class Cleaned:
    """A lab that ``clean`` looked at."""

    prefix: str
    fate: str
    removed: bool
    stuck: bool = False
    """It should have been removed, and could not be."""


def clean() -> list[Cleaned]:
    """Remove the labs whose runner is dead, with all that runs in them; what became of each lab.

    Namespaces are listed before records are read: a lab's record is older than its namespaces, so one
    that is listed without a record has lost it or is gone already.
    """
    prefixes = {name.rpartition("-")[0] for name in namespaces()}
    written = {path.name for path in RECORDS.iterdir()} if RECORDS.is_dir() else set()
    prefixes |= {name for name in written if PREFIX.fullmatch(name)}
    results = _clean_parts(written)
    for prefix in sorted(prefixes):
        try:
            runner = runner_of(prefix)
            if runner is not None and runner.alive():
                results.append(Cleaned(prefix, f"left alone: process {runner.pid} is using it", False))
                continue
            count = len(namespaces(prefix))
            killed = remove(prefix)
            results.append(Cleaned(prefix, f"removed: {count} namespaces, {killed} processes killed", True))
        except LabError as error:
            results.append(Cleaned(prefix, f"not removed: {error}", False, stuck=True))
    return results


def _clean_parts(written: Iterable[str]) -> list[Cleaned]:
    """Remove the records whose writer died before they were whole; no lab was built after them."""
    results = []
    for match in filter(None, map(PART.fullmatch, sorted(written))):
        if _started(int(match[2])) is None:
            (RECORDS / match[0]).unlink(missing_ok=True)
            results.append(Cleaned(match[1], "removed: a record that was never finished", True))
    return results
