"""Run the notebooks and keep what they show, so that they can be read without running them.

python experiments/notebooks.py                # all of notebooks/
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from pages import ROOT

FOLDER = ROOT / "notebooks"


def execute(path: Path) -> Any:
    """The notebook with the outputs of a run in a fresh process; raises where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=120,
        startup_timeout=120,
        record_timing=False,  # the same files give the same notebook
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    notebook.metadata.pop("language_info", None)
    return notebook


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return parser.parse_args(arguments)


def main() -> None:
    parse()
    for path in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(execute(path), path)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
