"""Tables and pictures in documents that a command makes: each stands after its mark, ``<!-- name -->``."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = r"(?:(?:\||!\[|[⁰¹²³⁴-⁹]).*\n|\n(?=[⁰¹²³⁴-⁹]))*"
"""Lines of a table, a picture, and remarks below a table."""


def fill(page: str, name: str, table: str) -> None:
    """Let ``table``, which may be empty, stand after mark ``name`` of ``page``, a path in the repository."""
    path = ROOT / page
    marked = re.compile(rf"<!-- {name} -->\n+{BLOCK}\n*")
    block = f"{table}\n\n" if table else ""
    text, found = marked.subn(lambda _: f"<!-- {name} -->\n\n{block}", path.read_text())
    if found != 1:
        raise SystemExit(f"{page} has {found} marks <!-- {name} -->, not one")
    path.write_text(text.rstrip("\n") + "\n")
