"""A table that can be written for a page and for a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

NONE = "-"
DIGITS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
"""Of the marks of notes below a table; see ``Notes``."""
LONGEST = 32
"""Characters of a cell that stays on one line."""


class Notes:
    """Remarks below a table: the same remark has the same mark."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def mark(self, note: str) -> str:
        """What to put behind a cell that ``note`` is about; nothing where there is none."""
        if not note:
            return ""
        if note not in self._found:
            self._found.append(note)
        return _mark(self._found.index(note) + 1)

    def lines(self) -> tuple[str, ...]:
        return tuple(f"{_mark(number)} {note}" for number, note in enumerate(self._found, 1))


def _mark(number: int) -> str:
    return "".join(DIGITS[int(digit)] for digit in str(number))


def share(part: float | None, whole: float | None, times: float = 1.0, form: str = "{:.2f}") -> str:
    """``times * part / whole``, where both are known."""
    return NONE if part is None or not whole else form.format(times * part / whole)


def text(plain: str) -> str:
    """For a page: no number parts from its percent sign."""
    return escape(plain).replace(" %", "\u00a0%")


def _words(cell: str) -> str:
    """Long cells may break, figures may not."""
    return ' class="words"' if len(cell) > LONGEST else ""


@dataclass(frozen=True)
class Grid:
    """A caption, a head and rows of text; the first column names the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: frozenset[int] = frozenset()
    """Rows to be set off."""
    notes: Sequence[str] = ()
    """Lines below it, each with its mark."""

    def markdown(self) -> str:
        lines = [f"| {' | '.join(self.head)} |", f"|{'---|' * len(self.head)}"]
        for at, row in enumerate(self.rows):
            name, *cells = row
            lines.append(f"| {' | '.join([f'**{name}**' if at in self.strong else name, *cells])} |")
        return "\n\n".join(["\n".join(lines), *self.notes])

    def html(self) -> str:
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.head)
        body = []
        for at, (name, *cells) in enumerate(self.rows):
            mark = ' class="strong"' if at in self.strong else ""
            rest = "".join(f"<td{_words(cell)}>{text(cell)}</td>" for cell in cells)
            body.append(f'<tr{mark}><th scope="row">{text(name)}</th>{rest}</tr>')
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(self.caption)}"><table>'
            f"<caption>{escape(self.caption)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{''.join(body)}</tbody></table></div>"
            + "".join(f'<p class="remark">{escape(note)}</p>' for note in self.notes)
        )
