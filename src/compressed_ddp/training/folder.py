"""A run's folder: where it is, what is in it besides checkpoints, and where a run goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import yaml

from ..files import check_own
from .checkpoint import Checkpoints, find, flush, point, run_of
from .config import TrainConfig, flat_fields
from .place import job_id, restarts

CONFIG, JOB, SUMMARY, LAST = "config.yaml", "job.json", "summary.json", "last"


def choose_folder(config: TrainConfig) -> Path:
    """Where the run lives: what was asked for, the run that goes on, or a new folder, which is made."""
    running = config.running
    if running.run_dir is not None:
        folder = Path(running.run_dir)
        if (folder / CONFIG).exists() and not restarts() and not _goes_on_in(folder, running.resume):
            raise ValueError(
                f"{folder} has a run already; --resume auto goes on with it, another --run-dir begins one"
            )
        return folder
    if restarts():
        for path in Path(running.runs).glob(f"*/{JOB}"):
            if not path.parent.is_symlink() and _job_of(path) == job_id():
                return path.parent
    if running.resume == "auto":
        raise ValueError("--resume auto needs --run-dir: which run should go on?")
    return new_folder(config) if running.resume is None else run_of(find(Path(running.resume)))


def _job_of(path: Path) -> object:
    """The job that wrote ``path``; None if it is a file of something else."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found.get("job") if isinstance(found, dict) else None


def _goes_on_in(folder: Path, resume: str | None) -> bool:
    return resume == "auto" or (resume is not None and run_of(find(Path(resume))) == folder.resolve())


def new_folder(config: TrainConfig) -> Path:
    """Make a folder with a name that no run has yet."""
    method = f"{config.compression.compressor}-{config.compression.ratio:g}" if config.compress else "dense"
    method += f"-every-{config.meetings.local_steps}" if config.local else ""
    name = f"{config.task.model}-{config.task.dataset}-{method}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, n = Path(config.running.runs) / name, 1
    while True:
        try:
            _make(folder, exist_ok=False)
            return folder
        except FileExistsError:  # taken, perhaps by a run that began in the same second
            n += 1
            folder = folder.with_name(f"{name}-{n}")


def _make(folder: Path, *, exist_ok: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if exist_ok:  # then it is no folder
            raise ValueError(f"{folder} is a file: --run-dir names a folder for the run") from None
        raise
    except OSError as error:
        raise ValueError(
            f"the run's folder {folder} cannot be made: {error.strerror}; name another by --runs or --run-dir"
        ) from error


def start_from(config: TrainConfig, folder: Path) -> list[Path]:
    """The checkpoints to go on from, if there are any: the first of them that is whole.

    Several where nobody named one. ValueError if the folder's parts lead out of it.
    """
    for name in ("checkpoints", "tensorboard"):
        check_own(folder / name, folder=True)
    for name in ("metrics.csv", "metrics.jsonl"):
        check_own(folder / name)
    own = Checkpoints(folder / "checkpoints", 1).all()
    if own and (restarts() or config.running.resume == "auto"):
        return own[::-1]
    return [find(Path(config.running.resume))] if config.running.resume not in (None, "auto") else []


def place_folder(config: TrainConfig, folder: Path) -> None:
    """Write the configuration and the job into the folder, and let ``last`` lead there."""
    _make(folder, exist_ok=True)
    saved = {name: value for name, value in config.flat().items() if name not in ("resume", "run_dir")}
    write_text(folder / CONFIG, yaml.safe_dump(saved, sort_keys=False))
    write_text(folder / JOB, json.dumps({"job": job_id()}))
    if folder.parent.resolve() == Path(config.running.runs).resolve():
        point(folder.parent / LAST, folder.name)


def saved_settings(resume: str, run_dir: str | None) -> dict[str, Any]:
    """The configuration of the run that ``resume`` means; empty if there is nothing to go on with."""
    if resume == "auto":
        if run_dir is None or not Checkpoints(Path(run_dir) / "checkpoints", 1).all():
            return {}
        folder = Path(run_dir)
    else:
        folder = run_of(find(Path(resume)))
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {folder} is not the folder of a run")
    saved, known = read_settings(path), flat_fields()
    for name in saved:
        if name not in known:
            raise ValueError(
                f"{path} has an unknown setting {name!r}: is it of another version, or was it changed? Take "
                "it out to go on without"
            )
    return saved


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML file; ValueError, with its name, if it is anything else."""
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # bytes that are no text, too
        raise ValueError(f"{path} is damaged, or not YAML: {error}") from error
    if not isinstance(found, dict):
        what = "it is empty" if found is None else f"found {type(found).__name__}, not names with values"
        raise ValueError(f"{path} is not a configuration: {what}")
    return found


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` at once; what stands there is whole even if the machine stops now."""
    fresh = path.with_name(f".{path.name}-new")
    flush(fresh, text.encode())
    fresh.replace(path)
