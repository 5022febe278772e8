"""What it cost: bytes and seconds."""

from __future__ import annotations

from .ledger import Ledger, StepRecord

__all__ = ["Ledger", "StepRecord"]
