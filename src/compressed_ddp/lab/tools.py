"""Calling ``ip`` and ``tc``: every call is bounded, and a failure is told in their own words."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

TIMEOUT = 20.0
"""Seconds that a batch of calls may take; they take milliseconds."""

CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21


class LabError(RuntimeError):
    """The lab cannot be built, cannot hold its rate, or what ran in it failed."""


def missing() -> str | None:
    """What this machine lacks for a shaped network, and the way to get it; None if nothing."""
    if platform.system() != "Linux":
        return f"it needs Linux (network namespaces), and this is {platform.system()}: use a Linux machine"
    if os.geteuid() != 0:
        # sudo has a PATH of its own, in which neither an environment's python nor its programs are.
        return (
            f'it needs root, and this is user {os.geteuid()}: put `sudo env "PATH=$PATH"` before the command'
        )
    lost = [name for name in ("ip", "tc") if _find(name) is None]
    if lost:
        return f"{' and '.join(lost)} cannot be found: install iproute2 (apt-get install iproute2)"
    held = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    capabilities = int(held[1], 16) if held else 0
    if not (capabilities >> CAP_NET_ADMIN & 1 and capabilities >> CAP_SYS_ADMIN & 1):
        return (
            "root has no CAP_NET_ADMIN and CAP_SYS_ADMIN in this container: start it with --privileged, "
            "or run on the machine itself"
        )
    return None


def _find(name: str) -> str | None:
    """The path of a tool; the folders for root are often not in a user's PATH."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def tool(name: str) -> str:
    """The path of ``ip`` or ``tc``."""
    path = _find(name)
    if path is None:
        raise LabError(f"{name} cannot be found: install iproute2 (apt-get install iproute2)")
    return path


def call(command: Sequence[str], lines: Sequence[str] = (), *, check: bool = True) -> str:
    """Run one command with ``lines`` as its input; its output."""
    return call_all([(command, lines)], check=check)[0]


def call_all(calls: Sequence[tuple[Sequence[str], Sequence[str]]], *, check: bool = True) -> list[str]:
    """Run commands side by side, each with its lines of input; their outputs.

    The first element of a command is ``ip`` or ``tc``. With ``check`` the first failure raises LabError.
    """
    deadline = time.monotonic() + TIMEOUT
    processes: list[subprocess.Popen[str]] = []
    outputs = []
    try:
        for (name, *rest), _ in calls:
            pipe = subprocess.PIPE
            processes.append(
                subprocess.Popen([tool(name), *rest], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
            )
        for process, (command, lines) in zip(processes, calls, strict=True):
            text = "".join(line + "\n" for line in lines)
            output, errors = process.communicate(text, timeout=max(0.1, deadline - time.monotonic()))
            if check and process.returncode != 0:
                raise LabError(f"`{' '.join(command)}` failed: {_explained(errors, lines)}")
            outputs.append(output)
    except subprocess.TimeoutExpired as error:
        raise LabError(f"`{' '.join(error.cmd)}` did not end within {TIMEOUT:.0f} s") from None
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return outputs


def _explained(errors: str, lines: Sequence[str]) -> str:
    """What a tool said, with the line of its input that it speaks of."""
    said = " ".join(errors.split()) or "it said nothing"
    at = re.search(r"Command failed -:(\d+)", said)
    if at and 0 < int(at[1]) <= len(lines):
        said = f"{said} ({lines[int(at[1]) - 1]!r})"
    if "qdisc kind is unknown" in said:
        said += "; this kernel has no tbf (CONFIG_NET_SCH_TBF)"
    return said
