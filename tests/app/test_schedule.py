"""Learning rate and ratio are functions of how far the run has come."""

from __future__ import annotations

import pytest

from compressed_ddp.training.config import Compress, Optimisation
from compressed_ddp.training.optimise import learning_rate, ratio_schedule


def rates(**settings: object) -> list[float]:
    about = Optimisation(lr=1.0, epochs=4, **settings)  # type: ignore[arg-type]
    return [round(learning_rate(about, quarter / 4, 4), 4) for quarter in range(17)]


def test_constant() -> None:
    assert set(rates()) == {1.0}


def test_warmup_rises_from_zero() -> None:
    found = rates(warmup=1)
    assert found[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert set(found[4:]) == {1.0}


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_falls_to_zero(schedule: str) -> None:
    found = rates(schedule=schedule)
    assert found[0] == 1.0 and found[8] == 0.5 and found[16] == 0.0
    assert found == sorted(found, reverse=True)


def test_step() -> None:
    found = rates(schedule="step")
    assert found[7:9] == [1.0, 0.1] and found[11:13] == [0.1, 0.01]


def test_cosine_begins_after_the_warmup() -> None:
    found = rates(schedule="cosine", warmup=2)
    assert found[8] == 1.0 and found[16] == 0.0 and found[4] == 0.5


def test_the_ratio_comes_down_to_what_was_asked_for() -> None:
    def ratios(**settings: object) -> list[float]:
        ratio = ratio_schedule(Compress(**settings), 0.01)  # type: ignore[arg-type]
        return [round(ratio(quarter / 4), 4) for quarter in range(6)]

    assert set(ratios()) == {0.01}
    assert ratios(ratio_schedule="step", ratio_warmup=0.5) == [0.1, 0.1, 0.01, 0.01, 0.01, 0.01]
    assert ratios(ratio_schedule="warmup", ratio_warmup=1.0) == [0.3981, 0.1585, 0.0631, 0.0251, 0.01, 0.01]
    assert ratio_schedule(Compress(ratio_schedule="step", ratio_warmup=1.0), 0.5)(0.0) == 1.0
