"""The tables and pictures of docs/, from the files in results/.

A table whose file is not there says "not measured yet", with the command that makes it; its picture is
left out.

    python experiments/result_tables.py            # writes them into docs/
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import claims
from pages import ROOT, fill

from compressed_ddp.report import SOURCES, Table, load, tables
from compressed_ddp.report.figures import PLAIN, good, is_ours, median, of, sent, settings, title
from compressed_ddp.report.grid import Grid
from compressed_ddp.report.page import pictures
from compressed_ddp.report.sections import SECTIONS

PICTURES = ROOT / "docs" / "pictures"
GRIDS: dict[str, tuple[str, Callable[[Table], Grid | None]]] = {
    "steps": ("scalability_analysis", tables.steps),
    "everywhere": ("scalability_analysis", tables.everywhere),
    "steps-dilated": ("scalability_dilated", tables.steps),
    "everywhere-dilated": ("scalability_dilated", tables.everywhere),
    "traffic": ("scalability_analysis", tables.traffic),
    "training": ("benchmark_training", tables.training),
    "lab-training": ("lab_training", tables.training),
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
    """README's table: eight hosts, step times by rate, and bytes of the whole model."""
    rows = {source: good(found[source].rows) if source in found else [] for source, _, _ in COLUMNS}
    lines = []
    for method in HEADLINE:
        cells = []
        for source, rate, _ in COLUMNS:
            place = next((s for s in settings(rows[source]) if (s.hosts, s.rate_bits) == (8, rate)), None)
            step, plain = (
                None if place is None else median(of(rows[source], place, name), "step_ms")
                for name in (method, PLAIN)
            )
            cells.append("-" if step is None or not plain else f"{step:,.0f} ms ({plain / step:.1f})")
        whole = [row for row in rows["scalability_analysis"] if (row["hosts"], row["rate_bits"]) == (8, 1e9)]
        mine, plain = (sent([row for row in whole if row["method"] == name]) for name in (method, PLAIN))
        share = "-" if method == "none" or mine is None or not plain else f"{100 * mine / plain:.2f} %"
        lines.append([f"**{title(method)}**" if is_ours(method) else title(method), *cells, share])
    head = ("8 hosts: a step (times faster)", *(name for *_, name in COLUMNS), "bytes")
    return Grid("", head, lines).markdown()


def missing(source: str) -> str:
    return Grid("", ("",), [[f"not measured yet: `{SOURCES[source].command}`"]]).markdown()


def parts(found: dict[str, Table], drawn: dict[str, bytes]) -> Iterator[tuple[str, str, str]]:
    """Page, mark and what belongs there."""
    yield "README.md", "headline", headline(found)
    for page, name in CLAIMS.items():
        yield page, "claims", claims.table(found, name)
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
