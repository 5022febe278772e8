"""Optimizers in two halves: one before compression on every worker, one after it on the mean."""

from __future__ import annotations

from .adam import SplitAdam
from .split import SplitOptimizer

__all__ = ["SplitAdam", "SplitOptimizer"]
