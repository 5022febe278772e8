"""The CSV files that a report is made of: what is in them, what makes them, and reading them with care."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..metrics import TIMES

Row = dict[str, Any]
Kind = Literal["text", "number", "maybe"]
"""``maybe``: a number, or nothing."""


class ReportError(ValueError):
    """A CSV file cannot be read; names the file, and the line and column where there is one."""


@dataclass(frozen=True)
class Source:
    """A CSV file: the columns that are read, and the command that makes it."""

    name: str
    command: str
    columns: Mapping[str, Kind]

    @property
    def file(self) -> str:
        return f"{self.name}.csv"


@dataclass(frozen=True)
class Table:
    """A file that was read: numbers are numbers, and nothing is None."""

    source: Source
    rows: tuple[Row, ...]
    commands: tuple[str, ...]
    commits: tuple[str, ...]
    machines: tuple[str, ...]


def _columns(text: str = "", number: str = "", maybe: str = "") -> dict[str, Kind]:
    kinds: dict[Kind, str] = {"text": text, "number": number, "maybe": maybe}
    return {name: kind for kind, names in kinds.items() for name in names.split()}


_TRAINING = _columns(
    text="dataset model purpose failed",
    number="workers ratio seed lr epochs target",
    maybe="accuracy loss sent dense_bytes seconds first_to",
)
_LAB = _columns(
    text="rate model method note failed",
    number="hosts",
    # A lab that was refused has one row, which says why and nothing else.
    maybe="rate_bits elements compute_ms ratio buckets step_ms cpu_ms socket_sent wire_sent dilation "
    + " ".join(f"{phase}_ms" for phase in TIMES),
)
_SCALABILITY = "python experiments/scalability_analysis.py --hosts 2,4,8,16 --rates 100mbit,1gbit,10gbit"
_TRAIN = "python experiments/benchmark_training.py"
_MODEL = "python experiments/cost_model.py"
_ALL = (
    Source("scalability_analysis", _SCALABILITY, _LAB),
    Source("scalability_dilated", f"{_SCALABILITY} --dilate 10", _LAB),
    Source("benchmark_training", _TRAIN, _TRAINING),
    Source(
        "lab_training",
        f"{_TRAIN} --lab 4,100mbit",
        _TRAINING | _columns(text="rate", number="hosts link_share"),
    ),
    Source(
        "error_feedback",
        "python experiments/error_feedback.py",
        _columns(text="method dataset model", number="workers ratio seed steps accuracy late lost held"),
    ),
    Source(
        "benchmark_compression",
        "python experiments/benchmark_compression.py",
        _columns(
            text="kind method distribution",
            number="elements ratio threads best_ms",
            maybe="gb_per_s index_bits",
        ),
    ),
    Source("cost_model", _MODEL, _columns(text="name unit", number="value")),
    Source(
        "cost_model_check",
        _MODEL,
        _columns(text="rate method held_out", number="hosts measured_ms predicted_ms", maybe="ratio"),
    ),
    Source(
        "cost_model_map",
        _MODEL,
        _columns(text="method", number="workers rate_bits predicted_ms dense_ms gain"),
    ),
)
SOURCES = {source.name: source for source in _ALL}


def load(folder: Path) -> dict[str, Table]:
    """The files of ``folder`` that exist, by name."""
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder: give the one with the CSV files, such as results/")
    return {
        name: read_table(source, folder / source.file)
        for name, source in SOURCES.items()
        if (folder / source.file).exists()
    }


def read_table(source: Source, path: Path) -> Table:
    """Read ``path``; ReportError where it is not what ``source`` says."""
    again = f"`{source.command}` makes it anew"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            found = reader.fieldnames or ()
            for name in source.columns:
                if name not in found:
                    raise ReportError(f"{path} has no column {name!r}; {again}")
            rows, raw = [], []
            for cells in reader:
                where = f"{path}, line {reader.line_num}"
                if None in cells or None in cells.values():
                    raise ReportError(f"{where} has not {len(found)} cells as the header has; {again}")
                raw.append(cells)
                rows.append(
                    {name: _value(kind, cells[name], where, name) for name, kind in source.columns.items()}
                )
    except (csv.Error, UnicodeDecodeError) as error:
        raise ReportError(f"{path} is no CSV file that can be read: {error}; {again}") from error
    if not rows:
        raise ReportError(f"{path} has no rows; {again}")
    origins = [
        tuple(dict.fromkeys(cells[name] for cells in raw if cells.get(name)))
        for name in ("command", "commit", "machine")
    ]
    return Table(source, tuple(rows), *origins)


def _value(kind: Kind, text: str, where: str, column: str) -> Any:
    if kind == "text":
        return text
    if kind == "maybe" and text in ("", "None"):
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ReportError(f"{where}, column {column!r}: {text!r} is not a finite number")
    return value
