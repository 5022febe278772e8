"""How pictures look: one theme, drawn for light paper, and recoloured by the page where it is dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, SOFT, GRID, PAPER = "#1b2024", "#5c646b", "#dfe2e5", "#fefefe"
"""Colours that the page replaces: they stand for nothing else."""

_VARIABLES = {INK: "var(--ink)", SOFT: "var(--soft)", GRID: "var(--line)", PAPER: "var(--paper)"}

PHASES = {
    "compute": "#a9afb5",
    "exposed": "#c8553d",
    "select": "#2a9d8f",
    "encode": "#8ab17d",
    "wait": "#5b8db8",
    "decode": "#e0a030",
}
FAMILIES = {"plain": "#7d858c", "torch": "#5b8db8", "writeup": "#c8703d", "ours": "#2a9d8f"}
SERIES = ("#7d858c", "#e0a030", "#2a9d8f", "#3b6ea5", "#c8553d", "#8e6bb0")

_THEME: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "compressed-ddp",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": PAPER,
}

Draw = Callable[[], "Figure | None"]


def family_colour(method: str) -> str:
    kind = method.split("-")[0]
    return FAMILIES.get(kind, FAMILIES["plain" if kind == "none" else "torch"])


def new_figure(width: float, height: float) -> Figure:
    """A figure that no window and no global state knows."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def svg(draw: Draw, name: str, alt: str) -> str | None:
    """The picture as an element for a page; ``name`` keeps its ids apart from those of other pictures."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context(_THEME):
        figure = draw()
        if figure is None:
            return None
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(url\(#|href="#)', rf"\1{name}-", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    box = re.search(r'viewBox="([^"]+)"', text)
    assert box is not None
    label = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    width = 1.15 * float(box[1].split()[2])  # so that letters have one size in all pictures
    opening = f'<svg class="plot" role="img" aria-label="{label}" viewBox="{box[1]}"'
    opening += f' style="max-width: {width:.0f}px"'
    opening += ' xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1)


def png(draw: Draw) -> bytes | None:
    """The picture for documents, on paper."""
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context(_THEME | {"savefig.facecolor": "white", "figure.facecolor": "white"}):
        figure = draw()
        if figure is None:
            return None
        figure.savefig(out, format="png", dpi=120, metadata={"Software": None})
    return out.getvalue()
