"""The fault matrix: a worker is killed, stopped, cut off or loses its connections in every phase.

For every cell the seconds until each survivor had its error, on three workers. What else must hold in them is
asserted by tests/distributed/test_faults.py. As root, or without those that cut a link.

    python experiments/fault_matrix.py        # five minutes; results/fault_matrix.csv, docs/reliability.md
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import faults
from origin import origin
from pages import ROOT, fill

Row = dict[str, str]
TITLES = {"kill": "`kill -9`", "stop": "`SIGSTOP`", "cut": "cut link", "close": "closed sockets"}


def measure(timeout: float, repeats: int) -> list[Row]:
    """A row for each survivor of each cell, cell after cell."""
    about = {"workers": str(faults.WORLD), "sync_timeout": f"{timeout:g}", **origin()}
    about["date"] = time.strftime("%Y-%m-%d")
    rows = []
    for repeat in range(repeats):
        for record in faults.run(faults.cells(), timeout, together=1):
            if record["rank"] == faults.VICTIM:
                continue
            row = {key: str(record[key]) for key in ("phase", "fault", "rank")} | {"repeat": str(repeat)}
            row |= {"seconds": f"{record['seconds']:.4f}", "error": record["error"]}
            row |= {
                "raised_in": record["told"],
                "bucket": str(record["bucket"]),
                "named": str(record["ranks"]),
            }
            rows.append(row | about)
    return rows


def table(rows: list[Row]) -> str:
    """Phase by fault: the median and the slowest of all survivors, in seconds."""
    lines = [
        f"| the victim is in | {' | '.join(TITLES.values())} | survivors name |",
        "|---|---|---|---|---|---|",
    ]
    for phase in faults.PHASES:
        cells = []
        for fault in TITLES:
            found = [float(row["seconds"]) for row in rows if (row["phase"], row["fault"]) == (phase, fault)]
            cells.append(f"{statistics.median(found):.2f} ({max(found):.2f}) s" if found else "not measured")
        named = {row["raised_in"] for row in rows if row["phase"] == phase}
        lines.append(f"| {phase} | {' | '.join(cells)} | {', '.join(sorted(named))} |")
    return "\n".join(lines)


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--timeout", type=float, default=4.0, help="sync_timeout in seconds (default: 4)")
    parser.add_argument("--repeats", type=int, default=3, help="of the whole matrix (default: 3)")
    parser.add_argument("--table", action="store_true", help="measure nothing: write the table anew")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    path = ROOT / "results" / "fault_matrix.csv"
    if not arguments.table:
        rows = measure(arguments.timeout, arguments.repeats)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    made = table(read(path))
    fill("docs/reliability.md", "faults", made)
    print(made)


if __name__ == "__main__":
    main()
