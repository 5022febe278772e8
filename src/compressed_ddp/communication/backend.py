"""Synchronisation for hand-written loops, under the original write-up's name."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compression import BaseCompressor, DenseCompressor
from ..compression.base import check_gradient
from ..compression.factory import from_config
from ..error_feedback import ErrorFeedbackBuffer
from ..layout import BucketLayout
from ..metrics import Ledger
from ..optim import checked_split
from ..types import CompressionConfig, Transport
from .choices import check_new_ratio, checked_scale, resolve
from .handshake import agree, fingerprint
from .lanes import split_by_size
from .reducer import Reducer
from .rollcall import blamed
from .transport import TorchTransport, alone, close_when_forgotten


class DistributedBackend:
    """Averages gradients over all workers after backward: compressed, or dense without a compressor.

    The same messages and collectives as ``attach``, on the calling thread, with all parameters
    batched into buckets. Alone, or without an initialised process group, gradients are left as
    they are.
    """

    def __init__(
        self,
        compressor: BaseCompressor | None = None,
        error_buffer: ErrorFeedbackBuffer | None = None,
        *,
        config: CompressionConfig | None = None,
        bucket_cap_mb: float = 25.0,
        group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """``config`` adds what a compressor does not know: collective, scope, timeout and so on. Given
        without a compressor, it names that too.

        Without ``error_buffer`` nothing is remembered: what is not sent is lost. (EF21, a ``memory`` of
        ``config``, has buffers of its own.) ``transport`` replaces the process group (tests and simulations).
        ``optimizer`` is for those of ``compressed_ddp.optim``, which do half of their work before it.
        """
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb!r}")
        if compressor is not None and not isinstance(compressor, BaseCompressor):
            raise TypeError(
                f"compressor must be one that get_compressor makes, got {compressor!r}; "
                "by name: config=CompressionConfig(compressor=...)"
            )
        if error_buffer is not None and not isinstance(error_buffer, ErrorFeedbackBuffer):
            raise TypeError(f"error_buffer must be an ErrorFeedbackBuffer, got {error_buffer!r}")
        if config is not None:
            _check_together(compressor, error_buffer, config)
        if compressor is None and config is not None:
            compressor = from_config(config)
        self.compressor = compressor
        self.error_buffer = error_buffer
        self._config = config or CompressionConfig()
        self._cap_mb = float(bucket_cap_mb)
        self._group = group
        self._transport = transport
        self._halves = None if optimizer is None else checked_split(optimizer)
        self._scale = 1.0
        self._ratio: float | None = None
        self._reducer: Reducer | None = None
        self._forgotten: weakref.finalize[..., Any] | None = None
        self._buckets: dict[tuple[tuple[str, torch.Size], ...], list[BucketLayout]] = {}
        self._last: tuple[tuple[str, torch.Size], ...] | None = None
        """What was trained in the last step."""

    @property
    def loss_scale(self) -> float:
        """As ``GradientSync.loss_scale``, set before ``allreduce_gradients``: let that come before
        ``GradScaler.unscale_``, or one rank's overflow would be skipped by that rank alone."""
        return self._scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._scale = checked_scale(scale)

    @property
    def world_size(self) -> int:
        """Workers that gradients are averaged over; 1 while there is no process group."""
        if self._transport is not None:
            return self._transport.world_size
        return dist.get_world_size(self._group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def _remembers(self) -> bool:
        return self.error_buffer is not None or self._config.memory != "ef"

    @property
    def stats(self) -> Ledger | None:
        """The ledger; None before the first synchronised step."""
        return self._reducer.stats if self._reducer else None

    @property
    def counted(self) -> bool:
        """As ``GradientSync.counted``, after ``allreduce_gradients``; True if that leaves gradients alone."""
        return self._reducer.counted if self._reducer else True

    @property
    def ratio(self) -> float:
        """Share of the entries that is sent now."""
        if self._ratio is not None:
            return self._ratio
        return self.compressor.ratio if self.compressor is not None else 1.0

    def set_ratio(self, ratio: float) -> None:
        """Send this share of the entries from the next step on; as ``GradientSync.set_ratio``."""
        if self._reducer is not None:
            self._reducer.set_ratio(ratio)
        else:
            check_new_ratio(self.compressor or DenseCompressor(), ratio)
            self._ratio = float(ratio)  # the first step compares it with everything else

    def allreduce_gradients(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Replace every parameter's ``grad`` by the mean over all workers.

        All ranks call it with the same parameters, which may be others than in the step before (gradual
        unfreezing). A parameter that requires a gradient and has
        none counts as zero, so that ranks may differ in what they used. The first call compares
        models and configurations and raises SyncError if they differ.
        """
        if self.world_size == 1 and not self._remembers and self._halves is None:
            return
        start = time.perf_counter()
        parameters = _trained(named_parameters)
        if self._reducer is None:
            self._reducer = self._start(parameters, _check_gradients_)
        try:
            _check_gradients_(parameters)
            buckets = self._layouts(parameters, self._reducer.transport.world_size)
            self._reducer.begin_step(parameters)
            self._reduce_(self._reducer, parameters, buckets)
        except Exception as error:
            self._reducer.abandon_step()
            net = self._reducer.transport
            if net.world_size > 1:  # alone nobody waits, and what was wrong may be put right
                net.close(failed=True, blamed=blamed(error))
            raise
        self._reducer.stats.exposed(time.perf_counter() - start)

    def _reduce_(
        self, reducer: Reducer, parameters: Mapping[str, Tensor], buckets: list[BucketLayout]
    ) -> None:
        for layout in buckets:
            grads = {name: parameters[name].grad for name in layout.names}
            flat = torch.cat([grad.reshape(-1) for grad in grads.values() if grad is not None])
            reducer.reduce_(layout, flat, last=layout is buckets[-1], scale=self.loss_scale)
            for name, view in layout.views(flat).items():
                grad = grads[name]
                assert grad is not None
                grad.copy_(view)

    def state_dict(self) -> dict[str, Any]:
        """Copies of all that the next step depends on; empty before the first step."""
        return self._reducer.state_dict() if self._reducer else {}

    def load_state_dict(
        self, state: Mapping[str, Any], named_parameters: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Go on where this rank's ``state`` was saved. All ranks call it together, between steps.

        An empty state is one of before the first step: there is nothing to load.
        """
        parameters = _trained(named_parameters)
        if self._reducer is None:
            self._reducer = self._start(parameters)
        reducer, device = self._reducer, _device(parameters)

        def prepare() -> tuple[bool, dict[str, Any]]:
            empty = isinstance(state, Mapping) and not state
            if empty and reducer.step:
                raise ValueError(
                    f"the state is empty, of before the first step, and this backend has taken "
                    f"{reducer.step}: make a new one to begin again"
                )
            return empty, {"state": "empty" if empty else "of a step"}

        if not agree(reducer.transport, device, prepare):
            reducer.load_state_dict(state, {name: p.shape for name, p in parameters.items()})

    def close(self) -> None:
        """Give the process group back. Safe to call twice."""
        if self._reducer is not None:
            self._reducer.transport.close()
            self._reducer = None
            if self._forgotten is not None:
                self._forgotten.detach()

    def _start(
        self, parameters: Mapping[str, Tensor], check: Callable[[Mapping[str, Tensor]], None] | None = None
    ) -> Reducer:
        """All ranks together; if ``check`` raises on one of them, the others are told."""
        compressor = self.compressor or DenseCompressor()
        device = _device(parameters)
        transport = self._transport
        if transport is None and self.world_size == 1:
            transport = alone()
        elif transport is None:
            transport = TorchTransport(self._group, self._config.sync_timeout, device.type)

        def prepare() -> tuple[CompressionConfig, dict[str, Any]]:
            if check is not None:
                check(parameters)
            feedback = self._config.error_feedback if self._remembers else False
            config = resolve(replace(self._config, error_feedback=feedback), compressor)
            told = fingerprint(config, parameters)
            told |= {"ratio": self.ratio, "bucket_cap_mb": self._cap_mb}
            if self._halves is not None:
                self._halves.join(parameters, transport.world_size)
                told["optimizer"] = self._halves.describe()
            return config, told

        try:
            config = agree(transport, device, prepare)
            reducer = Reducer(compressor, config, transport, self.error_buffer, device, self._halves)
        except BaseException:
            transport.close()
            raise
        reducer.take_ratio(self.ratio)
        self._ratio = None
        self._forgotten = close_when_forgotten(self, transport)
        return reducer

    def _layouts(self, parameters: Mapping[str, Tensor], world_size: int) -> list[BucketLayout]:
        """The buckets of this step. The optimizer learns of parameters that were unfrozen, or frozen."""
        key = tuple((name, p.shape) for name, p in parameters.items())
        if key != self._last and self._halves is not None:
            self._halves.join(parameters, world_size)
        self._last = key
        if key not in self._buckets:
            self._buckets[key] = in_buckets(parameters, int(self._cap_mb * 2**20))
        return self._buckets[key]


def _device(parameters: Mapping[str, Tensor]) -> torch.device:
    """Where start-up messages travel from."""
    return next((p.device for p in parameters.values()), torch.device("cpu"))


def _check_together(
    compressor: BaseCompressor | None, memory: ErrorFeedbackBuffer | None, config: CompressionConfig
) -> None:
    """Raises ValueError where ``config`` asks for what the other arguments leave out or contradict."""
    if config.error_feedback and memory is None and config.memory == "ef":
        raise ValueError(
            "error_feedback=True needs an error_buffer to keep what is not sent: pass ErrorFeedbackBuffer()"
        )
    if compressor is not None and config.compressor not in (compressor.name, CompressionConfig.compressor):
        raise ValueError(
            f"compressor is {compressor.name!r} and config says {config.compressor!r}: leave one of them out"
        )


def in_buckets(parameters: Mapping[str, Tensor], cap: int) -> list[BucketLayout]:
    """Parameters in order, in buckets of one dtype and device and of about ``cap`` bytes."""
    runs: list[list[str]] = []
    kind, room = None, 0
    for name, p in parameters.items():
        nbytes = p.numel() * p.element_size()
        if (p.dtype, p.device) != kind or nbytes > room:
            runs.append([])
            kind, room = (p.dtype, p.device), cap
        runs[-1].append(name)
        room -= nbytes
    layouts = [BucketLayout(tuple(r), tuple(parameters[n].shape for n in r)) for r in runs]
    return [part for layout in layouts for part in split_by_size(layout)]


def _check_gradients_(parameters: Mapping[str, Tensor]) -> None:
    """Zeros for parameters without a gradient; raises TypeError for one that cannot be compressed."""
    for name, parameter in parameters.items():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        try:
            check_gradient(parameter.grad)
        except TypeError as error:
            raise TypeError(f"parameter {name!r}: {error}") from None


def _trained(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Parameters that require a gradient, by name; one with several names under the first, as torch does."""
    try:
        pairs = [(name, p) for name, p in named_parameters if p.requires_grad]
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError("(name, parameter) pairs are needed: pass model.named_parameters()") from error
    found: dict[str, Tensor] = {}
    known: set[int] = set()
    for name, parameter in pairs:
        if id(parameter) in known:
            continue
        if name in found:
            raise ValueError(
                f"two parameters are named {name!r}, and one of them would never be synchronised: give each "
                "model's names a prefix, as in named_parameters(prefix='encoder')"
            )
        found[name] = parameter
        known.add(id(parameter))
    return found
