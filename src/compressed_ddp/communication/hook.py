"""One line for DistributedDataParallel: ``sync = attach(ddp, CompressionConfig(...))``."""

# No `from __future__ import annotations` here: DDP inspects the hook's annotations as objects.

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ..compression.base import BaseCompressor, check_gradient
from ..compression.factory import from_config
from ..error_feedback.state import damage_told
from ..layout import BucketLayout, bucket_strides
from ..metrics import Ledger
from ..optim import SplitOptimizer, checked_split
from ..types import CompressionConfig, SyncError
from .choices import checked_scale, resolve
from .handshake import agree, fingerprint
from .lanes import split_by_size
from .reducer import Reducer
from .rollcall import blamed
from .transport import TorchTransport
from .worker import Worker

_BY_NAME = ("residuals", "kept")
"""Fields of a state that hold tensors by parameter name, at some depth."""
_HOOKED = "this model has a communication hook already; build a new DistributedDataParallel to attach to"


class GradientSync:
    """What ``attach`` returns: statistics, state, and the end of it all.

    ``stats`` is the ledger; print it. ``state_dict`` and ``load_state_dict`` go into your
    checkpoints, on every rank its own. ``close`` ends the worker thread and its process group.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        config: CompressionConfig,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        parameters = dict(model.module.named_parameters())
        device = next((p.device for p in parameters.values() if p.requires_grad), torch.device("cpu"))
        self._device = device
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = parameters
        # What DDP was told to leave alone may differ from rank to rank. What is frozen may not.
        left = set(model.parameters_to_ignore)
        self._shared = {name: p for name, p in parameters.items() if name not in left and _has_bits(p)}

        def prepare() -> tuple[
            tuple[BaseCompressor, CompressionConfig, SplitOptimizer | None], dict[str, Any]
        ]:
            if getattr(model, "_comm_hooks", None):
                raise ValueError(_HOOKED)
            _check_model(model, parameters)
            compressor = from_config(config, device)
            hold = config.hold_unused or (model.find_unused_parameters and not model.static_graph)
            resolved = resolve(replace(config, hold_unused=hold), compressor)
            told = fingerprint(resolved, parameters)
            halves = None if optimizer is None else checked_split(optimizer)
            if halves is not None:
                synchronised = {name: p for name, p in parameters.items() if name not in left}
                halves.join(synchronised, self._transport.world_size, memory_order=True)
                told["optimizer"] = halves.describe()
            return (compressor, resolved, halves), told

        self._transport = TorchTransport(model.process_group, config.sync_timeout, device.type)
        try:
            compressor, resolved, halves = agree(self._transport, device, prepare)
            self._reducer = Reducer(compressor, resolved, self._transport, device=device, sender=halves)
        except BaseException:
            self._transport.close()
            raise
        self._worker = Worker(self._transport.alive)
        # When this object is forgotten, and at interpreter exit.
        weakref.finalize(self, _end, self._worker, self._transport)
        self._layouts: dict[tuple[int, ...], BucketLayout] = {}
        self.error: BaseException | None = None
        """The first error of the worker thread, with its traceback; backward only quotes it."""
        self._scale = 1.0

    @property
    def config(self) -> CompressionConfig:
        """The configuration, every choice made; ``ratio`` may have changed since."""
        return self._reducer.config

    @property
    def ratio(self) -> float:
        """Share of the entries that is sent now."""
        return self._reducer.ratio

    def set_ratio(self, ratio: float) -> None:
        """Send this share of the entries from the next step on. All ranks call it, between steps.

        Nothing that is owed is lost, nothing is built anew but the messages. The ranks compare the
        ratio first, in two small messages, and if it differs or cannot be they all raise: SyncError, or
        ValueError where it cannot be. Call it when the ratio changes (``schedules`` says when).
        """
        self._reducer.set_ratio(ratio)

    @property
    def loss_scale(self) -> float:
        """By what the loss was multiplied (GradScaler's ``get_scale()``), set before backward and alike on
        all ranks: residuals stay in the gradient's own units when it changes. A power of two is exact."""
        return self._scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._scale = checked_scale(scale)

    @property
    def stats(self) -> Ledger:
        """Bytes sent and received, saved, and seconds by phase; ``print(sync.stats)``."""
        return self._reducer.stats

    @property
    def step(self) -> int:
        """Steps synchronised so far."""
        return self._reducer.step

    @property
    def counted(self) -> bool:
        """Whether the last step counted, alike on all ranks once backward is over; True before the first.

        False: somebody's gradient was NaN or infinite in some bucket, and no residual changed. Means in other
        buckets may be finite all the same: whoever has several optimizers must then step none of them.
        """
        return self._reducer.counted

    def residual_norm(self) -> float:
        """The Euclidean norm of what this rank has not sent yet."""
        return self._reducer.memory.norm()

    def state_dict(self) -> dict[str, Any]:
        """Copies of all that the next step depends on. Call between steps, on every rank.

        Residuals are keyed by parameter name. Tensors and plain values only, so the file loads
        with ``torch.load(path, weights_only=True)``.
        """
        state = self._reducer.state_dict()
        for bucket in state["buckets"]:  # owners' debts stay in the order of memory, which is told
            bucket["strides"] = [list(bucket_strides(self._parameters[name])) for name in bucket["names"]]
        return state | {field: _each(self._logical, state[field]) for field in _BY_NAME}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where this rank's ``state`` was saved. All ranks must call it, between steps.

        Raises ValueError if the state is of another model, rank or number of workers, and
        SyncError if another rank's does not fit or is of another step; nothing is changed then.
        """
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}

        def prepare() -> tuple[Mapping[str, Any], dict[str, Any]]:
            if not isinstance(state, Mapping):  # which the reducer refuses
                return state, {}
            with damage_told():
                self._check_order(state)
                present = [field for field in _BY_NAME if field in state]
                return {
                    **state,
                    **{field: _each(self._in_memory_order, state[field]) for field in present},
                }, {}

        self._reducer.load_state_dict(agree(self._transport, self._device, prepare), shapes)

    def close(self) -> None:
        """End the worker thread and give its process group back. Safe to call twice."""
        self._worker.close()
        self._transport.close()

    def __enter__(self) -> "GradientSync":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Queue ``bucket`` for the worker thread; the future completes with its own buffer."""
        if self.error is not None:
            raise SyncError(f"synchronisation failed in an earlier step: {self.error}") from self.error
        if self._worker.closed:
            raise SyncError(
                "this model's GradientSync was closed; build a new DistributedDataParallel to go on"
            )
        buffer = bucket.buffer()
        try:
            check_gradient(buffer)
            layout = self._layout(bucket)
        except Exception as error:
            # After the buckets before it, so that the others lose nothing that this rank still can do.
            self._worker.submit(partial(self._failed, error))
            raise
        first, last = bucket.index() == 0, bucket.is_last()
        # Outside of backward DDP calls hooks only for a rank that has run out of data, with zeros.
        joined = torch._C._current_graph_task_id() == -1 and not bool(buffer.any())
        devices: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        ready = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None
        scale = self._scale
        submitted = time.perf_counter()

        def work() -> None:
            if self.error is not None:
                raise SyncError(f"an earlier bucket failed: {self.error}")
            if ready is not None:
                torch.cuda.current_stream(buffer.device).wait_event(ready)
            if first:
                self._reducer.begin_step(self._shared, joined=joined)
            self._reducer.reduce_(layout, buffer, last=last, joined=joined, scale=scale)
            if last:
                self.stats.exposed(time.perf_counter() - submitted)

        self._worker.promise(future, buffer, work, self._failed)
        return future

    def _failed(self, error: Exception) -> None:
        """The first error ends it: the step is forgotten, and the others hear of it now."""
        if self.error is None:
            self.error = error
            self._reducer.abandon_step()
            self._transport.close(failed=True, blamed=blamed(error))

    def _logical(self, name: str, residual: Tensor) -> Tensor:
        """DDP lays a gradient in its parameter's memory order; a state has that of its indices."""
        parameter = self._parameters[name]
        return residual.reshape(-1).as_strided(parameter.shape, bucket_strides(parameter)).contiguous()

    def _check_order(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if what owners owe lies in another memory format than this model has."""
        for bucket in state.get("buckets", ()):
            if not isinstance(bucket, Mapping) or not bucket.get("state"):
                continue
            for name, strides in zip(bucket.get("names", ()), bucket.get("strides", ()), strict=False):
                parameter = self._parameters.get(name)
                now = list(strides) if parameter is None else list(bucket_strides(parameter))
                if now != list(strides):
                    raise ValueError(
                        f"state was saved with another memory format: {name!r} had strides {strides}, now "
                        f"{now}. Go on with the one it was saved with (channels_last?)"
                    )

    def _in_memory_order(self, name: str, residual: Tensor) -> Tensor:
        """The inverse of ``_logical``; what does not fit is left for ``load_state_dict`` to refuse."""
        parameter = self._parameters.get(name)
        fits = isinstance(residual, Tensor) and parameter is not None and residual.shape == parameter.shape
        if not fits or not _has_bits(residual) or parameter is None or parameter.is_contiguous():
            return residual
        laid = torch.empty_like(residual, memory_format=torch.contiguous_format)
        laid.view(-1).as_strided(residual.shape, bucket_strides(parameter)).copy_(residual)
        return laid

    def _layout(self, bucket: GradBucket) -> BucketLayout:
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            names = tuple(self._names[i] for i in key)
            self._layouts[key] = BucketLayout(names, tuple(p.shape for p in parameters))
        return self._layouts[key]


def compressed_hook(state: GradientSync, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook that ``attach`` registers; ``state`` is the GradientSync."""
    return state.on_bucket(bucket)


def attach(
    model: DistributedDataParallel,
    config: CompressionConfig | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> GradientSync:
    """Make ``model`` synchronise its gradients compressed. All ranks call it, before training.

    ``optimizer`` is for those of ``compressed_ddp.optim``, which do half of their work before the
    compression. Any other one needs to know nothing: it finds the mean in ``grad``, as always.

    Compares configuration, parameters and versions over all ranks first, and raises SyncError on
    all of them if any differ. Keep what it returns: it has the statistics and the state.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"attach needs a DistributedDataParallel model, got {type(model).__name__}; wrap it first, or "
            "use DistributedBackend in a loop of your own"
        )
    if config is not None and not isinstance(config, CompressionConfig):
        raise TypeError(
            f"attach needs a CompressionConfig, got {config!r}; CompressionConfig(compressor=...)"
        )
    sync = GradientSync(model, config or CompressionConfig(), optimizer)
    try:
        model.register_comm_hook(sync, compressed_hook)
    except BaseException as error:
        sync.close()
        if isinstance(error, RuntimeError) and "called once" in str(error):  # one of torch's built-in hooks
            raise ValueError(_HOOKED) from error
        raise
    return sync


def _each(change: Callable[[str, Tensor], Tensor], tensors: Any) -> Any:
    """``change`` for every tensor by its name; what is no mapping is left for others to refuse."""
    if not isinstance(tensors, Mapping):
        return tensors
    return {
        name: _each(change, found) if isinstance(found, Mapping) else change(name, found)
        for name, found in tensors.items()
    }


def _end(worker: Worker, transport: TorchTransport) -> None:
    """End the thread, then gloo's own threads.

    Until they end they may hold a tensor of ours, and letting go of one takes the interpreter's
    lock: torch aborts the process if that happens while the interpreter shuts down.
    """
    if worker.close(5.0) and transport.backend == "gloo":
        transport.close()


def _has_bits(parameter: Tensor) -> bool:
    """Whether it can be read; what is trained always can, something frozen may be of any kind."""
    return parameter.layout is torch.strided and parameter.device.type != "meta"


def _check_model(model: torch.nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Raises before anything is sent if some parameter's gradient could not be compressed."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise TypeError(
                f"{name.removeprefix('module.')!r} has sparse gradients; build it with sparse=False, or keep "
                "it out of this DDP model"
            )
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            check_gradient(parameter)
            split_by_size(BucketLayout((name,), (parameter.shape,)))
