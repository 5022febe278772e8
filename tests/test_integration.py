"""The write-up's three integration tests, under its names: two real workers, real handwritten digits.

scikit-learn's digits stand in for MNIST, so that the suite needs no download.
"""

from __future__ import annotations

import jobs
from pool import Pool


def test_compressed_training_mnist(pool: Pool) -> None:
    """Top-K at 1 % learns handwritten digits; both workers end with the same bits."""
    first, second = pool.run(2, jobs.train_digits, {"ratio": 0.01}, epochs=15)
    assert first["accuracy"][-1] > 0.93
    assert first["parameters"].equal(second["parameters"])
    assert first["saved"] > 98.0


def test_baseline_vs_compressed(pool: Pool) -> None:
    """Plain DDP and Top-K at 1 %, same seed and data: their best epochs are within three points.

    From epoch to epoch compressed training goes up and down by two points here, and where it stands
    at the end depends on how a CPU rounds.
    """
    dense = pool.run(2, jobs.train_digits, None, epochs=15)[0]
    compressed = pool.run(2, jobs.train_digits, {"ratio": 0.01}, epochs=15)[0]
    assert max(dense["accuracy"]) > 0.93
    assert max(compressed["accuracy"]) > max(dense["accuracy"]) - 0.03


def test_multi_epoch_convergence(pool: Pool) -> None:
    """At 0.5 %, sharded: it goes on improving over epochs, and error feedback is why."""
    config = {"ratio": 0.005, "collective": "sharded"}
    kept = pool.run(2, jobs.train_digits, config, epochs=12)[0]
    lost = pool.run(2, jobs.train_digits, config | {"error_feedback": False}, epochs=12)[0]
    assert kept["accuracy"][-1] > kept["accuracy"][0]
    assert kept["loss"][-1] < 0.5 * kept["loss"][0]
    assert kept["loss"][-1] < lost["loss"][-1]
