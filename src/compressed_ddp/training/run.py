"""A run from its folder to its summary: what each worker process does."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from .. import data
from ..metrics import CsvTracker, JsonLinesTracker, TensorBoardTracker, Tracker, Trackers
from . import checkpoint
from .checkpoint import Checkpoints, find, point, run_of
from .config import TrainConfig
from .loop import Trainer
from .place import Place, job_id, joined, restarts
from .progress import Progress, amount
from .state import restore

CONFIG, JOB, SUMMARY, LAST = "config.yaml", "job.json", "summary.json", "last"


def train(config: TrainConfig) -> dict[str, Any]:
    """Be one worker of a run, to its end; the summary."""
    with joined(config.running, config.compression.sync_timeout) as place:
        return work(config, place)


def work(config: TrainConfig, place: Place) -> dict[str, Any]:
    """A worker's part in a process group that is up. Rank 0 talks, and writes the run's folder."""
    found = place.together("finding the run's folder", lambda: begin(config) if place.main else ("", ""))
    folder, resumed = Path(place.say(found[0])), place.say(found[1])
    dataset = place.together("loading data", lambda: load_data(config))
    progress = Progress(
        epochs=config.optimisation.epochs, enabled=place.main, json_lines=config.running.log_json
    )
    step = checkpoint.manifest_of(Path(resumed))["step"] if resumed else None
    tracker = make_tracker(config, folder, step) if place.main else Trackers([])
    trainer = None
    try:
        trainer = Trainer(config, place, dataset, folder, progress, tracker)
        if resumed:
            restore(trainer, Path(resumed))
        progress.note(headline(config, place, trainer, dataset, resumed))
        summary = trainer.run()
        if place.main:
            write_text(folder / SUMMARY, json.dumps(summary, indent=1))
            progress.summary(closing_table(summary, folder), summary | {"folder": str(folder)})
        return summary
    finally:
        progress.close()
        tracker.close()
        if trainer is not None:
            trainer.sync.close()


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


# --- the run's folder --------------------------------------------------------------------------


def begin(config: TrainConfig) -> tuple[str, str]:
    """Make the run's folder; its name, and the checkpoint to go on from or nothing."""
    folder = choose_folder(config)
    resumed = start_from(config, folder)
    place_folder(config, folder)
    return str(folder), str(resumed or "")


def choose_folder(config: TrainConfig) -> Path:
    """Where the run lives: what was asked for, the run that goes on, or a new folder."""
    running = config.running
    if running.run_dir is not None:
        folder = Path(running.run_dir)
        if (folder / CONFIG).exists() and running.resume is None and not restarts():
            raise ValueError(
                f"{folder} has a run already; --resume auto goes on with it, another --run-dir begins one"
            )
        return folder
    if restarts():
        for path in Path(running.runs).glob(f"*/{JOB}"):
            if json.loads(path.read_text()).get("job") == job_id():
                return path.parent
    if running.resume not in (None, "auto"):
        return run_of(find(Path(str(running.resume))))
    if running.resume == "auto":
        raise ValueError("--resume auto needs --run-dir: which run should go on?")
    return new_folder(config)


def new_folder(config: TrainConfig) -> Path:
    """A name that no run has yet."""
    method = f"{config.compression.compressor}-{config.compression.ratio:g}" if config.compress else "dense"
    name = f"{config.task.model}-{config.task.dataset}-{method}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, n = Path(config.running.runs) / name, 1
    while folder.exists():
        n += 1
        folder = folder.with_name(f"{name}-{n}")
    return folder


def start_from(config: TrainConfig, folder: Path) -> Path | None:
    """The checkpoint to go on from, if there is one to."""
    own = Checkpoints(folder / "checkpoints", 1).all()
    if restarts() and own:
        return own[-1]
    if config.running.resume == "auto":
        return own[-1] if own else None
    return find(Path(config.running.resume)) if config.running.resume is not None else None


def place_folder(config: TrainConfig, folder: Path) -> None:
    """Make the folder, with the configuration and the job in it, and let ``last`` lead there."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = {name: value for name, value in config.flat().items() if name not in ("resume", "run_dir")}
    write_text(folder / CONFIG, yaml.safe_dump(saved, sort_keys=False))
    write_text(folder / JOB, json.dumps({"job": job_id()}))
    if folder.parent.resolve() == Path(config.running.runs).resolve():
        point(folder.parent / LAST, folder.name)


def saved_settings(resume: str, run_dir: str | None) -> dict[str, Any]:
    """The configuration of the run that ``resume`` means; empty if there is nothing to go on with."""
    if resume == "auto":
        folder = None if run_dir is None else Path(run_dir)
        if folder is None or not Checkpoints(folder / "checkpoints", 1).all():
            return {}
    else:
        folder = run_of(find(Path(resume)))
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {folder} is not the folder of a run")
    saved = yaml.safe_load(path.read_text())
    if not isinstance(saved, dict):
        raise ValueError(f"{path} is not a configuration: found {type(saved).__name__}")
    return saved


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` at once."""
    fresh = path.with_name(f".{path.name}-new")
    fresh.write_text(text)
    fresh.replace(path)


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
    parameters = sum(p.numel() for p in trainer.model.parameters())
    workers = "1 worker" if place.world_size == 1 else f"{place.world_size} workers"
    lines = [
        f"{config.task.model}, {parameters:,} parameters, on {dataset.about}",
        f"{workers} on {place.device.type}, {place.backend}, {torch.get_num_threads()} thread(s) each; "
        f"{trainer.sync.stats.method}",
    ]
    if place.world_size == 1 and config.compress:
        lines.append(
            "one worker alone sends nothing: this shows what compression does to accuracy, not to time"
        )
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
