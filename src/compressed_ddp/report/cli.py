"""``compressed-ddp report``: a page and pictures from the experiments' CSV files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .page import make_page, pictures
from .sources import SOURCES, load


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compressed-ddp report",
        description="Make one HTML page, which needs no network, from the CSV files of the experiments. "
        "Files that are not there are named with the command that makes them.",
    )
    add = parser.add_argument
    add("results", type=Path, help="folder with the CSV files, such as results/")
    add("-o", "--out", type=Path, default=Path("report.html"), help="the page (default: report.html)")
    add("--pictures", type=Path, metavar="FOLDER", help="write the pictures there too, as PNG files")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Write the page; the exit status. What a user can mend is said in a line."""
    options = make_parser().parse_args(arguments)
    try:
        found = load(options.results)
        page = make_page(found)
        drawn = pictures(found) if options.pictures is not None else {}
        _write(options.out, page.encode())
        for name, data in drawn.items():
            _write(options.pictures / name, data)
    except ModuleNotFoundError as error:
        needed = "install what it needs with: pip install 'compressed-ddp[plots]'"
        print(f"compressed-ddp report needs {error.name}; {needed}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"compressed-ddp report: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.out}" + (f" and {len(drawn)} pictures in {options.pictures}" if drawn else ""))
    for name, source in SOURCES.items():
        if name not in found:
            print(f"not there: {options.results / source.file}; made by: {source.command}")
    return 0


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
