"""The training loop: read ``Trainer.run`` from top to bottom."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..communication import GradientSync, attach
from ..data import Batches, Dataset, shares
from ..metrics import SocketMeter, Tracker
from ..models import build
from .checkpoint import Checkpoints
from .config import Optimisation, TrainConfig
from .place import Place
from .plain import PlainSync
from .progress import Progress
from .schedule import learning_rate
from .state import rank_state, shared_state

# torch 2.13 has another name for it, and warns about the old one.
_MODERN = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS: Any = {"forward_sync_buffers" if _MODERN else "broadcast_buffers": False}
_HISTOGRAM = 100_000  # at most so many entries of a tensor go into a histogram


class TrainingDiverged(RuntimeError):
    """The loss is not finite any more."""


@dataclass
class Position:
    """How far a run has come: all that a checkpoint must know besides tensors."""

    epoch: int = 0
    seen: int = 0
    """Examples of all workers in this epoch."""
    step: int = 0
    seconds: float = 0.0
    """In training steps, evaluation and checkpoints not counted."""
    best_score: float | None = None
    stale: int = 0
    """Epochs since the best score."""
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Sums:
    """This worker's share of the epoch so far."""

    loss: float = 0.0
    right: float = 0.0
    counted: float = 0.0

    def add(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> None:
        self.loss += float(loss) * targets.numel()
        self.right += float((outputs.argmax(-1) == targets).sum())
        self.counted += targets.numel()


class Trainer:
    """One worker of a run."""

    def __init__(
        self,
        config: TrainConfig,
        place: Place,
        data: Dataset,
        folder: Path,
        progress: Progress,
        tracker: Tracker,
    ) -> None:
        self.config, self.place, self.data = config, place, data
        self.progress, self.tracker = progress, tracker
        settings = config.optimisation
        torch.manual_seed(settings.seed)  # the same weights on every worker
        self.model = build(config.task.model, shape=data.shape, classes=data.classes).to(place.device)
        torch.manual_seed(_mixed(settings.seed, place.rank))  # dropout of its own on each
        # Running statistics are averaged once an epoch: in every step they would outweigh the gradients.
        self.ddp = DistributedDataParallel(
            self.model, device_ids=[place.device] if place.device.type == "cuda" else None, **_NO_BUFFERS
        )
        self.sync: GradientSync | PlainSync = (
            attach(self.ddp, config.compression) if config.compress else PlainSync(self.ddp)
        )
        self.optimizer = make_optimizer(settings, self.model)
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=settings.precision == "fp16")
        self.batches = Batches(
            data.train, settings.batch_size, rank=place.rank, world_size=place.world_size, seed=settings.seed
        )
        self.checkpoints = Checkpoints(folder / "checkpoints", config.running.keep)
        self.at, self.sums = Position(), Sums()
        self.meter = SocketMeter()
        self.moved_before = (0, 0)  # bytes before a restart

    # --- the run -----------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end; the summary."""
        settings = self.config.optimisation
        while self.at.epoch < settings.epochs and not self._out_of_steps():
            self._train_epoch()
            figures = self._score()
            self._end_epoch(figures)
            if self._good_enough(figures):
                break
        return self.summary()

    def _train_epoch(self) -> None:
        settings, at = self.config.optimisation, self.at
        self.model.train()
        done = self._steps(0) - self._steps(at.seen)
        self.progress.start_epoch(at.epoch, self._steps(0), done)
        for group in self._groups():
            start = time.perf_counter()
            self._step(group)
            seconds = time.perf_counter() - start
            at.step, at.seen, at.seconds = at.step + 1, group[-1][2], at.seconds + seconds
            self._report(seconds)
            every = self.config.running.checkpoint_every
            if every and at.step % every == 0 and not self._out_of_steps() and self._steps(at.seen):
                self.save(best=False)
            if settings.max_steps is not None and at.step >= settings.max_steps:
                break

    def _groups(self) -> Iterator[list[tuple[Tensor, Tensor, int]]]:
        """The micro-batches of each step of the rest of this epoch."""
        group = []
        for batch in self.batches.epoch(self.at.epoch, self.at.seen):
            group.append(batch)
            if len(group) == self.config.optimisation.accumulate:
                yield group
                group = []
        if group:
            yield group

    def _step(self, group: list[tuple[Tensor, Tensor, int]]) -> None:
        """One optimizer step on the micro-batches of ``group``; gradients travel with the last one."""
        settings, device = self.config.optimisation, self.place.device
        for options in self.optimizer.param_groups:
            options["lr"] = learning_rate(
                settings, self.at.epoch + self.at.seen / len(self.data.train), self._end()
            )
        self.optimizer.zero_grad(set_to_none=True)
        self.sync.loss_scale = self.scaler.get_scale()
        examples = sum(len(targets) for _, targets, _ in group)
        for i, (inputs, targets, _) in enumerate(group):
            inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            with nullcontext() if i == len(group) - 1 else self.ddp.no_sync():
                with self._autocast():
                    outputs = self.ddp(inputs)
                    loss = mean_loss(outputs, targets)
                scaled: Tensor = self.scaler.scale(loss * (len(targets) / examples))
                scaled.backward()  # type: ignore[no-untyped-call]
            self.sums.add(loss.detach(), outputs.detach(), targets)
        if settings.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _autocast(self) -> Any:
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        precision = self.config.optimisation.precision
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(self.place.device.type, dtype=kinds[precision])

    def _steps(self, seen: int) -> int:
        """Optimizer steps of an epoch that are still to come after ``seen`` examples."""
        return -(-self.batches.steps(seen) // self.config.optimisation.accumulate)

    def _end(self) -> float:
        """Where the run ends, in epochs."""
        settings = self.config.optimisation
        if settings.max_steps is None:
            return settings.epochs
        return min(settings.epochs, settings.max_steps / max(1, self._steps(0)))

    def _out_of_steps(self) -> bool:
        limit = self.config.optimisation.max_steps
        return limit is not None and self.at.step >= limit

    # --- scores ------------------------------------------------------------------------------

    def _score(self) -> dict[str, float]:
        """Loss and accuracy on what was not trained on, and of the epoch behind us, over all workers."""
        self.place.average_([b for b in self.model.buffers() if b.is_floating_point()])
        self.model.eval()
        found = Sums()
        settings = self.config.optimisation
        with torch.no_grad():
            size = max(settings.batch_size, 256 if self.data.kind == "image" else 16)
            for inputs, targets in shares(self.data.test, size, self.place.rank, self.place.world_size):
                inputs, targets = inputs.to(self.place.device), targets.to(self.place.device)
                with self._autocast():
                    outputs = self.model(inputs)
                    loss = mean_loss(outputs, targets)
                found.add(loss, outputs, targets)
        at = self.at
        sums = self.place.total([*dataclasses.astuple(found), *dataclasses.astuple(self.sums)])
        return {
            "epoch": at.epoch + 1,
            "step": at.step,
            "train_loss": sums[3] / max(sums[5], 1),
            "train_accuracy": 100 * sums[4] / max(sums[5], 1),
            "test_loss": sums[0] / max(sums[2], 1),
            "test_accuracy": 100 * sums[1] / max(sums[2], 1),
            "seconds": at.seconds,
            "bytes_sent": self.sync.stats.total.bytes_sent,
        }

    def _end_epoch(self, figures: dict[str, float]) -> None:
        at = self.at
        score = figures["test_accuracy"] if self.data.kind == "image" else -figures["test_loss"]
        better = at.best_score is None or score > at.best_score
        at.best_score = score if better else at.best_score
        at.stale = 0 if better else at.stale + 1
        at.history.append(figures)
        if not self._steps(at.seen):
            at.epoch, at.seen = at.epoch + 1, 0
        self.sums = Sums()
        self.progress.end_epoch(figures | {"saved_percent": self.sync.stats.total.saved()})
        self.tracker.scalars(at.step, {f"test/{key}": figures[f"test_{key}"] for key in ("loss", "accuracy")})
        if not self.config.running.histograms:
            self._histograms()
        self.save(best=better)

    def _good_enough(self, figures: dict[str, float]) -> bool:
        settings = self.config.optimisation
        if settings.target_accuracy is not None and figures["test_accuracy"] >= settings.target_accuracy:
            self.progress.note(f"stopped: accuracy {settings.target_accuracy} % reached")
            return True
        if settings.patience is not None and self.at.stale >= settings.patience:
            self.progress.note(f"stopped: no better score for {settings.patience} epochs")
            return True
        return False

    # --- figures -----------------------------------------------------------------------------

    def _report(self, seconds: float) -> None:
        at, last, running = self.at, self.sync.stats.last, self.config.running
        loss = self.sums.loss / max(self.sums.counted, 1)
        if loss != loss or loss in (float("inf"), -float("inf")):
            if not self.scaler.is_enabled():
                raise TrainingDiverged(
                    f"the loss is {loss} at step {at.step}: lower --lr, now {self.config.optimisation.rate}, "
                    "warm up (--warmup 1) or clip (--clip-norm 1); a small --ratio needs a smaller rate than "
                    "dense training"
                )
        figures = {
            "loss": loss,
            "accuracy": 100 * self.sums.right / max(self.sums.counted, 1),
            "step_seconds": seconds,
            "compress_share": (last.select + last.encode + last.decode) / seconds,
            "wait_share": last.exposed / seconds,
        }
        if self.config.compress:
            figures["saved_percent"] = self.sync.stats.total.saved()
        self.progress.step(figures)
        if at.step % running.log_every == 0 and self.place.main:
            self.tracker.scalars(
                at.step,
                {
                    "train/loss": loss,
                    "train/accuracy": figures["accuracy"],
                    "train/lr": self.optimizer.param_groups[0]["lr"],
                    "sync/bytes_sent": last.bytes_sent,
                    "sync/bytes_received": last.bytes_received,
                    "sync/ratio": last.bytes_sent / max(last.dense_bytes, 1),
                    "sync/residual_norm": self.sync.residual_norm(),
                    "time/step": seconds,
                    **{
                        f"time/{name}": getattr(last, name)
                        for name in ("select", "encode", "wait", "decode", "exposed")
                    },
                },
            )
        if running.histograms and at.step % running.histograms == 0:
            self._histograms()

    def _histograms(self) -> None:
        if not self.place.main:
            return
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        residuals = list(self.sync.state_dict().get("residuals", {}).values())
        for tag, tensors in (("gradients", gradients), ("residuals", residuals)):
            if tensors:
                flat = torch.cat([tensor.detach().flatten().cpu() for tensor in tensors])
                self.tracker.histogram(self.at.step, tag, flat[:: -(-len(flat) // _HISTOGRAM)])

    def moved(self) -> tuple[int, int] | None:
        """Bytes that this worker's sockets sent and received in training; None where nobody counts them."""
        traffic = self.meter.read()
        if traffic is None:
            return None
        return self.moved_before[0] + traffic.sent, self.moved_before[1] + traffic.received

    def summary(self) -> dict[str, Any]:
        """What came of the run, bytes for one worker on average."""
        at, stats, place = self.at, self.sync.stats, self.place
        moved = self.moved()
        sums = place.total(
            [
                *(moved or (0, 0)),
                stats.total.bytes_sent,
                stats.total.bytes_received,
                stats.total.exposed,
                moved is None,
            ]
        )
        sent, received, payload_out, payload_in, exposed, unknown = (
            value / place.world_size for value in sums
        )
        last = at.history[-1] if at.history else {}
        return {
            "model": self.config.task.model,
            "dataset": self.config.task.dataset,
            "method": stats.method,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "workers": place.world_size,
            "epochs": at.epoch,
            "steps": at.step,
            "skipped_steps": stats.total.skipped_steps,
            **{key: last.get(key) for key in ("train_loss", "test_loss", "test_accuracy")},
            "best_accuracy": max((epoch["test_accuracy"] for epoch in at.history), default=None),
            "seconds": at.seconds,
            "exposed_seconds": exposed,
            "socket_sent": None if unknown else int(sent),
            "socket_received": None if unknown else int(received),
            "payload_sent": int(payload_out),
            "payload_received": int(payload_in),
            "dense_ring": stats.total.dense_bytes,
            "saved_percent": stats.total.saved(),
            "residual_norm": self.sync.residual_norm(),
            "history": at.history,
        }

    # --- checkpoints -------------------------------------------------------------------------

    def save(self, *, best: bool) -> None:
        """Write a checkpoint; all workers together."""
        if not self.config.running.keep:
            return
        if not all(bool(torch.isfinite(p).all()) for p in self.model.parameters()):
            raise TrainingDiverged(
                f"weights are not finite at step {self.at.step}: no checkpoint was written"
            )
        self.checkpoints.save(
            self.at.step, lambda: shared_state(self), rank_state(self), self.place, best=best
        )


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, averaged over all predictions: one an image, or one a byte."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())


def make_optimizer(settings: Optimisation, model: nn.Module) -> torch.optim.Optimizer:
    """torch's own, as the settings say."""
    rate, decay, parameters = settings.rate, settings.weight_decay, model.parameters()
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, rate, momentum=settings.momentum, weight_decay=decay, nesterov=settings.nesterov
        )
    if settings.optimizer == "rmsprop":
        return torch.optim.RMSprop(parameters, rate, momentum=settings.momentum, weight_decay=decay)
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, rate, weight_decay=decay)


def _mixed(seed: int, rank: int) -> int:
    """A seed for one worker, far from every other worker's of every other run's."""
    return int.from_bytes(hashlib.blake2b(f"{seed},{rank}".encode(), digest_size=7).digest(), "little")
