"""What a run finds out about itself: sums of an epoch, figures of a step, the summary at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..communication import LocalSync
from ..metrics import TIMES
from ..models import count_parameters

if TYPE_CHECKING:
    from .loop import Trainer

_HISTOGRAM = 100_000  # at most so many entries go into a histogram


class TrainingDiverged(RuntimeError):
    """The loss is not finite any more."""


class Sums:
    """A worker's loss, right predictions and predictions so far, kept on its device: asking waits for it."""

    def __init__(self, device: torch.device, values: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        exact = torch.float32 if device.type == "mps" else torch.float64  # which MPS does not have
        self._sums = torch.tensor(values, dtype=exact, device=device)

    def add(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> None:
        right = (outputs.argmax(-1) == targets).sum()
        counted = torch.full_like(right, targets.numel())
        self._sums += torch.stack([loss.detach() * targets.numel(), right, counted]).to(self._sums.dtype)

    def values(self) -> list[float]:
        return [float(value) for value in self._sums.tolist()]

    def means(self, since: Sequence[float] = (0.0, 0.0, 0.0)) -> tuple[float, float]:
        """As ``means`` below, since the values were ``since``."""
        return means(*(now - then for now, then in zip(self.values(), since, strict=True)))


def means(loss: float, right: float, counted: float) -> tuple[float, float]:
    """Loss, and accuracy in percent, from their sums."""
    return loss / max(counted, 1), 100 * right / max(counted, 1)


def report(trainer: Trainer, seconds: float) -> None:
    """Show the step that took ``seconds``, and hand it to the tracker if it is due."""
    at, last, running = trainer.at, trainer.sync.stats.last, trainer.config.running
    met = not isinstance(trainer.sync, LocalSync) or not trainer.sync.since
    due = at.step % running.log_every == 0
    if not due and trainer.place.device.type != "cpu":
        trainer.progress.step({"step_seconds": seconds})
        return
    loss, accuracy = trainer.sums.means()
    if not math.isfinite(loss):
        raise diverged(trainer, loss)
    image = trainer.data.kind == "image"
    figures = {
        "loss": loss,
        "accuracy" if image else "perplexity": accuracy if image else math.exp(min(loss, 700)),
        "step_seconds": seconds,
        "compress_share": (last.select + last.encode + last.decode) / seconds if met else 0.0,
        "wait_share": last.exposed / seconds if met else 0.0,
    }
    if trainer.config.compress or trainer.config.local:
        figures["saved_percent"] = trainer.sync.stats.total.saved()
    trainer.progress.step(figures)
    if due:
        loss, accuracy = trainer.sums.means(trainer.logged)
        trainer.logged = trainer.sums.values()
    age = trainer.sync.stats.residual_age
    if due and trainer.place.main:
        trainer.tracker.scalars(
            at.step,
            {
                "train/loss": loss,
                "train/accuracy": accuracy,
                "train/lr": trainer.optimizer.param_groups[0]["lr"],
                "sync/bytes_sent": last.bytes_sent,
                "sync/bytes_received": last.bytes_received,
                "sync/ratio": last.bytes_sent / max(last.dense_bytes, 1),
                "sync/entries": trainer.sync.stats.ratio,
                "sync/residual_norm": trainer.sync.residual_norm(),
                **({} if age is None else {"sync/residual_age": age}),
                "time/step": seconds,
                **{f"time/{name}": getattr(last, name) for name in TIMES},
            },
        )


def diverged(trainer: Trainer, loss: float) -> TrainingDiverged:
    """The error for a loss that is not finite, with what may help."""
    return TrainingDiverged(
        f"the loss is {loss} at step {trainer.at.step}: lower --lr, now {trainer.config.optimisation.rate}, "
        "warm up (--warmup 1) or clip (--clip-norm 1); small ratios need smaller rates than dense training"
    )


def histograms(trainer: Trainer) -> None:
    """Gradients and residuals, as they are now, for the tracker."""
    if not trainer.place.main or not trainer.config.running.tensorboard:
        return
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    residuals = list(trainer.sync.state_dict().get("residuals", {}).values())
    for tag, tensors in (("gradients", gradients), ("residuals", residuals)):
        if tensors:
            flat = torch.cat([tensor.detach().flatten().cpu() for tensor in tensors])
            trainer.tracker.histogram(trainer.at.step, tag, flat[:: -(-len(flat) // _HISTOGRAM)])


def summary(trainer: Trainer) -> dict[str, Any]:
    """What came of the run, bytes for one worker on average."""
    at, stats, place = trainer.at, trainer.sync.stats, trainer.place
    moved = trainer.moved()
    total = stats.total
    sums = place.total(
        [
            *(*(moved or (0, 0)), total.bytes_sent, total.bytes_received),
            *(total.dense_bytes, total.exposed, moved is None),
        ]
    )
    means = [value / place.world_size for value in sums]
    sent, received, payload_out, payload_in, ring, exposed, unknown = means
    last = at.history[-1] if at.history else {}
    return {
        "model": trainer.config.task.model,
        "dataset": trainer.config.task.dataset,
        "method": stats.method,
        "parameters": count_parameters(trainer.model),
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
        "dense_ring": int(ring),
        "saved_percent": 100 * (1 - payload_out / ring) if ring else 0.0,
        "residual_norm": trainer.sync.residual_norm(),
        "residual_age": stats.residual_age if math.isfinite(stats.residual_age or 0.0) else None,
        "history": at.history,
    }
