"""``kill -9`` while checkpoints are written: the short version of experiments/kill_points.py."""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path
from types import ModuleType

import experiment
import pytest

pytestmark = pytest.mark.skipif(
    "forkserver" not in multiprocessing.get_all_start_methods(), reason="SIGKILL and forked processes"
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(experiment.FOLDER))  # for the processes too
    return experiment.load("kill_points")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_random_moment(script: ModuleType, tmp_path: Path, world: int, seed: int) -> None:
    row = script.by_the_clock(world, random.Random(f"{world} {seed}"), tmp_path)
    assert row["result"] == "complete", row
    assert row["reported"] >= script.WARM


@pytest.mark.parametrize(("operation", "phase"), [(14, "publishing: the rename"), (16, "marking the best")])
def test_right_before_an_operation(script: ModuleType, tmp_path: Path, operation: int, phase: str) -> None:
    """Before the rename the older one counts, after it the new one, and the best is marked later."""
    row = script.at_operation(1, 0, operation, tmp_path)
    assert (row["result"], row["phase"]) == ("complete", phase), row
    assert row["resumed"] == (script.FULL - 1 if operation == 14 else script.FULL)
