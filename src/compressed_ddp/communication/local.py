"""Local steps: every worker trains by itself, and every H steps they meet."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..compression import BaseCompressor
from ..compression.base import check_gradient
from ..compression.factory import from_config
from ..error_feedback.state import check_local, moved
from ..kernels.reference import all_finite
from ..metrics import Ledger
from ..types import CompressionConfig, SyncError, Transport
from .backend import in_buckets
from .choices import resolve
from .guard import fingerprint as fingerprint_of
from .handshake import agree, digest, fingerprint
from .reducer import Reducer
from .rollcall import blamed
from .sameness import check_same, combined
from .transport import TorchTransport, alone, close_when_forgotten


class LocalSync:
    """H optimizer steps on each worker, then one compressed update of what they all began with.

    Call ``step`` after each ``optimizer.step()``. With the anchor a, which all workers have alike, and a
    worker's own weights w after H steps:

    1. each worker's pseudo-gradient a - w is compressed with error feedback, and averaged;
    2. v = momentum * v + mean; a = a - lr * (mean + momentum * v), or lr * v without ``nesterov``;
    3. every worker goes on from a.

    After each such meeting the weights are the same to the bit on all workers. The optimizer's state stays
    with its worker and is never sent. So do buffers (running statistics of batch norms): average them
    yourself before you evaluate. Blocks, on the calling thread, once in H steps.

    Douillard et al., "DiLoCo", 2023; with Top-K and error feedback: Sarfi et al., "SparseLoCo", 2025.
    """

    def __init__(
        self,
        model: nn.Module,
        config: CompressionConfig | None = None,
        *,
        steps: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        bucket_cap_mb: float = 25.0,
        group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
    ) -> None:
        """All ranks call it, when the weights are in place; rank 0's become everyone's (see ``begin``).

        ``model`` is the bare one, not wrapped in DistributedDataParallel. ``lr``, ``momentum`` and
        ``nesterov`` are of the outer update. Alone, or without a process group, nothing is sent, and the
        outer update is applied all the same. ``transport`` replaces the process group in simulations.
        """
        _check_types(model, config)
        self.config = config or CompressionConfig()
        self.steps, self.lr, self.momentum, self.nesterov = steps, lr, momentum, nesterov
        self.since = 0
        """Steps since the workers met; alike on all ranks."""
        self.error: BaseException | None = None
        """Why the last meeting failed, if it did."""
        self._model = model
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        self._device, self._closed = device, False

        def prepare() -> tuple[tuple[BaseCompressor, CompressionConfig], dict[str, Any]]:
            _check_numbers(steps, lr, momentum, bucket_cap_mb)
            if not self._parameters:
                raise ValueError(
                    "the model has no parameter that requires a gradient: nothing to synchronise"
                )
            for parameter in self._parameters.values():
                check_gradient(parameter)
            compressor = from_config(self.config, device)
            resolved = resolve(self.config, compressor)
            told = fingerprint(resolved, dict(model.named_parameters()))
            told["local"] = {"steps": steps, "lr": lr, "momentum": momentum, "nesterov": nesterov}
            told["bucket_cap_mb"] = float(bucket_cap_mb)
            return (compressor, resolved), told

        self._net = transport or _network(group, self.config.sync_timeout, device)
        try:
            compressor, self.config = agree(self._net, device, prepare)
            note = f", every {steps} steps"
            self._reducer = Reducer(compressor, self.config, self._net, device=device, note=note)
            self._layouts = in_buckets(self._parameters, int(bucket_cap_mb * 2**20))
            self._nbytes = sum(p.numel() * p.element_size() for p in self._parameters.values())
            self._anchor: dict[str, Tensor] = {}
            self.begin()
        except BaseException:
            self._net.close()
            raise
        self._velocity = {name: torch.zeros_like(anchor) for name, anchor in self._anchor.items()}
        self._forgotten = close_when_forgotten(self, self._net)

    @property
    def stats(self) -> Ledger:
        """Bytes and seconds; a step is a meeting, and a dense ring is counted for every local step."""
        return self._reducer.stats

    @property
    def meetings(self) -> int:
        """How often the workers have met."""
        return self._reducer.step

    @property
    def ratio(self) -> float:
        """Share of the entries that a meeting sends."""
        return self._reducer.ratio

    def set_ratio(self, ratio: float) -> None:
        """Send this share of the entries from the next meeting on; as ``GradientSync.set_ratio``."""
        self._check_open()
        self._reducer.set_ratio(ratio)

    def residual_norm(self) -> float:
        """The Euclidean norm of what this rank has not sent yet."""
        return self._reducer.memory.norm()

    @torch.no_grad()
    def begin(self) -> None:
        """Make rank 0's weights and buffers everyone's, and begin a period there. All ranks together.

        Call it after changing weights by hand. What is owed and the outer momentum stay.
        """
        self._check_open()
        tensors = [*self._model.parameters(), *self._model.buffers()]
        if self._net.world_size > 1:
            _from_first_(self._net, [tensor for tensor in tensors if tensor.numel()])
            mine = combined(fingerprint_of(tensor.detach().contiguous()) for tensor in tensors)
            check_same(
                self._net,
                mine,
                f"rank {self._net.ranks[0]}'s weights and buffers",
                "all-reduce",
                self._device,
            )
        for name, parameter in self._parameters.items():
            self._anchor[name] = parameter.detach().to(_wide(parameter.dtype), copy=True).contiguous()
        self.since = 0

    def step(self) -> bool:
        """Count an optimizer step of this worker; True if the workers met. All ranks alike.

        A parameter that is unfrozen on the way needs a new LocalSync, and a meeting raises ValueError.

        In a meeting where some worker's weights are NaN or infinite, nobody's residual and no momentum
        changes, and everyone goes back to the anchor: the period is lost, and ``stats`` has it as a skipped
        step. What is NaN in that worker's optimizer remains so, and is the user's to reset.
        """
        self._check_open()
        self.since += 1
        if self.since < self.steps:
            return False
        self.synchronize()
        return True

    @torch.no_grad()
    def synchronize(self) -> None:
        """Meet now, however many steps were taken; nothing to do right after a meeting. All ranks together.

        At the end of training, and before an evaluation or a checkpoint of one model for all.
        """
        self._check_open()
        if not self.since:
            return
        start = time.perf_counter()
        for _ in range(self.since - 1):  # dense training would have sent in each of these too
            self.stats.bucket(self._nbytes, self._net.world_size)
        try:
            means = self._meet()
        except Exception as error:
            self.error = error
            self._reducer.abandon_step()
            self._net.close(failed=True, blamed=blamed(error))
            raise
        if all(all_finite(mean) for mean in means.values()):  # alike on all ranks: they have the same means
            self._outer_(means)
        for name, parameter in self._parameters.items():
            parameter.copy_(self._anchor[name])
        self.since = 0
        self.stats.exposed(time.perf_counter() - start)

    def _meet(self) -> dict[str, Tensor]:
        """The mean of all workers' pseudo-gradients. Changes residuals, if all are finite, and no weights."""
        self._check_trained()
        means: dict[str, Tensor] = {}
        self._reducer.begin_step(self._anchor)
        for layout in self._layouts:
            steps = [moved(self._anchor[name], self._parameters[name]) for name in layout.names]
            flat = torch.cat([step.reshape(-1) for step in steps])
            self._reducer.reduce_(layout, flat, last=layout is self._layouts[-1])
            means |= layout.views(flat)
        return means

    def _check_trained(self) -> None:
        """Raises ValueError if this worker trains what no meeting would ever synchronise."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and self._parameters.get(name) is not parameter:
                raise ValueError(
                    f"{name!r} is trained now and was frozen, or another, when this LocalSync was made: it "
                    "would never be synchronised. Call synchronize(), unfreeze or replace it on all ranks, "
                    "and make a new LocalSync"
                )

    def _outer_(self, means: Mapping[str, Tensor]) -> None:
        """SGD on the anchor, as torch.optim.SGD does it."""
        for name, mean in means.items():
            anchor, velocity = self._anchor[name], self._velocity[name]
            mean = mean.to(anchor.dtype)
            velocity.mul_(self.momentum).add_(mean)
            update = mean.add(velocity, alpha=self.momentum) if self.nesterov else velocity
            anchor.sub_(update, alpha=self.lr)

    # --- state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copies of all that the next steps depend on, this rank's weights included. On every rank its own.

        Also in the middle of a period, when weights differ. Save the optimizer's state and the buffers of
        every rank beside it. Tensors and plain values only (``weights_only=True``).
        """
        weights = self._parameters if self.since else {}
        return self._reducer.state_dict() | {
            "local": {
                "since": self.since,
                "anchor": {name: anchor.clone() for name, anchor in self._anchor.items()},
                "momentum": {name: velocity.clone() for name, velocity in self._velocity.items()},
                "weights": {name: weight.detach().clone() for name, weight in weights.items()},
            }
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where this rank's ``state`` was saved; overwrites the model's weights. All ranks together.

        Raises ValueError if the state is of another model, rank or number of workers, and SyncError if
        another rank's does not fit or is of another moment; nothing is changed then.
        """
        self._check_open()
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        dtypes = {name: anchor.dtype for name, anchor in self._anchor.items()}

        def prepare() -> tuple[Mapping[str, Any], dict[str, Any]]:
            local = check_local(state, shapes, dtypes)
            anchor = digest(local["anchor"]), digest(local["momentum"])
            return local, {"state": {"since": local["since"], "anchor and momentum": anchor}}

        local = agree(self._net, self._device, prepare)
        self._reducer.load_state_dict({k: v for k, v in state.items() if k != "local"}, shapes)
        self.since = int(local["since"])
        for name, parameter in self._parameters.items():
            self._anchor[name].copy_(local["anchor"][name])
            self._velocity[name].copy_(local["momentum"][name])
            parameter.copy_(local["weights"][name] if self.since else self._anchor[name])

    def close(self) -> None:
        """Give the process group back. Safe to call twice."""
        self._closed = True
        self._net.close()
        if self._forgotten is not None:
            self._forgotten.detach()

    def __enter__(self) -> LocalSync:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.error is not None:
            raise SyncError(f"an earlier meeting failed: {self.error}") from self.error
        if self._closed:
            raise SyncError("this LocalSync was closed; make a new one to go on")


def _check_types(model: object, config: object) -> None:
    if isinstance(model, DistributedDataParallel):
        raise TypeError(
            "LocalSync needs the model itself, not DistributedDataParallel, which would average gradients in "
            "every step: pass model.module and train that"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"LocalSync needs a torch.nn.Module, got {type(model).__name__}")
    if config is not None and not isinstance(config, CompressionConfig):
        raise TypeError(
            f"LocalSync needs a CompressionConfig, got {config!r}; CompressionConfig(compressor=...)"
        )


def _check_numbers(steps: object, lr: float, momentum: float, bucket_cap_mb: float) -> None:
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps!r}: local steps between two meetings")
    if not 0.0 < lr < math.inf:
        raise ValueError(f"lr must be positive, got {lr!r}; 1 with momentum 0 averages the weights")
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum must be in [0, 1), got {momentum!r}")
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb!r}")


def _network(group: dist.ProcessGroup | None, timeout: float, device: torch.device) -> Transport:
    here = dist.is_available() and dist.is_initialized()
    several = here and dist.get_world_size(group) > 1
    return TorchTransport(group, timeout, device.type) if several else alone()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What the anchor is kept in: small updates would vanish in 16 bits."""
    return torch.promote_types(dtype, torch.float32)


def _from_first_(net: Transport, tensors: Sequence[Tensor]) -> None:
    """Overwrite ``tensors`` with rank 0's: everyone else adds nothing but zeros.

    As bytes: a process group cannot add up every dtype, and with zeros added -0 becomes 0.
    """
    for kind in {(tensor.dtype, tensor.device): None for tensor in tensors}:
        mine = [tensor for tensor in tensors if (tensor.dtype, tensor.device) == kind]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in mine])
        carried = flat.view(torch.uint8)
        if net.rank:
            carried.zero_()
        net.all_reduce(carried)
        for tensor, part in zip(mine, torch.split(flat, [tensor.numel() for tensor in mine]), strict=True):
            tensor.copy_(part.view(tensor.shape))
