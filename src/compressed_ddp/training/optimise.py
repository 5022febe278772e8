"""The optimizer, and its learning rate as a function of nothing but how far the run has come.

So the rate has no state: a resumed run, also one with another number of workers, has the rate that
it would have had.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ..optim import SplitAdam
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


def make_optimizer(settings: Optimisation, model: nn.Module, *, split: bool = False) -> torch.optim.Optimizer:
    """torch's own, as the settings say; or, ``split``, the one that begins before compression."""
    rate, decay, parameters = settings.rate, settings.weight_decay, model.parameters()
    if split:
        return SplitAdam(parameters, rate, weight_decay=decay, max_norm=settings.clip_norm)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, rate, momentum=settings.momentum, weight_decay=decay, nesterov=settings.nesterov
        )
    if settings.optimizer == "rmsprop":
        return torch.optim.RMSprop(parameters, rate, momentum=settings.momentum, weight_decay=decay)
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, rate, weight_decay=decay)
