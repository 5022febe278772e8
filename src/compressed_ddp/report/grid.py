"""A table that can be written for a page and for a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Grid:
    """A caption, a head and rows of text; the first column names the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: frozenset[int] = frozenset()
    """Rows to be set off."""

    def markdown(self) -> str:
        lines = [f"| {' | '.join(self.head)} |", f"|{'---|' * len(self.head)}"]
        for at, row in enumerate(self.rows):
            name, *cells = row
            lines.append(f"| {' | '.join([f'**{name}**' if at in self.strong else name, *cells])} |")
        return "\n".join(lines)

    def html(self) -> str:
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.head)
        body = []
        for at, (name, *cells) in enumerate(self.rows):
            mark = ' class="strong"' if at in self.strong else ""
            rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            body.append(f'<tr{mark}><th scope="row">{escape(name)}</th>{rest}</tr>')
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(self.caption)}"><table>'
            f"<caption>{escape(self.caption)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{''.join(body)}</tbody></table></div>"
        )
