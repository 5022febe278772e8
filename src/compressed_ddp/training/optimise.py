"""The optimizer; its learning rate and the ratio as functions of nothing but how far the run has come.

So they have no state: a resumed run, also one with another number of workers, has the rate and the
ratio that it would have had.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ..optim import SplitAdam, SplitSGD
from ..schedules import Schedule, constant, steps, warmup
from .config import Compress, Optimisation


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


def ratio_schedule(settings: Compress, ratio: float) -> Schedule:
    """The ratio after so many epochs; ``ratio`` itself in the end."""
    if settings.ratio_schedule == "warmup":
        return warmup(ratio, settings.ratio_warmup)
    if settings.ratio_schedule == "step":
        return steps(min(1.0, 10 * ratio), {settings.ratio_warmup: ratio})
    return constant(ratio)


def make_optimizer(
    settings: Optimisation,
    model: nn.Module,
    *,
    split: bool = False,
    masking: bool = True,
    freeze: int | None = None,
) -> torch.optim.Optimizer:
    """torch's own, as the settings say; or, ``split``, the one that begins before compression.

    ``masking`` and ``freeze`` are for those: SplitSGD's and SplitAdam's.
    """
    rate, decay, parameters = settings.rate, settings.weight_decay, model.parameters()
    if split and settings.optimizer == "sgd":
        return SplitSGD(
            parameters,
            rate,
            momentum=settings.momentum,
            weight_decay=decay,
            nesterov=settings.nesterov,
            masking=masking,
            max_norm=settings.clip_norm,
        )
    if split:
        return SplitAdam(
            parameters,
            rate,
            weight_decay=decay,
            max_norm=settings.clip_norm,
            beta1=settings.beta1 or 0.0,
            freeze=freeze,
            decoupled_weight_decay=settings.optimizer == "adamw",
        )
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, rate, momentum=settings.momentum, weight_decay=decay, nesterov=settings.nesterov
        )
    if settings.optimizer == "rmsprop":
        return torch.optim.RMSprop(parameters, rate, momentum=settings.momentum, weight_decay=decay)
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    beta1 = 0.9 if settings.beta1 is None else settings.beta1
    return kind(parameters, rate, betas=(beta1, 0.999), weight_decay=decay)
