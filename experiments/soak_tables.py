"""The tables of docs/soak.md, from results/soak_summary.csv and results/stress.csv.

python experiments/soak_tables.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pages import ROOT, fill
from rows import read

RESULTS = ROOT / "results"


def soak() -> str:
    """Every check of the long run."""
    rows = read(RESULTS / "soak_summary.csv")
    lines = ["| check | found | must be | |", "|---|---|---|---|"]
    lines += [f"| {row['check']} | {row['found']} | {row['limit']} | {row['verdict']} |" for row in rows]
    return "\n".join([*lines, f"| | {origin(rows)} | | |"])


def stress() -> str:
    """How often a synchroniser ended in which way."""
    rows = read(RESULTS / "stress.csv")
    lines = ["| it ended | rounds | |", "|---|---|---|"]
    for row in rows:
        last = f"{row['verdict']}, {row['seconds']} s" if row["verdict"] else ""
        lines.append(f"| {row['check'].replace('_', ' ')} | {row['rounds']} | {last} |")
    return "\n".join([*lines, f"| {origin(rows)} | | |"])


def origin(rows: list[dict[str, str]]) -> str:
    first = rows[0]
    return f"{first['date']}, commit {first['commit']}, {first['version']}, {first['machine']}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    return argparse.ArgumentParser(description=__doc__).parse_args(arguments)


def main() -> None:
    parse()
    for name, table in (("soak", soak()), ("stress", stress())):
        fill("docs/soak.md", name, table)


if __name__ == "__main__":
    main()
