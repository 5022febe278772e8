"""Where a figure comes from: columns that every row of a CSV carries."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch

import compressed_ddp


def origin() -> dict[str, str]:
    """The command, the commit (with a plus if anything but results differs from it), versions, machine."""
    script = f"experiments/{Path(sys.argv[0]).name}"
    dirty = "+" if _git("status", "--porcelain", "--", ":/", ":!/results") else ""
    return {
        "command": shlex.join(["python", script, *sys.argv[1:]]),
        "commit": _git("rev-parse", "--short", "HEAD") + dirty,
        "version": f"compressed-ddp {compressed_ddp.__version__}, torch {torch.__version__}",
        "machine": f"{_processor()}, {os.cpu_count()} cores",
    }


def _git(*command: str) -> str:
    """What git says; nothing outside of a clone."""
    try:
        folder = Path(__file__).parent
        return subprocess.run(("git", *command), cwd=folder, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()
