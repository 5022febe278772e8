"""Optimizers in two halves: one before compression on every worker, one after it on the mean."""

from __future__ import annotations

from .adam import SplitAdam
from .sgd import SplitSGD
from .split import SplitOptimizer, checked_split

__all__ = ["SplitAdam", "SplitOptimizer", "SplitSGD", "checked_split"]
