"""The tables and pictures of docs/, from the files in results/.

A table whose file is not there says "not measured yet", with the command that makes it; its picture is
left out.

    python experiments/result_tables.py            # writes them into docs/
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import claims
import lab_overview
from lab_overview import DILATED, WHOLE
from pages import ROOT, fill
from rows import read

from compressed_ddp.report import SOURCES, Table, lab_tables, load, tables
from compressed_ddp.report.figures import PLAIN, Setting, good, is_ours, median, of, settings, title
from compressed_ddp.report.grid import Grid, Notes, share
from compressed_ddp.report.lab_tables import comparable, note_of, own_cores, summaries
from compressed_ddp.report.page import pictures
from compressed_ddp.report.sections import SECTIONS
from compressed_ddp.report.sources import Row

PICTURES = ROOT / "docs" / "pictures"
GRIDS: dict[str, tuple[str, Callable[[Table], Grid | None]]] = {
    "steps": ("scalability_analysis", lab_tables.steps),
    "steps-slow": ("scalability_analysis", lab_tables.slow_steps),
    "everywhere": ("scalability_analysis", lab_tables.everywhere),
    "steps-dilated": ("scalability_dilated", lab_tables.steps),
    "everywhere-dilated": ("scalability_dilated", lab_tables.everywhere),
    "traffic": ("scalability_analysis", lab_tables.traffic),
    "traffic-dilated": ("scalability_dilated", lab_tables.traffic),
    "training": ("benchmark_training", tables.training),
    "lab-training": ("lab_training", tables.training),
    "feedback": ("error_feedback", tables.feedback),
    "kernels": ("benchmark_compression", tables.kernels),
    "break-even": ("cost_model_map", tables.break_even),
    "model-check": ("cost_model_check", tables.model_check),
}
CLAIMS = {
    "docs/problem.md": "problem",
    "docs/design.md": "design",
    "docs/revised-design.md": "revised",
    "docs/analysis.md": "analysis",
}


COMMANDS = ("scalability_analysis", "scalability_dilated", "benchmark_training", "lab_training")
"""Files whose rows come from several commands."""

HEADLINE = (
    *("none", PLAIN, "fp16", "powersgd-1", "writeup-dense", "writeup-sparse"),
    *("ours-allgather-int8", "ours-sharded-int8"),
)
COLUMNS = (
    (WHOLE, 1e9, "1 Gbit/s, whole"),
    (WHOLE, 1e8, "100 Mbit/s, whole"),
    (DILATED, 1e9, "1 Gbit/s, dilated"),
    (DILATED, 1e8, "100 Mbit/s, dilated"),
)
COMPUTED_AT = 2
"""Of the columns, where what is computed from the whole runs at 1 Gbit/s stands."""


def headline(found: dict[str, Table]) -> str:
    """README's table, eight hosts: step times by rate, what is computed from them, and bytes."""
    rows = {source: good(found[source].rows) if source in found else [] for source, _, _ in COLUMNS}
    places = {
        (source, rate): next((s for s in settings(rows[source]) if (s.hosts, s.rate_bits) == (8, rate)), None)
        for source, rate, _ in COLUMNS
    }
    whole = places[WHOLE, 1e9]
    figures = {} if whole is None else summaries(rows[WHOLE], whole)
    lines, notes = [], Notes()
    for method in HEADLINE:
        # What dilated rows say of bytes is not so of those in this table, which are of whole ones.
        mark = notes.mark(note_of(row for row in rows[WHOLE] if row["method"] == method))
        cells = [_step(rows[source], places[source, rate], method) for source, rate, _ in COLUMNS]
        mine, plain = figures.get(method), figures.get(PLAIN)
        cells.insert(COMPUTED_AT, "-" if mine is None else own_cores(mine, plain, "{:,.0f} ms", "{:.1f}"))
        bytes_ = "-" if method == "none" or mine is None else share(mine.sent, plain and plain.sent, 100)
        name = title(method) + mark
        lines.append(
            [f"**{name}**" if is_ours(method) else name, *cells, bytes_ if bytes_ == "-" else f"{bytes_} %"]
        )
    head = ["8 hosts: a step (times faster)", *(name for *_, name in COLUMNS), "bytes"]
    head.insert(1 + COMPUTED_AT, "1 Gbit/s, own cores: COMPUTED")
    return Grid("", head, lines, notes=notes.lines()).markdown()


def elsewhere(found: dict[str, Table]) -> str:
    """README's second table: whole runs with other numbers of hosts and at other rates, wins and losses."""
    shown = {(8.0, rate) for source, rate, _ in COLUMNS if source == WHOLE}
    if WHOLE not in found:
        return missing(WHOLE)
    rows = [row for row in good(found[WHOLE].rows) if (row["hosts"], row["rate_bits"]) not in shown]
    grid = lab_tables.everywhere(replace(found[WHOLE], rows=tuple(rows)))
    return missing(WHOLE) if grid is None else grid.markdown()


def _step(rows: list[Row], place: Setting | None, method: str) -> str:
    """Milliseconds, and times faster where the two may be compared."""
    if place is None:
        return "-"
    step, plain = (median(of(rows, place, name), "step_ms") for name in (method, PLAIN))
    if step is None or not plain:
        return "-"
    return f"{step:,.0f} ms ({f'{plain / step:.1f}' if comparable(method, place) else 'not comparable'})"


def commands(found: dict[str, Table], source: str) -> str:
    """The commands that made a file's rows, and the machines, as its rows have them."""
    if source not in found:
        return missing(source)
    rows = read(ROOT / "results" / SOURCES[source].file)
    counts = Counter((row["command"], row["machine"]) for row in rows)
    lines = [[f"`{command}`", str(count), machine] for (command, machine), count in counts.items()]
    return Grid("", (f"`{SOURCES[source].file}` was made by", "rows", "on"), lines).markdown()


def missing(source: str) -> str:
    return Grid("", ("",), [[f"not measured yet: `{SOURCES[source].command}`"]]).markdown()


def parts(found: dict[str, Table], drawn: dict[str, bytes]) -> Iterator[tuple[str, str, str]]:
    """Page, mark and what belongs there."""
    yield "README.md", "headline", headline(found)
    yield "README.md", "headline-elsewhere", elsewhere(found)
    yield "docs/lab.md", "unshaped", lab_overview.unshaped(found)
    for page, name in CLAIMS.items():
        yield page, "claims", claims.table(found, name)
    yield "docs/results.md", "measured", lab_overview.measured(found)
    yield "docs/results.md", "dilated-cpu", lab_overview.dilated_cpu(found)
    yield "docs/results.md", "dilated-low-rank", lab_overview.dilated_low_rank(found)
    for source in COMMANDS:
        yield "docs/results.md", f"commands-{source}", commands(found, source)
    for mark, (source, make) in GRIDS.items():
        grid = make(found[source]) if source in found else None
        yield "docs/results.md", mark, missing(source) if grid is None else grid.markdown()
    for section in SECTIONS:
        for picture in section.pictures:
            there = f"{picture.name}.png" in drawn
            line = f"![{picture.alt}](pictures/{picture.name}.png)"
            yield "docs/results.md", f"picture-{picture.name}", line if there else ""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return parser.parse_args(arguments)


def main() -> None:
    parse()
    found = load(ROOT / "results")
    drawn = pictures(found)
    PICTURES.mkdir(exist_ok=True)
    for old in PICTURES.glob("*.png"):
        old.unlink()
    for name, data in drawn.items():
        (PICTURES / name).write_bytes(data)
    for page, mark, text in parts(found, drawn):
        fill(page, mark, text)


if __name__ == "__main__":
    main()
