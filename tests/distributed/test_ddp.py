"""The invariants, on real gloo processes under DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


@WAYS
@pytest.mark.parametrize("split", ["adam", "sgd"])
def test_a_split_optimizer_keeps_all_three_laws(pool: Pool, split: str, way: str, tmp_path: Path) -> None:
    """What is compressed are updates: nothing of them is lost, replicas agree, a resumed run is the same.

    The ratio comes down on the way, and the run is resumed before the last change.
    """
    config = {"collective": way, "ratio": 0.05}
    how: dict[str, Any] = {"split": split, "ratios": {0: 0.5, 20: 0.2, 30: 0.05}}
    whole = pool.run(3, jobs.train, config, steps=50, check_law=True, **how)
    for result in whole:
        assert torch.equal(result["parameters"], whole[0]["parameters"])
        assert result["layouts"] >= 2 and result["law"] < 1e-5 * result["scale"]
    pool.run(3, jobs.train, config, steps=25, save_to=str(tmp_path), **how)
    resumed = pool.run(3, jobs.train, config, steps=50, resume_from=str(tmp_path), **how)
    for before, after in zip(whole, resumed, strict=True):
        assert torch.equal(before["parameters"], after["parameters"])


@WAYS
def test_adaptive_ratios_keep_all_three_laws(pool: Pool, way: str, tmp_path: Path) -> None:
    """Entries are dealt anew every 7 steps, also between the checkpoint and the end."""
    config = {"collective": way, "ratio": 0.1, "adapt_every": 7}
    whole = pool.run(3, jobs.train, config, steps=50, check_law=True)
    for result in whole:
        assert torch.equal(result["parameters"], whole[0]["parameters"])
        assert result["layouts"] >= 2 and result["law"] < 1e-5 * result["scale"]
    pool.run(3, jobs.train, config, steps=25, save_to=str(tmp_path))
    factors = torch.load(tmp_path / "0.pt", weights_only=True)["sync"]["factors"]
    assert max(factors.values()) > 1.1 > 0.9 > min(factors.values())
    resumed = pool.run(3, jobs.train, config, steps=50, resume_from=str(tmp_path))
    for before, after in zip(whole, resumed, strict=True):
        assert torch.equal(before["parameters"], after["parameters"])


@WAYS
def test_ef21_keeps_its_own_law(pool: Pool, way: str, tmp_path: Path) -> None:
    """Replicas agree, also on g, which by all-gather is the mean of all g_i; a resumed run is the same."""
    config = {"collective": way, "ratio": 0.05, "memory": "ef21-sgdm", "eta": 0.3}
    whole = pool.run(3, jobs.train, config, steps=40)
    for result in whole:
        assert torch.equal(result["parameters"], whole[0]["parameters"])
        assert result["loss"] < 1.6
    pool.run(3, jobs.train, config, steps=20, save_to=str(tmp_path))
    kept = [torch.load(tmp_path / f"{rank}.pt", weights_only=True)["sync"]["kept"] for rank in range(3)]
    for name, agreed in kept[0]["agreed"].items():
        assert all(torch.equal(agreed, each["agreed"][name]) for each in kept)
        if way == "allgather":
            believed = torch.stack([each["estimate"][name] for each in kept]).mean(0)
            torch.testing.assert_close(agreed, believed, rtol=0, atol=1e-6)
    resumed = pool.run(3, jobs.train, config, steps=40, resume_from=str(tmp_path))
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
