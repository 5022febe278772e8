"""The network lab: hosts on a shaped network inside one machine, and what can be started on them."""

from __future__ import annotations

from .hosts import Counters, Loopback, Network
from .launch import LaunchFailed, launch
from .network import Lab
from .records import clean
from .selftest import Figure, check, measure_links
from .shaping import parse_rate
from .tools import LabError, missing

__all__ = [
    "Counters",
    "Figure",
    "Lab",
    "LabError",
    "LaunchFailed",
    "Loopback",
    "Network",
    "check",
    "clean",
    "launch",
    "measure_links",
    "missing",
    "parse_rate",
]
