"""Steps that do not count, on real processes: one entry overflows and the rest does not; 16-bit models."""

from __future__ import annotations

import pytest
import torch
from pool import Pool
from scale_jobs import sixteen_bits, two_optimizers

WAYS = pytest.mark.parametrize("way", ["allgather", "sharded"])


@WAYS
@pytest.mark.parametrize("manual", [False, True], ids=["attach", "manual"])
def test_two_optimizers_step_together_or_not_at_all(pool: Pool, way: str, manual: bool) -> None:
    ranks = pool.run(3, two_optimizers, way, obey=True, manual=manual)
    for found in ranks:
        assert [step for step, counted in enumerate(found["counted"]) if not counted] == [3, 6, 7]
        assert found["halves"] == 3, "the other optimizer's means were to be finite"
        assert found["untouched"] and found["law"] < 1e-5
        assert found["scale"] == 2.0**7
        assert torch.equal(found["parameters"], ranks[0]["parameters"])


def test_stepping_one_of_them_would_apply_a_debt_twice(pool: Pool) -> None:
    """What the property is for, and that the law above can be seen to break."""
    for found in pool.run(3, two_optimizers, "allgather", obey=False):
        assert found["halves"] == 3 and found["law"] > 1e-3


@WAYS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_small_gradients_of_a_scaled_loss_arrive(pool: Pool, way: str, dtype: torch.dtype) -> None:
    for found in pool.run(2, sixteen_bits, way, dtype, 2.0**-12):
        assert found == {"lost": 0.0, "called off": 0, "arrived": True}


@WAYS
def test_a_mean_too_large_for_its_bucket_is_not_lost(pool: Pool, way: str) -> None:
    for found in pool.run(2, sixteen_bits, way, torch.float16, 2.0**14):
        assert found["lost"] == 0.0 and found["called off"] > 0 and found["arrived"]
