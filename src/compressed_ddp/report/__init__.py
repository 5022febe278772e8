"""The report: one page, and pictures, from the CSV files of the experiments."""

from __future__ import annotations

from .page import make_page
from .sources import SOURCES, ReportError, Table, load, read_table

__all__ = ["SOURCES", "ReportError", "Table", "load", "make_page", "read_table"]
