"""Fixtures of the whole suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from experiment import FOLDER
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
    before = [(table, set(table)) for table in (COMPRESSORS, COLLECTIVES)]
    loaded = set(sys.modules)
    yield
    for table, old in before:
        for name in set(table) - old:
            del table[name]
    # Some register when they are imported: with what they registered go they, and whoever imported them.
    for name in set(sys.modules) - loaded:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{FOLDER}{os.sep}"):
            del sys.modules[name]
