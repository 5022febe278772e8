"""What is sent: every compressor, by name through ``get_compressor``."""

from __future__ import annotations

from .base import BaseCompressor, CompressStats
from .dense import BF16Compressor, DenseCompressor, FP16Compressor
from .factory import COMPRESSORS, get_compressor
from .powersgd import PowerSGDCompressor
from .quantized import OneBitCompressor, QSGDCompressor, SignCompressor, TernGradCompressor
from .randomk import RandomKCompressor
from .threshold import ThresholdCompressor
from .topk import TopKCompressor, TopKCompressorCPU, TopKCompressorGPU

__all__ = [
    "COMPRESSORS",
    "BF16Compressor",
    "BaseCompressor",
    "CompressStats",
    "DenseCompressor",
    "FP16Compressor",
    "OneBitCompressor",
    "PowerSGDCompressor",
    "QSGDCompressor",
    "RandomKCompressor",
    "SignCompressor",
    "TernGradCompressor",
    "ThresholdCompressor",
    "TopKCompressor",
    "TopKCompressorCPU",
    "TopKCompressorGPU",
    "get_compressor",
]
