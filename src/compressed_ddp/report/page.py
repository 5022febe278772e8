"""The report as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from html import escape
from pathlib import Path

from ..version import __version__
from . import sections
from .grid import text
from .sections import SECTIONS, Picture, Section
from .sources import SOURCES, Table
from .style import png, svg

STYLE = Path(__file__).with_name("page.css")
# The browser itself refuses whatever the page might want to fetch.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>compressed-ddp: what was measured</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>What compressed gradients do</h1>
<p class="subtitle">Dense and compressed data-parallel training side by side: every figure on this page
comes from a CSV file, and says which, and by which command it was made.</p>
<nav aria-label="Sections"><ol>{links}</ol></nav>
{facts}
</header>
<main>
"""


def make_page(found: Mapping[str, Table]) -> str:
    """The whole page, from the files that there are; the same for the same files."""
    links = [(section.name, section.title) for section in SECTIONS] + [("origins", "Where it comes from")]
    parts = [
        HEAD.format(
            policy=POLICY,
            style=STYLE.read_text(encoding="utf-8"),
            links="".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title in links),
            facts=_facts(found),
        ),
        *(_section(section, found) for section in SECTIONS),
        _origins(found),
        "</main>\n",
        f"<footer><p>Made by <code>compressed-ddp report</code>, version {__version__}.</p></footer>\n",
        "</body>\n</html>\n",
    ]
    return "".join(parts)


def pictures(found: Mapping[str, Table]) -> dict[str, bytes]:
    """All pictures that can be drawn, as PNG files by name."""
    drawn = {
        picture.name: png(partial(picture.draw, found[picture.source]))
        for section in SECTIONS
        for picture in section.pictures
        if picture.source in found
    }
    return {f"{name}.png": data for name, data in drawn.items() if data is not None}


def _facts(found: Mapping[str, Table]) -> str:
    facts = sections.short(found)
    cells = [f"<div><dt>{text(what)}</dt><dd>{text(number)}</dd></div>" for number, what in facts]
    return f'<dl class="facts">{"".join(cells)}</dl>' if cells else ""


def _section(section: Section, found: Mapping[str, Table]) -> str:
    parts = [f'<section id="{section.name}" aria-labelledby="{section.name}-title">']
    parts.append(f'<h2 id="{section.name}-title">{escape(section.title)}</h2><p>{escape(section.lead)}</p>')
    parts += [_missing(name) for name in section.sources if name not in found]
    parts += [
        _picture(picture, found[picture.source]) for picture in section.pictures if picture.source in found
    ]
    for source, make in section.grids:
        grid = make(found[source]) if source in found else None
        if grid is not None:
            parts.append(grid.html())
    return "\n".join([*parts, "</section>\n"])


def _missing(name: str) -> str:
    source = SOURCES[name]
    made = f"This makes it: <code>{escape(source.command)}</code>"
    return _note(f"Not measured yet: <code>{source.file}</code> is not there. {made}")


def _note(html: str) -> str:
    return f'<div class="note"><p>{html}</p></div>'


def _picture(picture: Picture, table: Table) -> str:
    drawn = svg(partial(picture.draw, table), picture.name, picture.alt)
    if drawn is None:
        return _note(f"<code>{table.source.file}</code> has no row that this picture shows.")
    return (
        f'<figure id="{picture.name}"><div class="frame">{drawn}</div>'
        f"<figcaption>{origin(table)}</figcaption></figure>"
    )


def origin(table: Table) -> str:
    """A sentence that says where a table's rows come from."""
    source = table.source
    commands = ", ".join(f"<code>{escape(command)}</code>" for command in table.commands[:3])
    more = f" and {len(table.commands) - 3} more" if len(table.commands) > 3 else ""
    commits = ", ".join(f"<code>{escape(commit)}</code>" for commit in table.commits[:4])
    if not commands:
        return f"From <code>{source.file}</code>, which <code>{escape(source.command)}</code> makes."
    return f"From <code>{source.file}</code>, made by {commands}{more}" + (
        f" at commit {commits}." if commits else "."
    )


def _origins(found: Mapping[str, Table]) -> str:
    """All files: rows, commands, commits, machines; and what makes those that are not there."""
    lines = []
    for name, source in SOURCES.items():
        table = found.get(name)
        cells = [f"<code>{escape(source.command)}</code>", "not there", "", ""]
        if table is not None:
            commands = table.commands or (source.command,)
            cells = [
                "<br>".join(f"<code>{escape(command)}</code>" for command in commands),
                f"{len(table.rows):,}",
                ", ".join(map(escape, table.commits)),
                "; ".join(map(escape, table.machines)),
            ]
        body = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row"><code>{source.file}</code></th>{body}</tr>')
    heads = "".join(f'<th scope="col">{h}</th>' for h in ("file", "command", "rows", "commit", "machine"))
    return (
        '<section id="origins" aria-labelledby="origins-title">'
        '<h2 id="origins-title">Where it comes from</h2>'
        "<p>A plus behind a commit: the files differed from it when the rows were made.</p>"
        '<div class="scroll" tabindex="0" role="region" aria-label="The files of this report">'
        f'<table class="origins"><caption>The files of this report</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div></section>\n"
    )
