"""Datasets: in memory, by name, in equal shares."""

from __future__ import annotations

from .batches import Batches, shares
from .catalogue import DATASETS, DatasetInfo, table
from .dataset import Dataset, Split, Subset
from .download import DownloadError, download
from .loading import load

__all__ = [
    "DATASETS",
    "Batches",
    "Dataset",
    "DatasetInfo",
    "DownloadError",
    "Split",
    "Subset",
    "download",
    "load",
    "shares",
    "table",
]
