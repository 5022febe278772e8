"""What it cost, bytes and seconds, and where figures go."""

from __future__ import annotations

from .ledger import TIMES, Ledger, StepRecord, amount
from .sockets import SocketMeter, Traffic
from .trackers import CsvTracker, JsonLinesTracker, TensorBoardTracker, Tracker, Trackers

__all__ = [
    "TIMES",
    "CsvTracker",
    "JsonLinesTracker",
    "Ledger",
    "SocketMeter",
    "StepRecord",
    "TensorBoardTracker",
    "Tracker",
    "Trackers",
    "Traffic",
    "amount",
]
