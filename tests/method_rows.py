"""Every method as a row. A new method is a new row, and tests/distributed/test_every_method.py says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from compressed_ddp import SplitAdam, SplitSGD
from compressed_ddp.schedules import Schedule, constant, steps, warmup

Parameters = Iterable[nn.Parameter]
FIXED = constant(0.05)


@dataclass(frozen=True)
class Row:
    """One method: an optimizer, and what is set beside it."""

    optimizer: Callable[[Parameters], torch.optim.Optimizer]
    config: Mapping[str, Any] = field(default_factory=dict)
    ratio: Schedule = FIXED
    """By step; the last one is what the run was configured with."""
    micro: int = 1
    """Micro-batches that make one step."""
    precision: str = "fp32"
    clip: float | None = None
    """Norm to which the mean is clipped, behind the synchronisation."""
    local: dict[str, Any] = field(default_factory=dict)
    """Settings of LocalSync; empty: gradients are synchronised in every step."""


def sgd(**options: Any) -> Callable[[Parameters], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=0.05, **options)


def split_sgd(**options: Any) -> Callable[[Parameters], torch.optim.Optimizer]:
    return lambda parameters: SplitSGD(parameters, lr=0.05, **options)


def split_adam(parameters: Parameters, **options: Any) -> SplitAdam:
    return SplitAdam(parameters, lr=0.003, weight_decay=0.01, max_norm=0.5, **options)


def one_bit_adam(parameters: Parameters) -> SplitAdam:
    """Its second moment freezes before the run is saved."""
    return split_adam(parameters, beta1=0.9, freeze=3)


def split_l2(parameters: Parameters) -> SplitAdam:
    return split_adam(parameters, beta1=0.9, decoupled_weight_decay=False)


def adamw(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.003)


MOMENTUM = sgd(momentum=0.9)
DGC = {"max_norm": 0.3, "weight_decay": 0.01}
EF21, SGDM = {"memory": "ef21"}, {"memory": "ef21-sgdm", "eta": 0.3}
WARMUP = warmup(0.05, 6.0)

ROWS: dict[str, Row] = {
    "sgd": Row(sgd()),
    "momentum": Row(MOMENTUM),
    "nesterov": Row(sgd(momentum=0.9, nesterov=True, weight_decay=0.01)),
    "adam": Row(lambda parameters: torch.optim.Adam(parameters, lr=0.003)),
    "adamw": Row(adamw),
    "rmsprop": Row(lambda parameters: torch.optim.RMSprop(parameters, lr=0.003, momentum=0.9)),
    "DGC": Row(split_sgd(**DGC), ratio=WARMUP),
    "DGC, nesterov": Row(split_sgd(**DGC, nesterov=True), ratio=WARMUP),
    "DGC, no correction": Row(split_sgd(**DGC, momentum=0.0), ratio=WARMUP),
    "DGC, no masking": Row(split_sgd(**DGC, masking=False), ratio=WARMUP),
    "DGC, no clipping": Row(split_sgd(weight_decay=0.01), ratio=WARMUP),
    "DGC, no warm-up": Row(split_sgd(**DGC)),
    "DGC by a threshold": Row(split_sgd(**DGC), {"compressor": "threshold"}, ratio=WARMUP),
    "DGC at random": Row(split_sgd(**DGC), {"compressor": "randomk"}),
    "DGC by tensor": Row(split_sgd(**DGC), {"scope": "tensor", "min_compress_numel": 0}),
    "split Adam": Row(split_adam),
    "split Adam, momentum": Row(partial(split_adam, beta1=0.9)),
    "split Adam, momentum, frozen": Row(one_bit_adam, ratio=WARMUP),
    "split Adam, L2": Row(split_l2),
    "1-bit Adam's compressor": Row(one_bit_adam, {"compressor": "sign"}, ratio=constant(1.0)),
    "EF21": Row(sgd(), EF21),
    "EF21-SGDM": Row(sgd(), SGDM),
    "EF21-SGDM, AdamW behind it": Row(adamw, SGDM),
    "EF21, split Adam": Row(split_adam, EF21),
    "ratio by steps": Row(MOMENTUM, ratio=steps(0.3, {3: 0.02, 7: 1.0, 8: 0.05})),
    "ratio by a function": Row(MOMENTUM, ratio=lambda step: 0.05 + 0.2 / (1 + step)),
    "adaptive": Row(MOMENTUM, {"adapt_every": 3}),
    "adaptive DGC": Row(split_sgd(**DGC), {"adapt_every": 4}, ratio=WARMUP),
    "int4 values by tensor": Row(MOMENTUM, {"values": "int4", "scope": "tensor"}),
    "accumulation": Row(MOMENTUM, micro=4),
    "accumulation, DGC": Row(split_sgd(**DGC), micro=3),
    "clipped behind it": Row(MOMENTUM, clip=0.05),
    "bf16": Row(adamw, precision="bf16"),
    "fp16": Row(MOMENTUM, precision="fp16", clip=0.1),
    "fp16, DGC": Row(split_sgd(**DGC), ratio=WARMUP, precision="fp16", micro=2),
    "fp16, split Adam": Row(split_adam, precision="fp16"),
    "fp16, split Adam, momentum, frozen": Row(one_bit_adam, precision="fp16"),
    "fp16, EF21-SGDM": Row(adamw, SGDM, precision="fp16"),
    "local steps": Row(adamw, local={"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    "local steps, ratio by steps": Row(MOMENTUM, ratio=steps(0.3, {6: 0.05}), local={"nesterov": False}),
    "local steps, EF21": Row(adamw, EF21, local={"momentum": 0.5}),
    "local steps, adaptive, fp16": Row(adamw, {"adapt_every": 2}, precision="fp16", local={"lr": 1.0}),
}
