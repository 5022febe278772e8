"""The tables and pictures of docs/, from the files in results/.

A table whose file is not there says "not measured yet", with the command that makes it; its picture is
left out.

    python experiments/result_tables.py            # writes them into docs/
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import claims
import lab_overview
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


COMMANDS = ("scalability_analysis", "scalability_dilated")
"""Files whose rows come from several commands."""

HEADLINE = (
    *("none", PLAIN, "fp16", "powersgd-1", "writeup-dense", "writeup-sparse"),
    *("ours-allgather-int8", "ours-sharded-int8"),
)
COLUMNS = (
    ("scalability_dilated", 1e9, "1 Gbit/s, dilated"),
    ("scalability_dilated", 1e8, "100 Mbit/s, dilated"),
    ("scalability_analysis", 1e9, "1 Gbit/s, whole"),
)


def headline(found: dict[str, Table]) -> str:
    """README's table, eight hosts: step times by rate, what is computed from them, and bytes."""
    rows = {source: good(found[source].rows) if source in found else [] for source, _, _ in COLUMNS}
    places = {
        (source, rate): next((s for s in settings(rows[source]) if (s.hosts, s.rate_bits) == (8, rate)), None)
        for source, rate, _ in COLUMNS
    }
    whole = places["scalability_analysis", 1e9]
    figures = {} if whole is None else summaries(rows["scalability_analysis"], whole)
    lines, notes = [], Notes()
    for method in HEADLINE:
        mark = notes.mark(note_of(row for each in rows.values() for row in each if row["method"] == method))
        cells = [_step(rows[source], places[source, rate], method) for source, rate, _ in COLUMNS]
        mine, plain = figures.get(method), figures.get(PLAIN)
        cells.append("-" if mine is None else own_cores(mine, plain, "{:,.0f} ms", "{:.1f}"))
        bytes_ = "-" if method == "none" or mine is None else share(mine.sent, plain and plain.sent, 100)
        name = title(method) + mark
        lines.append(
            [f"**{name}**" if is_ours(method) else name, *cells, bytes_ if bytes_ == "-" else f"{bytes_} %"]
        )
    head = (
        *("8 hosts: a step (times faster)", *(name for *_, name in COLUMNS)),
        *("1 Gbit/s, whole, own cores: COMPUTED", "bytes"),
    )
    return Grid("", head, lines, notes=notes.lines()).markdown()


def _step(rows: list[Row], place: Setting | None, method: str) -> str:
    """Milliseconds, and times faster where the two may be compared."""
    if place is None:
        return "-"
    step, plain = (median(of(rows, place, name), "step_ms") for name in (method, PLAIN))
    if step is None or not plain:
        return "-"
    return f"{step:,.0f} ms ({f'{plain / step:.1f}' if comparable(method, place) else 'not comparable'})"


def commands(found: dict[str, Table], source: str) -> str:
    """The commands that made a file's rows, as its rows have them."""
    if source not in found:
        return missing(source)
    counts = Counter(row["command"] for row in read(ROOT / "results" / SOURCES[source].file))
    lines = [[f"`{command}`", str(count)] for command, count in counts.items()]
    return Grid("", (f"`{SOURCES[source].file}` was made by", "rows"), lines).markdown()


def missing(source: str) -> str:
    return Grid("", ("",), [[f"not measured yet: `{SOURCES[source].command}`"]]).markdown()


def parts(found: dict[str, Table], drawn: dict[str, bytes]) -> Iterator[tuple[str, str, str]]:
    """Page, mark and what belongs there."""
    yield "README.md", "headline", headline(found)
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
