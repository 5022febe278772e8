"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four real gloo processes; ``pool.run(world, job, ...)`` runs a job on the first ``world``."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
