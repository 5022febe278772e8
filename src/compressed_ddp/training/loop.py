"""The training loop: read ``Trainer.run`` from top to bottom."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..communication import GradientSync, LocalSync, attach
from ..data import Batches, Dataset, shares
from ..metrics import SocketMeter, Tracker, Trackers
from ..models import build
from ..optim import SplitOptimizer
from ..types import CompressionConfig, seed_of
from .checkpoint import Checkpoints
from .config import TrainConfig
from .figures import Sums, TrainingDiverged, diverged, histograms, means, report, summary
from .optimise import learning_rate, make_optimizer, ratio_schedule
from .place import Place
from .plain import PlainSync
from .progress import Progress
from .state import rank_state, shared_state

# torch 2.13 has another name for it, and warns about the old one.
_MODERN = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS: Any = {"forward_sync_buffers" if _MODERN else "broadcast_buffers": False}


def _everything(config: CompressionConfig) -> CompressionConfig:
    """Local steps without compression: what does not depend on it stays as configured."""
    return CompressionConfig(
        "dense", sync_timeout=config.sync_timeout, guard_every=config.guard_every, seed=config.seed
    )


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


class Trainer:
    """One worker of a run."""

    def __init__(
        self,
        config: TrainConfig,
        place: Place,
        data: Dataset,
    ) -> None:
        self.config, self.place, self.data = config, place, data
        self.progress = Progress(epochs=config.optimisation.epochs, enabled=False)
        self.tracker: Tracker = Trackers([])
        settings = config.optimisation
        torch.manual_seed(settings.seed)  # the same weights on every worker
        self.model = build(config.task.model, shape=data.shape, classes=data.classes).to(place.device)
        if settings.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        torch.manual_seed(seed_of(settings.seed, place.rank))  # dropout of its own on each
        switch = config.switch
        self.optimizer = make_optimizer(
            settings,
            self.model,
            split=config.split,
            masking=switch.momentum_masking,
            freeze=switch.freeze_after,
        )
        self.halves = self.optimizer if isinstance(self.optimizer, SplitOptimizer) else None
        self.ddp, self.sync = self._synchronised()
        self.ratio = ratio_schedule(config.switch, self.sync.ratio)
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=settings.precision == "fp16")
        self.batches = Batches(
            data.train, settings.batch_size, rank=place.rank, world_size=place.world_size, seed=settings.seed
        )
        self.checkpoints: Checkpoints | None = None
        self.at, self.sums = Position(), Sums(place.device)
        self.logged = self.sums.values()  # as they were when the tracker saw them last
        self.meter = SocketMeter()
        self.moved_before = (0, 0)  # bytes before a restart

    def _synchronised(self) -> tuple[DistributedDataParallel | None, GradientSync | PlainSync | LocalSync]:
        """The model as it is trained, None for itself, and how workers agree about it."""
        config = self.config
        if config.meetings.local_steps is not None:
            return None, LocalSync(
                self.model,
                config.compression if config.compress else _everything(config.compression),
                steps=config.meetings.local_steps,
                lr=config.meetings.outer_lr,
                momentum=config.meetings.outer_momentum,
            )
        # Running statistics are averaged once an epoch: in every step they would outweigh the gradients.
        device = self.place.device
        ddp = DistributedDataParallel(
            self.model, device_ids=[device] if device.type == "cuda" else None, **_NO_BUFFERS
        )
        if not config.compress:
            return ddp, PlainSync(ddp)
        return ddp, attach(ddp, config.compression, optimizer=self.halves)

    def _placed(self, inputs: Tensor) -> Tensor:
        """``inputs`` where the model is, and as it wants them."""
        last = self.config.optimisation.channels_last and inputs.dim() == 4
        how = torch.channels_last if last else torch.preserve_format
        return inputs.to(self.place.device, non_blocking=True, memory_format=how)

    # --- the run -----------------------------------------------------------------------------

    def run(self, folder: Path, progress: Progress, tracker: Tracker) -> dict[str, Any]:
        """Train to the end, with checkpoints in ``folder``; the summary."""
        self.progress, self.tracker = progress, tracker
        self.checkpoints = Checkpoints(folder / "checkpoints", self.config.running.keep)
        if self.place.main:
            self.checkpoints.drop_after(self.at.step)  # of a future that will be another one
        settings = self.config.optimisation
        if self.at.epoch >= settings.epochs or self._out_of_steps():
            self.progress.note(self._at_its_end())
        while self.at.epoch < settings.epochs and not self._out_of_steps() and not self._good_enough():
            self._train_epoch()
            self._end_epoch(self._score())
        return summary(self)

    def _train_epoch(self) -> None:
        at, running = self.at, self.config.running
        self.model.train()
        done = self._steps(0) - self._steps(at.seen)
        self.progress.start_epoch(at.epoch, self._steps(0), done)
        start = time.perf_counter()
        for group in self._groups():
            self._step(group)
            # From step to step, so that what an accelerator still works on is counted with the next.
            seconds = time.perf_counter() - start
            at.step, at.seen, at.seconds = at.step + 1, group[-1][2], at.seconds + seconds
            report(self, seconds)
            if running.histograms and at.step % running.histograms == 0:
                histograms(self)
            every = running.checkpoint_every
            if every and at.step % every == 0 and not self._out_of_steps() and self._steps(at.seen):
                self.save(best=False)
            if self._out_of_steps():
                break
            start = time.perf_counter()

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
        """One optimizer step on the micro-batches of ``group``; gradients travel with the last one.

        With local steps they do not travel: what this worker did with them does, now and then.
        """
        settings, device = self.config.optimisation, self.place.device
        sync, model = self.sync, self.ddp or self.model
        progress = self.at.epoch + self.at.seen / len(self.data.train)
        rate = learning_rate(settings, progress, self._end())
        for options in self.optimizer.param_groups:
            options["lr"] = rate
        if self.ratio(progress) != self.sync.ratio:  # on all workers in the same step
            self.sync.set_ratio(self.ratio(progress))
        self.optimizer.zero_grad(set_to_none=True)
        if self.scaler.is_enabled() and not isinstance(sync, LocalSync):  # asking waits for the device
            sync.loss_scale = self.scaler.get_scale()
        examples = sum(len(targets) for _, targets, _ in group)
        for i, (inputs, targets, _) in enumerate(group):
            inputs, targets = self._placed(inputs), targets.to(device, non_blocking=True)
            with nullcontext() if self.ddp is None or i == len(group) - 1 else self.ddp.no_sync():
                with self._autocast():
                    outputs = model(inputs)
                    loss = mean_loss(outputs, targets)
                scaled: Tensor = self.scaler.scale(loss * (len(targets) / examples))
                scaled.backward()  # type: ignore[no-untyped-call]
            self.sums.add(loss, outputs, targets)
        if settings.clip_norm is not None and self.halves is None:  # else each worker did it before
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if isinstance(sync, LocalSync):
            sync.step()

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

    def _at_its_end(self) -> str:
        """Why there is nothing to do in a run that goes on, and what would give it something."""
        settings = self.config.optimisation
        if self._out_of_steps():
            return (
                f"nothing to train: this run is at step {self.at.step} of max_steps {settings.max_steps}; "
                "--max-steps null sets no limit"
            )
        return f"nothing to train: all {settings.epochs} epochs of this run are done; --epochs goes further"

    def _out_of_steps(self) -> bool:
        limit = self.config.optimisation.max_steps
        return limit is not None and self.at.step >= limit

    # --- scores ------------------------------------------------------------------------------

    def _score(self) -> dict[str, float]:
        """Loss and accuracy on what was not trained on, and of the epoch behind us, over all workers."""
        if isinstance(self.sync, LocalSync):
            self.sync.synchronize()  # it is one model that is scored, and saved after that
        self.place.average_([b for b in self.model.buffers() if b.is_floating_point()])
        self.model.eval()
        found = Sums(self.place.device)
        settings = self.config.optimisation
        with torch.no_grad():
            size = max(settings.batch_size, 256 if self.data.kind == "image" else 16)
            for inputs, targets in shares(self.data.test, size, self.place.rank, self.place.world_size):
                inputs, targets = self._placed(inputs), targets.to(self.place.device)
                with self._autocast():
                    outputs = self.model(inputs)
                    loss = mean_loss(outputs, targets)
                found.add(loss, outputs, targets)
        at = self.at
        sums = self.place.total([*found.values(), *self.sums.values()])
        test_loss, test_accuracy = means(*sums[:3])
        train_loss, train_accuracy = means(*sums[3:])
        return {
            "epoch": at.epoch + 1,
            "step": at.step,
            "train_loss": train_loss,
            "train_accuracy": train_accuracy,
            "test_loss": test_loss,
            "test_accuracy": test_accuracy,
            "seconds": at.seconds,
            "bytes_sent": self.sync.stats.total.bytes_sent,
        }

    def _end_epoch(self, figures: dict[str, float]) -> None:
        at = self.at
        if not math.isfinite(figures["train_loss"] + figures["test_loss"]):
            raise diverged(self, figures["test_loss"])
        score = figures["test_accuracy"] if self.data.kind == "image" else -figures["test_loss"]
        better = at.best_score is None or score > at.best_score
        at.best_score = score if better else at.best_score
        if at.history and at.history[-1]["epoch"] == figures["epoch"]:
            at.history.pop()  # max_steps had ended a run in the middle of this epoch
        at.history.append(figures)
        if not self._steps(at.seen):
            at.epoch, at.seen = at.epoch + 1, 0
            at.stale = 0 if better else at.stale + 1
            self.sums = Sums(self.place.device)
            self.logged = self.sums.values()
        self.progress.end_epoch(figures | {"saved_percent": self.sync.stats.total.saved()})
        self.tracker.scalars(at.step, {f"test/{key}": figures[f"test_{key}"] for key in ("loss", "accuracy")})
        if not self.config.running.histograms:
            histograms(self)
        self.save(best=better)

    def _good_enough(self) -> bool:
        settings = self.config.optimisation
        accuracy = self.at.history[-1]["test_accuracy"] if self.at.history else 0.0
        if settings.target_accuracy is not None and accuracy >= settings.target_accuracy:
            self.progress.note(f"stopped: accuracy {settings.target_accuracy} % reached")
            return True
        if settings.patience is not None and self.at.stale >= settings.patience:
            self.progress.note(f"stopped: no better score for {settings.patience} epochs")
            return True
        return False

    # --- state -------------------------------------------------------------------------

    def moved(self) -> tuple[int, int] | None:
        """Bytes that this worker's sockets sent and received in training; None where nobody counts them."""
        traffic = self.meter.read()
        if traffic is None:
            return None
        return self.moved_before[0] + traffic.sent, self.moved_before[1] + traffic.received

    def save(self, *, best: bool) -> None:
        """Write a checkpoint; all workers together."""

        def check() -> None:
            if not all(bool(torch.isfinite(p).all()) for p in self.model.parameters()):
                raise TrainingDiverged(
                    f"weights are not finite at step {self.at.step}: no checkpoint was written"
                )

        self.place.together("checking the weights", check)  # with local steps they may be bad on one worker
        if self.checkpoints is None or not self.config.running.keep:
            return
        self.checkpoints.save(
            self.at.step, lambda: shared_state(self), rank_state(self), self.place, best=best
        )


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, averaged over all predictions: one an image, or one a byte."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())
