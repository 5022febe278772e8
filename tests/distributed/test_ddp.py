"""The invariants, on real gloo processes under DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
import torch
from pool import Pool

from compressed_ddp.compression import COMPRESSORS

WORLDS = pytest.mark.parametrize("world", [2, 3, 4])
WAYS = pytest.mark.parametrize("way", ["allgather", "sharded"])
EVERY = [
    {"compressor": name, "collective": way, "ratio": 0.05}
    for name, cls in sorted(COMPRESSORS.items())
    for way in cls.collectives
]


@pytest.mark.timeout(500)
@WORLDS
def test_bit_identical_after_50_steps(pool: Pool, world: int) -> None:
    """Every compressor by every collective; and each of them still learns."""
    ranks = pool.run(world, jobs.train_many, EVERY, steps=50, timeout=400)
    for at, config in enumerate(EVERY):
        results = [rank[at] for rank in ranks]
        for result in results[1:]:
            assert torch.equal(result["parameters"], results[0]["parameters"]), config
        assert torch.isfinite(results[0]["parameters"]).all(), config
        assert results[0]["loss"] < 1.6, config
        assert results[0]["stats"]["steps"] == 50
        assert results[0]["threads"] == []


@WAYS
@WORLDS
def test_ratio_one_equals_plain_ddp(pool: Pool, world: int, way: str) -> None:
    """With two workers to the bit; with more, DDP adds in another order."""
    everything = {"ratio": 1.0, "values": "fp32", "collective": way}
    plain = pool.run(world, jobs.train, None, steps=20)[0]["parameters"]
    ours = pool.run(world, jobs.train, everything, steps=20)[0]["parameters"]
    if world == 2:
        assert torch.equal(ours, plain)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@WAYS
@WORLDS
def test_law_over_100_steps_with_rebuilt_buckets(pool: Pool, world: int, way: str) -> None:
    """Sum of applied gradients + mean of what is owed == sum of the true mean gradients."""
    results = pool.run(world, jobs.train, {"ratio": 0.02, "collective": way}, steps=100, check_law=True)
    for result in results:
        assert result["layouts"] >= 2, "DDP did not rebuild its buckets: the test tests nothing"
        assert result["law"] < 1e-5 * result["scale"]


@pytest.mark.parametrize(
    "config",
    [
        {"collective": "allgather", "ratio": 0.05},
        {"collective": "sharded", "ratio": 0.05},
        {"collective": "sharded", "ratio": 0.05, "scope": "tensor", "values": "int4"},
        {"compressor": "qsgd", "levels": 7},
        {"compressor": "randomk", "collective": "sharded", "ratio": 0.2},
        {"compressor": "powersgd"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("world", "cap"), [(3, 0.01), (2, 25)])
def test_resume_is_exact(
    pool: Pool, world: int, cap: float, config: dict[str, object], tmp_path: Path
) -> None:
    """Save at step 25, start again from the files: steps 26 to 50 as if nothing had happened.

    In several buckets; and in one, which DDP rebuilds in another order.
    """
    ddp = {"bucket_cap_mb": cap}
    whole = pool.run(world, jobs.train, config, steps=50, ddp=ddp)
    pool.run(world, jobs.train, config, steps=25, ddp=ddp, save_to=str(tmp_path))
    assert len(list(tmp_path.glob("*.pt"))) == world
    resumed = pool.run(world, jobs.train, config, steps=50, ddp=ddp, resume_from=str(tmp_path))
    for before, after in zip(whole, resumed, strict=True):
        assert torch.equal(before["parameters"], after["parameters"])


def test_resume_with_other_buckets_keeps_the_law(pool: Pool, tmp_path: Path) -> None:
    """Another bucket size after the restart: other choices, and still nothing lost."""
    config = {"collective": "sharded", "ratio": 0.02}
    pool.run(3, jobs.train, config, steps=25, save_to=str(tmp_path), check_law=True)
    results = pool.run(
        3,
        jobs.train,
        config,
        steps=50,
        ddp={"bucket_cap_mb": 0.03},
        resume_from=str(tmp_path),
        check_law=True,
    )
    assert results[0]["law"] < 1e-5 * results[0]["scale"]


def test_rows_of_any_size_are_gathered(pool: Pool) -> None:
    """Small ones go straight to everyone, large ones round gloo's ring."""
    for right in pool.run(3, jobs.gathered, [8, 2**20, 2**20 + 8, 3 * 2**20]):
        assert all(right)


def test_small_tensors_and_error_feedback_are_said(pool: Pool) -> None:
    stats = pool.run(2, jobs.train, {"ratio": 0.05, "error_feedback": False}, steps=3)[0]["stats"]
    assert stats["error_feedback"] is False
    assert "off" in pool.run(2, jobs.printed_stats, {"error_feedback": False})[0]
    assert "error feedback on" in pool.run(2, jobs.printed_stats, {})[0]
