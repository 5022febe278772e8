"""Trackers: what they wrote is there for others to read, and resuming forgets what came after."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressed_ddp.metrics import CsvTracker, JsonLinesTracker, TensorBoardTracker, Tracker, Trackers

FILES = [CsvTracker, JsonLinesTracker]


def events(folder: Path) -> Any:
    """The folder as TensorBoard's own reader sees it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    reader.Reload()
    return reader


def steps_in(path: Path) -> list[int]:
    lines = path.read_text().splitlines()
    if lines and lines[0] == "step,tag,value":
        return [int(line.split(",")[0]) for line in lines[1:]]
    return [json.loads(line)["step"] for line in lines]


def test_tensorboard_reads_what_was_tracked(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    for step in range(5):
        tracker.scalars(step, {"train/loss": 1 / (step + 1), "sync/bytes_sent": 1000 * step})
    values = torch.tensor([-2.0, -1.0, 0.5, 3.0, math.nan, math.inf], requires_grad=True)
    tracker.histogram(4, "gradients", values.to(torch.bfloat16))
    tracker.close()
    tracker.close()

    found = events(tmp_path)
    assert set(found.Tags()["scalars"]) == {"train/loss", "sync/bytes_sent"}
    assert [event.step for event in found.Scalars("train/loss")] == list(range(5))
    assert [event.value for event in found.Scalars("train/loss")] == pytest.approx(
        [1 / (step + 1) for step in range(5)]
    )
    assert [event.value for event in found.Scalars("sync/bytes_sent")] == [0, 1000, 2000, 3000, 4000]
    (histogram,) = found.Histograms("gradients")
    assert histogram.step == 4
    assert histogram.histogram_value.num == 4  # NaN and infinity are left out
    assert (histogram.histogram_value.min, histogram.histogram_value.max) == (-2.0, 3.0)
    assert histogram.histogram_value.sum == 0.5


def test_tensorboard_takes_histograms_of_a_run_that_went_wrong(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.histogram(1, "none", torch.empty(0))
    tracker.histogram(1, "nan", torch.full((3,), math.nan))
    tracker.histogram(1, "huge", torch.full((3,), 1e30))
    tracker.close()
    assert events(tmp_path).Tags()["histograms"] == ["huge"]


def test_tensorboard_resumes_without_what_came_after(tmp_path: Path) -> None:
    before = TensorBoardTracker(tmp_path)
    for step in range(10):
        before.scalars(step, {"loss": 1.0})
    before.close()
    after = TensorBoardTracker(tmp_path, resume_at=5)
    after.scalars(6, {"loss": 2.0})
    after.close()
    loss = events(tmp_path).Scalars("loss")
    assert [(event.step, event.value) for event in loss] == [*((s, 1.0) for s in range(6)), (6, 2.0)]


def test_a_new_run_hides_an_old_one_in_tensorboard(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        tracker = TensorBoardTracker(tmp_path)
        for step in range(3):
            tracker.scalars(step, {"loss": value})
        tracker.close()
    assert [(e.step, e.value) for e in events(tmp_path).Scalars("loss")] == [(0, 2.0), (1, 2.0), (2, 2.0)]


def test_without_tensorboard_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'compressed-ddp\[train\]'"):
        TensorBoardTracker(tmp_path)


def test_csv_is_long_and_exact(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.csv"
    tracker = CsvTracker(path)
    tracker.scalars(3, {"train/loss": 0.1, 'odd, "tag"': 1 / 3})
    tracker.histogram(3, "gradients", torch.ones(3))
    tracker.scalars(4, {"train/loss": math.nan, "n": 7})
    # Not closed yet: a run that is watched, or killed, has its lines on disk.
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "tag", "value"]
    assert rows[1] == ["3", "train/loss", "0.1"]
    assert rows[2][1] == 'odd, "tag"' and float(rows[2][2]) == 1 / 3
    assert rows[3][:2] == ["4", "train/loss"] and math.isnan(float(rows[3][2]))
    assert len(rows) == 5
    tracker.close()
    tracker.close()


def test_json_lines_have_one_object_a_call(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLinesTracker(path)
    tracker.scalars(1, {"a": 0.5, "b": math.nan, "c": -math.inf})
    tracker.histogram(1, "gradients", torch.ones(3))
    tracker.scalars(2, {"a": 1 / 3, "ü\n": 1})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"step": 1, "a": 0.5, "b": None, "c": None}, {"step": 2, "a": 1 / 3, "ü\n": 1.0}]
    tracker.close()


@pytest.mark.parametrize("kind", FILES)
def test_files_resume_without_what_came_after(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    tracker = kind(path)
    for step in range(1, 9):
        tracker.scalars(step, {"loss": 1.0})
    tracker.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])  # killed while it wrote step 8

    tracker = kind(path, resume_at=5)
    assert steps_in(path) == [1, 2, 3, 4, 5]
    tracker.scalars(6, {"loss": 2.0})
    tracker.close()
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]
    assert whole.startswith(path.read_bytes()[: len(whole) // 2])
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics"]


@pytest.mark.parametrize("kind", FILES)
def test_a_line_cut_short_goes_even_where_its_step_stays(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    tracker = kind(path)
    tracker.scalars(1, {"loss": 1.25})
    tracker.scalars(2, {"loss": 1.25})
    tracker.close()
    path.write_bytes(path.read_bytes()[:-1])  # all of it but the end of the line
    tracker = kind(path, resume_at=2)
    tracker.scalars(3, {"loss": 1.25})
    tracker.close()
    assert steps_in(path) == [1, 3]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("there", [None, b"", b"st"])
def test_resuming_with_nothing_there_starts_anew(kind: Any, there: bytes | None, tmp_path: Path) -> None:
    path, fresh = tmp_path / "metrics", tmp_path / "fresh"
    if there is not None:
        path.write_bytes(there)
    for tracker in (kind(path, resume_at=7), kind(fresh)):
        tracker.scalars(8, {"loss": 1.0})
        tracker.close()
    assert path.read_bytes() == fresh.read_bytes()


@pytest.mark.parametrize("kind", FILES)
def test_a_new_run_starts_the_file_anew(kind: Any, tmp_path: Path) -> None:
    for step in (1, 2):
        tracker = kind(tmp_path / "metrics")
        tracker.scalars(step, {"loss": 1.0})
        tracker.close()
    assert steps_in(tmp_path / "metrics") == [2]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    "foreign", [b"a letter\n", b"step,tag,value\n1,a\n", b'{"loss": 1}\n', b"[1]\n", b"\xff\xfe\n"]
)
def test_foreign_files_are_refused_and_left_alone(kind: Any, foreign: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    path.write_bytes(foreign)
    with pytest.raises(ValueError, match=f"line [12] of .*metrics is not one that {kind.__name__} writes"):
        kind(path, resume_at=5)
    assert path.read_bytes() == foreign


def test_tags_that_would_break_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line break"):
        CsvTracker(tmp_path / "csv").scalars(1, {"a\nb": 1.0})
    with pytest.raises(ValueError, match="'step' is taken"):
        JsonLinesTracker(tmp_path / "json").scalars(1, {"step": 1.0})


class Recorder:
    """A tracker that remembers, and whose close may fail."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[Any] = []
        self.fails = fails

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append((step, dict(values)))

    def histogram(self, step: int, tag: str, values: Tensor) -> None:
        self.calls.append((step, tag, values.tolist()))

    def close(self) -> None:
        self.calls.append("close")
        if self.fails:
            raise OSError("disk full")


def test_several_trackers_are_as_one() -> None:
    inner = [Recorder(), Recorder(fails=True), Recorder()]
    both: Tracker = Trackers(inner)
    both.scalars(1, {"a": 2.0})
    both.histogram(1, "h", torch.ones(2))
    with pytest.raises(OSError, match="disk full"):
        both.close()
    assert [tracker.calls for tracker in inner] == [[(1, {"a": 2.0}), (1, "h", [1.0, 1.0]), "close"]] * 3
