"""Local steps on real gloo processes."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
import torch
from comparing import same
from pool import Pool


@pytest.mark.parametrize("world", [2, 4])
def test_workers_differ_between_meetings_and_not_after_them(pool: Pool, world: int) -> None:
    results = pool.run(world, jobs.train_local, {"ratio": 0.05}, steps=42)
    for result in results[1:]:
        assert torch.equal(result["parameters"], results[0]["parameters"])
        assert not torch.equal(result["before"], results[0]["before"])
    for result in results:
        assert sum(result["losses"][-10:]) < 1.6 * 10
        assert result["stats"]["steps"] == 11 and result["stats"]["saved_percent"] > 90


@pytest.mark.parametrize("way", ["allgather", "sharded"])
@pytest.mark.parametrize("at", [20, 22], ids=["at a meeting", "between two"])
def test_resume_is_exact(pool: Pool, way: str, at: int, tmp_path: Path) -> None:
    config = {"ratio": 0.05, "collective": way}
    whole = pool.run(3, jobs.train_local, config, steps=42)
    pool.run(3, jobs.train_local, config, steps=at, save_to=str(tmp_path))
    resumed = pool.run(3, jobs.train_local, config, steps=42, save_to=str(tmp_path), at=at)
    for before, after in zip(whole, resumed, strict=True):
        assert torch.equal(before["before"], after["before"])
        assert torch.equal(before["parameters"], after["parameters"])


def test_buffers_of_any_dtype_begin_as_the_first_ones(pool: Pool) -> None:
    """To the bit: also a negative zero."""
    first, *others = pool.run(3, jobs.begun_alike)
    zero = torch.tensor([-0.0, 1.0, 0.0, 2.0], dtype=torch.float64)
    assert len(first) == 6 and torch.equal(dict(first)["torch float64"], zero.view(torch.uint8))
    for other in others:
        assert same(list(map(list, first)), list(map(list, other)))


def test_a_wrapped_model_is_refused(pool: Pool) -> None:
    for said in pool.run(2, jobs.local_of_ddp):
        assert "pass model.module" in said
