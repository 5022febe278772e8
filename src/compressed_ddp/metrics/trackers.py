"""Where figures go: TensorBoard, CSV and JSON lines behind one interface."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..files import check_own, longer_file, new_file


class Tracker(Protocol):
    """Takes figures as training goes. Tags look like ``train/loss`` or ``sync/bytes_sent``."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write ``values`` down, each under its tag."""

    def histogram(self, step: int, tag: str, values: Tensor) -> None:
        """Write down how ``values`` are distributed, or nothing if this tracker has scalars only."""

    def close(self) -> None:
        """Everything is on disk afterwards. May be called twice."""


class TensorBoardTracker:
    """Events for TensorBoard in ``folder``, which may hold those of earlier runs.

    A run that resumes at step ``resume_at`` hides what was written after that step; a new one
    (None) hides everything before it.
    """

    def __init__(self, folder: Path, *, resume_at: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoard is not installed: pip install 'compressed-ddp[train]', or track without it"
            ) from error
        check_own(Path(folder), folder=True)
        make: Any = SummaryWriter  # torch has not annotated it
        first = 0 if resume_at is None else resume_at + 1
        self._writer = make(str(folder), purge_step=first, flush_secs=10)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, float(value), step)

    def histogram(self, step: int, tag: str, values: Tensor) -> None:
        """Finite entries only; nothing is written where there are none."""
        flat = values.detach().flatten().to("cpu", torch.float32)
        flat = flat[torch.isfinite(flat)]
        if len(flat):
            # TensorBoard's bins end at 1e20; it raises if every value lies beyond.
            self._writer.add_histogram(tag, flat.clamp(-9e19, 9e19), step)

    def close(self) -> None:
        self._writer.close()


class _LinesTracker:
    """A text file with figures, whole lines only. Flushed after each call."""

    header = ""

    def __init__(self, path: Path, *, resume_at: int | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        check_own(path)
        if resume_at is not None and path.exists():
            self._drop_after(path, resume_at)
            file = longer_file(path)
        else:
            file = new_file(path)
        self._file = io.TextIOWrapper(file, encoding="utf-8", newline="")
        if self._file.tell() == 0:
            self._write(self.header)

    def histogram(self, step: int, tag: str, values: Tensor) -> None:
        """Nothing: this file has scalars only."""

    def close(self) -> None:
        self._file.close()

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()

    def _drop_after(self, path: Path, last: int) -> None:
        """Drop lines of steps after ``last``, and one that was cut short, from the file at once."""
        partial = path.with_name(path.name + ".partial")
        with path.open("rb") as old, new_file(partial) as new:
            for number, line in enumerate(old, 1):
                if not line.endswith(b"\n"):
                    break  # the process died while it wrote this one
                try:
                    keep = self._is_kept(line.decode(), number, last)
                except (ValueError, KeyError, IndexError, TypeError) as error:
                    raise ValueError(
                        f"line {number} of {path} is not one that {type(self).__name__} writes "
                        f"({line[:60]!r}): mend it, or move the file away"
                    ) from error
                if keep:
                    new.write(line)
            new.flush()
            os.fsync(new.fileno())
        os.replace(partial, path)

    def _is_kept(self, line: str, number: int, last: int) -> bool:
        """Whether ``line`` is the header or of a step up to ``last``; raises if it is neither."""
        if self.header and number == 1:
            if line != self.header:
                raise ValueError(f"the header is not {self.header!r}")
            return True
        return self._step_of(line) <= last

    def _step_of(self, line: str) -> int:
        raise NotImplementedError


class CsvTracker(_LinesTracker):
    """``step,tag,value``, a line for each scalar.

    A new run (``resume_at`` None) starts the file anew. One that resumes at step ``resume_at``
    keeps the rows up to that step and drops later ones, and a last line that was cut short.
    """

    header = "step,tag,value\n"

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        for tag, value in values.items():
            if "\n" in tag or "\r" in tag:
                raise ValueError(f"tag {tag!r} has a line break: a row must be one line")
            rows.writerow([int(step), tag, repr(float(value))])
        self._write(text.getvalue())

    def _step_of(self, line: str) -> int:
        step, _, value = next(csv.reader([line]))
        float(value)
        return int(step)


class JsonLinesTracker(_LinesTracker):
    """``{"step": 12, "train/loss": 0.1, ...}``, a line for each call; NaN and infinity become null.

    Resumes as CsvTracker does.
    """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if "step" in values:
            raise ValueError("tag 'step' is taken by the step itself: choose another, such as 'train/step'")
        numbers = {tag: float(value) for tag, value in values.items()}
        row = {tag: value if math.isfinite(value) else None for tag, value in numbers.items()}
        self._write(json.dumps({"step": int(step), **row}, allow_nan=False) + "\n")

    def _step_of(self, line: str) -> int:
        return int(json.loads(line)["step"])


class Trackers:
    """Several trackers as one: everything is handed on to all of them, in order."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self.trackers = list(trackers)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            tracker.scalars(step, values)

    def histogram(self, step: int, tag: str, values: Tensor) -> None:
        for tracker in self.trackers:
            tracker.histogram(step, tag, values)

    def close(self) -> None:
        """Close all, even when one raises; its error is raised afterwards."""
        with ExitStack() as stack:
            for tracker in reversed(self.trackers):
                stack.callback(tracker.close)
