"""One method on one DDP model: its life from attaching to closing, and what this rank saw of it."""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..metrics import TIMES, Ledger, SocketMeter, StepRecord
from .emulate import EmulatedModel
from .methods import Handle, Method, Settings, ledger_of

ONE_BUCKET_MB = 1 << 20
"""No model is larger."""


def give_back() -> None:
    """Collect garbage, and return free memory to the system where the allocator can.

    DDP is full of cycles, and its buckets are as large as the model. glibc keeps what it was given back in
    many places, a bit more after each method: with sixteen hosts on one machine that ended a run.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
        if trim is not None:
            trim(0)


@dataclass
class Figures:
    """What one rank found in the steps that count."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    sent: float = math.nan
    received: float = math.nan
    phases: list[float] = field(default_factory=lambda: [math.nan] * len(TIMES))
    """Seconds in all steps together."""

    def as_tensor(self) -> Tensor:
        """The seconds of each step, then CPU a step, bytes sent, bytes received, and the phases."""
        rest = [statistics.mean(self.cpu), self.sent, self.received, *self.phases]
        return torch.tensor([*self.seconds, *rest], dtype=torch.float64)


class MethodRun:
    """A method on a DDP model of its own, whose traffic goes through ``group``."""

    def __init__(self, method: Method, settings: Settings, bucket_mb: float, group: Any) -> None:
        self._method, self._settings, self._bucket_mb, self._group = method, settings, bucket_mb, group
        self._ddp: DistributedDataParallel | None = None
        self._handle: Handle | None = None
        self._token: Tensor | None = None
        self._meter = SocketMeter()
        self._before: StepRecord | None = None
        self.figures = Figures()

    def attach(self, model: EmulatedModel) -> None:
        self._ddp = DistributedDataParallel(
            model,
            process_group=self._group,
            bucket_cap_mb=ONE_BUCKET_MB if self._method.one_bucket else self._bucket_mb,
            gradient_as_bucket_view=True,
            init_sync=False,  # nobody reads the weights: no need to send them around
        )
        self._handle = self._method.attach(self._ddp, self._settings)

    def prepare(self) -> None:
        """All of a step that is neither compute nor communication, so that ranks begin together."""
        assert self._ddp is not None
        self._token = self._ddp()

    def step(self) -> None:
        """One backward pass with its synchronisation; notes its time."""
        token, self._token = self._token, None
        assert token is not None
        start, cpu = time.perf_counter(), time.process_time()
        token.backward()  # type: ignore[no-untyped-call]
        self.figures.seconds.append(time.perf_counter() - start)
        self.figures.cpu.append(time.process_time() - cpu)

    def begin(self) -> None:
        """From here on it counts."""
        ledger = self._ledger()
        self._before = replace(ledger.total) if ledger is not None else None
        self.figures = Figures()
        self._meter = SocketMeter()

    def end(self) -> None:
        """Complete the figures."""
        traffic = self._meter.read()
        if traffic is not None:
            self.figures.sent, self.figures.received = traffic
        ledger = self._ledger()
        if ledger is not None and self._before is not None:
            self.figures.phases = [getattr(ledger.total, p) - getattr(self._before, p) for p in TIMES]

    def facts(self) -> dict[str, Any]:
        """What is the same on every rank: buckets, and which kernels ran if they are ours."""
        assert self._ddp is not None
        ledger, seen = self._ledger(), self._ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        return {
            "buckets": seen.get("num_buckets_reduced"),
            "kernels": ledger.kernels if ledger is not None else None,
        }

    def close(self) -> None:
        """Give everything back, all references to the group included. Safe to call twice."""
        if self._handle is not None:
            self._handle.close()
        self._handle = self._ddp = self._token = self._group = None
        give_back()

    def _ledger(self) -> Ledger | None:
        return ledger_of(self._handle) if self._handle is not None else None
