"""A run from its first check to its summary: what each worker process does."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import data, models
from ..metrics import CsvTracker, JsonLinesTracker, TensorBoardTracker, Tracker, Trackers, amount
from ..models import count_parameters
from ..types import SyncError
from ..version import __version__
from .config import TrainConfig
from .folder import SUMMARY, choose_folder, place_folder, start_from, write_text
from .loop import Trainer
from .place import Place, joined, pick_backend, pick_device, restarts
from .progress import Progress
from .state import first_whole, restore

logger = logging.getLogger("compressed_ddp")

# What may differ from worker to worker.
_OWN = {
    "data_dir",
    "text",
    "device",
    "threads",
    "workers",
    "max_restarts",
    "runs",
    "run_dir",
    "resume",
    "log_json",
}


def train(config: TrainConfig) -> dict[str, Any]:
    """Be one worker of a run, to its end; the summary."""
    with joined(config.running, config.compression.sync_timeout) as place:
        return work(config, place)


def work(config: TrainConfig, place: Place) -> dict[str, Any]:
    """A worker's part in a process group that is up. Rank 0 talks, and writes the run's folder.

    Nothing is written before the data is there, the model is built and a checkpoint was taken back.
    """
    agree(config, place)
    dataset = place.together("loading data", lambda: load_data(config))
    trainer = Trainer(config, place, dataset)
    progress = Progress(
        epochs=config.optimisation.epochs, enabled=place.main, json_lines=config.running.log_json
    )
    tracker: Tracker = Trackers([])
    try:
        found = place.together(
            "finding the run's folder", lambda: begin(config) if place.main else ("", "[]")
        )
        folder, starts = Path(place.say(found[0])), json.loads(place.say(found[1]))
        resumed = str(first_whole([Path(start) for start in starts], place)) if starts else ""
        if resumed:
            restore(trainer, Path(resumed))
        step = trainer.at.step if resumed else None

        def open_folder() -> Tracker:
            if not place.main:
                return Trackers([])
            place_folder(config, folder)
            return make_tracker(config, folder, step)

        tracker = place.together("opening the run's folder", open_folder)
        progress.note(headline(config, place, trainer, dataset, resumed))
        summary = trainer.run(folder, progress, tracker)
        if place.main:
            write_text(folder / SUMMARY, json.dumps(summary, indent=1, allow_nan=False))
            progress.summary(closing_table(summary, folder), summary | {"folder": str(folder)})
        return summary
    except RuntimeError as error:
        # Backward only quotes what went wrong in the thread that synchronises.
        cause = trainer.sync.error
        if cause is None or cause is error:
            raise
        if not isinstance(cause, SyncError):
            raise SyncError(str(cause)) from error
        raise SyncError(str(cause), phase=cause.phase, bucket=cause.bucket, ranks=cause.ranks) from error
    finally:
        close_all(progress.close, tracker.close, trainer.sync.close)


def close_all(*closers: Callable[[], object]) -> None:
    """Call all of them, whatever becomes of one; while an error is on its way, others are only logged."""
    failing = sys.exc_info()[0] is not None
    with ExitStack() as stack:
        for close in reversed(closers):
            stack.callback(partial(_quietly, close) if failing else close)


def _quietly(close: Callable[[], object]) -> None:
    try:
        close()
    except Exception:
        logger.exception("closing after an error failed as well")


def agree(config: TrainConfig, place: Place) -> None:
    """Raises ValueError on all workers if one has another configuration, or release, than rank 0."""
    mine = {name: value for name, value in config.flat().items() if name not in _OWN}
    mine |= {"compressed-ddp": __version__, "torch": torch.__version__.split("+")[0]}
    first = json.loads(place.say(json.dumps(mine)))

    def compare() -> None:
        for name, value in mine.items():
            other = first.get(name)
            if value != other:
                raise ValueError(f"{name} is {value!r} on rank {place.rank} and {other!r} on rank 0")

    place.together("comparing the configuration", compare)


def load_data(config: TrainConfig) -> data.Dataset:
    """The dataset of a run."""
    task = config.task
    return data.load(
        task.dataset,
        task.data_dir,
        text=task.text,
        block=task.block,
        validation=task.validation,
        limit=task.limit,
    )


def check_here(config: TrainConfig) -> None:
    """Raises what workers on this machine would all raise: no such device, no data, or no such model."""
    pick_backend(config.running.backend, pick_device(config.running.device, 0))
    dataset = load_data(config)
    models.outline(config.task.model, shape=dataset.shape, classes=dataset.classes)


def begin(config: TrainConfig) -> tuple[str, str]:
    """The run's folder, and a list of the checkpoints to go on from, as JSON."""
    folder = choose_folder(config)
    return str(folder), json.dumps([str(path) for path in start_from(config, folder)])


# --- what rank 0 says --------------------------------------------------------------------------


def make_tracker(config: TrainConfig, folder: Path, step: int | None) -> Tracker:
    """All trackers of a run that begins at ``step``, or anew."""
    trackers: list[Tracker] = [
        CsvTracker(folder / "metrics.csv", resume_at=step),
        JsonLinesTracker(folder / "metrics.jsonl", resume_at=step),
    ]
    if config.running.tensorboard:
        trackers.append(TensorBoardTracker(folder / "tensorboard", resume_at=step))
    return Trackers(trackers)


def headline(config: TrainConfig, place: Place, trainer: Trainer, dataset: data.Dataset, resumed: str) -> str:
    """What is about to happen, in a few lines."""
    parameters = count_parameters(trainer.model)
    workers = "1 worker" if place.world_size == 1 else f"{place.world_size} workers"
    lines = [
        f"{config.task.model}, {parameters:,} parameters, on {dataset.about}",
        f"{workers} on {place.device.type}, {place.backend}, {torch.get_num_threads()} thread(s) each; "
        f"{trainer.sync.stats.method}",
    ]
    if place.world_size == 1 and config.compress:
        lines.append("one worker alone sends nothing, so its gradients stay whole; --workers 2 or torchrun")
    if resumed:
        lines.append(f"resumed from {resumed}")
    if restarts() and not resumed:
        lines.append("restarted before there was a checkpoint: from the beginning")
    return "\n".join(lines)


def closing_table(summary: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Names and values for people."""
    rows = [("method", str(summary["method"]))]
    if summary["test_accuracy"] is not None:
        rows.append(
            ("test accuracy", f"{summary['test_accuracy']:.2f} % (best {summary['best_accuracy']:.2f} %)")
        )
        rows.append(("test loss", f"{summary['test_loss']:.4f}"))
    seconds, exposed, steps = summary["seconds"], summary["exposed_seconds"], max(summary["steps"], 1)
    rows += [
        ("training time", f"{seconds:.1f} s, {1e3 * seconds / steps:.1f} ms a step"),
        (
            "exposed communication",
            f"{exposed:.1f} s, {100 * exposed / max(seconds, 1e-9):.0f} % of it",
        ),
    ]
    if summary["socket_sent"] is not None:
        rows.append(
            (
                "sent, at its sockets",
                f"{amount(summary['socket_sent'])} by each of {summary['workers']} workers",
            )
        )
        rows.append(("received, at its sockets", amount(summary["socket_received"])))
    rows += [
        ("sent, payload", amount(summary["payload_sent"])),
        ("a dense ring would send", amount(summary["dense_ring"])),
        ("saved", f"{summary['saved_percent']:.2f} %"),
        ("in", str(folder)),
    ]
    return rows
