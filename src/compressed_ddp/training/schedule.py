"""The learning rate, as a function of nothing but how far the run has come.

So it has no state: a resumed run, also one with another number of workers, has the rate that it
would have had.
"""

from __future__ import annotations

import math

from .config import Optimisation


def learning_rate(settings: Optimisation, progress: float, end: float) -> float:
    """The rate after ``progress`` epochs of ``end``."""
    rate = settings.rate
    if progress < settings.warmup:
        return rate * progress / settings.warmup
    if settings.schedule == "constant":
        return rate
    done = min(1.0, (progress - settings.warmup) / max(end - settings.warmup, 1e-9))
    if settings.schedule == "cosine":
        return rate * 0.5 * (1.0 + math.cos(math.pi * done))
    if settings.schedule == "linear":
        return rate * (1.0 - done)
    return rate * (0.01 if done >= 0.75 else 0.1 if done >= 0.5 else 1.0)
