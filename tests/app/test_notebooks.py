"""The notebooks run from top to bottom, and what is kept in them is what they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import experiment
import pytest
import report_fixtures

from compressed_ddp.report.sections import SECTIONS

pytest.importorskip("nbclient", reason="runs the notebooks")
pytest.importorskip("ipykernel", reason="runs their cells")
pytest.importorskip("matplotlib", reason="they draw")

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NAMES = ("compression_demo", "results_analysis")


def read(name: str) -> Any:
    import nbformat

    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return notebook


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(notebook: Any) -> list[list[str]]:
    """For every cell with code: its text, and which kinds of pictures there are."""
    cells = []
    for cell in code(notebook):
        parts: list[str] = []
        printed = False
        for output in cell.outputs:
            assert output.output_type in ("stream", "display_data"), output
            if output.output_type == "stream" and printed:  # a slow kernel may send a line in pieces
                parts[-1] += output.text
                continue
            printed = output.output_type == "stream"
            data = output.get("data", {})
            parts.append(output.text if printed else data.get("text/markdown") or ",".join(sorted(data)))
        cells.append(parts)
    return cells


def test_these_are_all() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_shows_what_is_kept(name: str) -> None:
    """After other figures in results/, `python experiments/notebooks.py` brings it up to date."""
    kept, fresh = read(name), experiment.load("notebooks").execute(FOLDER / f"{name}.ipynb")
    assert [cell.execution_count for cell in code(kept)] == list(range(1, len(code(kept)) + 1))
    assert shown(kept) == shown(fresh)


def test_the_analysis_has_all_sections_of_the_report() -> None:
    cells = [cell.source for cell in code(read("results_analysis"))]
    shows = [source for source in cells if source.startswith("show(")]
    assert shows == [f'show("{section.name}")' for section in SECTIONS]


@pytest.mark.parametrize("everything", [True, False])
def test_the_analysis_works_with_the_files_that_there_are(
    everything: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from IPython import display

    (tmp_path / "results").mkdir()
    if everything:
        report_fixtures.write_all(tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []
    monkeypatch.setattr(display, "display", seen.append)
    names: dict[str, Any] = {}
    for cell in code(read("results_analysis")):
        exec(cell.source, names)
    texts = [thing.data for thing in seen if isinstance(thing, display.Markdown)]
    assert any("Not measured yet" in text for text in texts) is not everything
    assert sum(isinstance(thing, display.Image) for thing in seen) == (7 if everything else 0)
