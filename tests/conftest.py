"""Fixtures of the whole suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from pool import Pool

from compressed_ddp.communication.lanes import COLLECTIVES
from compressed_ddp.compression.factory import COMPRESSORS


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


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    """What an experiment adds to the registries leaves with its test: others go through all that is there."""
    before = [(registry, set(registry)) for registry in (COMPRESSORS, COLLECTIVES)]
    yield
    for registry, old in before:
        for name in set(registry) - old:
            del registry[name]
            sys.modules.pop("legacy", None)  # which registers when it is imported
