"""The tables of docs/kernels.md, from results/benchmark_compression.csv and results/kernel_ledger.csv.

python experiments/kernel_tables.py            # writes them into docs/kernels.md
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Sequence

from kernel_report import Book, targets_table
from pages import ROOT, fill

Row = dict[str, str]

TAKES = {
    "naive torch": "torch as usually written (add, abs, topk, gather, scatter, subtract)",
    "torch.topk": "`torch.topk` alone",
    "reference": "`kernels.reference`",
    "native": "**`kernels.native`**, what training calls",
    "native exact=False": "the same with `exact=False`",
    "native 4 shards": "the same for 4 interleaved shards",
    "take_ out=": "`compressor.take_(residual, gradient, out=other)`",
    "take_ in place": "`compressor.take_(residual, gradient)`, in place",
}
CODECS = {
    "encode": "encode",
    "zero, decode, add 8": "check, decode and add up 8 messages into a new result",
    "zero_": "for comparison: `out.zero_()`",
}
RATIOS = ("0.1", "0.01", "0.001")


def rows_of(name: str) -> list[Row]:
    with (ROOT / "results" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def takes() -> str:
    """Passes by method, for three kinds of data and one thread; and for two."""
    passes = {
        (row["method"], row["distribution"], row["ratio"], row["threads"]): float(row["passes"])
        for row in rows_of("benchmark_compression")
        if row["elements"] == "25600000"
    }
    lines = [
        f"| passes at ratio | {' | '.join(RATIOS)} | 0.01, real gradients | 0.01, two threads |",
        "|---|---|---|---|---|---|",
    ]
    for method, title in TAKES.items():
        cells = [passes[method, "gaussian", ratio, "1"] for ratio in RATIOS]
        cells += [passes[method, "real", "0.01", "1"], passes[method, "gaussian", "0.01", "2"]]
        lines.append(f"| {title} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return "\n".join(lines)


def codecs() -> str:
    """Passes of what is done with messages."""
    passes = {
        (row["method"], row["ratio"]): float(row["passes"])
        for row in rows_of("benchmark_compression")
        if (row["elements"], row["threads"], row["distribution"]) == ("25600000", "1", "gaussian")
    }
    lines = [f"| passes at ratio | {' | '.join(RATIOS)} |", "|---|---|---|---|"]
    for method, title in CODECS.items():
        cells = [f"{passes[method, ratio]:.2f}" for ratio in RATIOS]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def targets() -> str:
    """What was aimed at, and whether it was reached."""
    return targets_table(Book.read(ROOT / "results" / "benchmark_compression.csv"))


PHASES = ("select", "encode", "wait", "decode", "exposed", "step")


def medians(rows: list[Row], collective: str, kernels: str) -> list[float]:
    """Milliseconds a step by phase, over all repeats."""
    mine = [row for row in rows if (row["collective"], row["kernels"]) == (collective, kernels)]
    return [statistics.median(float(row[f"{phase}_ms"]) for row in mine) for phase in PHASES]


def ledger(rows: list[Row] | None = None) -> str:
    """The ledger's phases with both kernels; by default from the CSV."""
    rows = rows_of("kernel_ledger") if rows is None else rows
    lines = [f"| | {' | '.join(PHASES)} |", f"|---|{'---|' * len(PHASES)}"]
    for collective in ("allgather", "sharded"):
        for kernels in ("reference", "native"):
            cells = [f"{ms:.1f}" for ms in medians(rows, collective, kernels)]
            lines.append(f"| {collective}, {kernels} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """All tables of docs/kernels.md, by mark."""
    return {"take": takes(), "codec": codecs(), "targets": targets(), "ledger": ledger()}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return parser.parse_args(arguments)


def main() -> None:
    parse()
    for name, table in tables().items():
        fill("docs/kernels.md", name, table)


if __name__ == "__main__":
    main()
