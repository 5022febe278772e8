"""What tests of optimizers in two halves are made of: a few parameters, their gradients, a reducer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compressed_ddp import CompressionConfig, SplitAdam, SplitOptimizer
from compressed_ddp.communication import Reducer
from compressed_ddp.compression.factory import from_config
from compressed_ddp.layout import BucketLayout
from compressed_ddp.types import Slot, Transport

SHAPES = {"weight": torch.Size([30, 20]), "bias": torch.Size([300]), "late": torch.Size([7, 50])}
LAYOUT = BucketLayout(tuple(SHAPES), tuple(SHAPES.values()))
EXACT = {"ratio": 1.0, "values": "fp32", "min_compress_numel": 0}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradient(step: int, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(LAYOUT.numel, generator=generator) * 10.0 ** torch.linspace(-4, 1, LAYOUT.numel)


def joined(named: dict[str, nn.Parameter], **options: Any) -> SplitAdam:
    optimizer = SplitAdam(named.values(), **options)
    optimizer.join(named)
    return optimizer


def reducer(net: Transport, sender: SplitOptimizer, **options: Any) -> Reducer:
    config = CompressionConfig(**options)
    return Reducer(from_config(config), config, net, sender=sender)


def first_half(optimizer: SplitOptimizer, layout: BucketLayout = LAYOUT) -> None:
    """As if gradients of zero had been synchronised."""
    slots = {name: Slot(torch.zeros(layout.numel)) for name in optimizer.memories}
    optimizer.before_(layout, torch.zeros(layout.numel), slots, [0] * len(layout.names))


def give(named: dict[str, nn.Parameter], flat: Tensor) -> None:
    for name, view in LAYOUT.views(flat).items():
        named[name].grad = view.clone()
