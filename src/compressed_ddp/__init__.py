"""Data-parallel training on slow networks: compressed gradients that really travel compressed.

>>> sync = attach(ddp, CompressionConfig(compressor="topk", ratio=0.01))  # doctest: +SKIP
"""

from __future__ import annotations

from .communication import DistributedBackend, GradientSync, LocalSync, attach, compressed_hook
from .compression import (
    CompressStats,
    TopKCompressorCPU,
    TopKCompressorGPU,
    get_compressor,
)
from .error_feedback import ErrorFeedbackBuffer, reshard_states
from .optim import SplitAdam, SplitOptimizer, SplitSGD
from .types import CompressionConfig, Payload, SyncError, WireError
from .version import __version__

__all__ = [
    "CompressStats",
    "CompressionConfig",
    "DistributedBackend",
    "ErrorFeedbackBuffer",
    "GradientSync",
    "LocalSync",
    "Payload",
    "SplitAdam",
    "SplitOptimizer",
    "SplitSGD",
    "SyncError",
    "TopKCompressorCPU",
    "TopKCompressorGPU",
    "WireError",
    "__version__",
    "attach",
    "compressed_hook",
    "get_compressor",
    "reshard_states",
]
