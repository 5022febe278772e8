"""Compressors by name: a dictionary. Adding a method means adding a row (see CONTRIBUTING.md)."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..types import CompressionConfig, unknown_name
from .base import BaseCompressor
from .dense import BF16Compressor, DenseCompressor, FP16Compressor
from .powersgd import PowerSGDCompressor
from .quantized import OneBitCompressor, QSGDCompressor, SignCompressor, TernGradCompressor
from .randomk import RandomKCompressor
from .threshold import ThresholdCompressor
from .topk import TopKCompressor, TopKCompressorCPU, TopKCompressorGPU

COMPRESSORS: dict[str, type[BaseCompressor]] = {
    cls.name: cls
    for cls in (
        DenseCompressor,
        FP16Compressor,
        BF16Compressor,
        TopKCompressor,
        ThresholdCompressor,
        RandomKCompressor,
        QSGDCompressor,
        SignCompressor,
        TernGradCompressor,
        OneBitCompressor,
        PowerSGDCompressor,
    )
}


def get_compressor(
    ratio: float = 0.01, device: str | torch.device = "cpu", *, name: str = "topk", **options: Any
) -> BaseCompressor:
    """A compressor by ``name``; by default Top-K with ``ratio``, for tensors on ``device``.

    ``options`` are the compressor's own (``values``, ``threshold``, ``levels``, ``unbiased``,
    ``rank``, ``seed``); one that it does not take is an error.
    """
    if name not in COMPRESSORS:
        raise unknown_name("compressor", name, COMPRESSORS)
    cls = COMPRESSORS[name]
    if name == "topk":
        cls = TopKCompressorCPU if torch.device(device).type == "cpu" else TopKCompressorGPU
    accepted = _options(cls)
    for option in options:
        if option not in accepted:
            raise unknown_name(f"option for compressor {name!r}:", option, accepted)
    if "ratio" in accepted:
        options["ratio"] = ratio
    return cls(**options)


def from_config(config: CompressionConfig, device: str | torch.device = "cpu") -> BaseCompressor:
    """The compressor that ``config`` describes; fields that it has no use for are left alone."""
    if config.compressor not in COMPRESSORS:
        raise unknown_name("compressor", config.compressor, COMPRESSORS)
    accepted = _options(COMPRESSORS[config.compressor])
    fields = config.as_dict()
    options = {name: fields[name] for name in accepted if name in fields and name != "ratio"}
    return get_compressor(config.ratio, device, name=config.compressor, **options)


def _options(cls: type[BaseCompressor]) -> list[str]:
    return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
