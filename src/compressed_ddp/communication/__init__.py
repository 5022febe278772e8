"""How it travels: transports, collectives, the DDP hook and the backend for hand-written loops."""

from __future__ import annotations

from .backend import DistributedBackend
from .collectives import AllGather, Sharded
from .hook import GradientSync, attach, compressed_hook
from .lanes import COLLECTIVES
from .local import LocalSync
from .lowrank import LowRank
from .reducer import Reducer
from .transport import InProcessTransport, TorchTransport, run_in_process

__all__ = [
    "COLLECTIVES",
    "AllGather",
    "DistributedBackend",
    "GradientSync",
    "InProcessTransport",
    "LocalSync",
    "LowRank",
    "Reducer",
    "Sharded",
    "TorchTransport",
    "attach",
    "compressed_hook",
    "run_in_process",
]
