"""Tables of the lab's rows: what is computed, what may be compared, and that remarks reach the reader."""

from __future__ import annotations

import csv
from pathlib import Path

import experiment
import pytest
import report_fixtures

from compressed_ddp.lab.measure import Plan
from compressed_ddp.lab.summary import summarise
from compressed_ddp.report import SOURCES, Table, lab_tables, read_table
from compressed_ddp.report.figures import title, whole_model
from compressed_ddp.report.grid import Grid, Notes

Rows = list[dict[str, object]]


def table_of(rows: Rows, folder: Path, name: str = "scalability_analysis") -> Table:
    report_fixtures.write(folder / f"{name}.csv", rows)
    return read_table(SOURCES[name], folder / f"{name}.csv")


def cells(grid: Grid | None, beginning: str) -> dict[str, str]:
    assert grid is not None
    found = [row for row in grid.rows if row[0].startswith(beginning)]
    assert len(found) == 1, (beginning, [row[0] for row in grid.rows])
    return dict(zip(grid.head, found[0], strict=True))


def test_steps_have_the_labs_own_columns(tmp_path: Path) -> None:
    """Exposed, CPU and what is computed are those that `lab run` prints for the same rows."""
    rows = list(report_fixtures.lab_rows())
    grid = lab_tables.steps(table_of(rows, tmp_path))
    mine = [row for row in rows if (row["hosts"], row["rate"]) == (8, "1gbit") and not row["failed"]]
    for each in summarise(mine, Plan(compute=0.05), 1e9):
        shown = cells(grid, title(each.method))
        assert shown["exposed, ms"] == f"{each.step - 50:.1f}" and shown["CPU, ms"] == f"{each.cpu:.1f}"
        computed = shown[lab_tables.COMPUTED]
        assert computed == "-" if each.method == "none" else computed.startswith(f"{each.own_cores:.1f} (")
    assert cells(grid, "plain")[lab_tables.COMPUTED].endswith(" (1.00)")


def test_nothing_is_computed_from_dilated_rows(tmp_path: Path) -> None:
    grid = lab_tables.steps(table_of(list(report_fixtures.lab_rows(10)), tmp_path, "scalability_dilated"))
    assert grid is not None and lab_tables.COMPUTED not in grid.head


def test_remarks_stand_below(tmp_path: Path) -> None:
    table = table_of(list(report_fixtures.lab_rows()), tmp_path)
    for make in (lab_tables.steps, lab_tables.everywhere, lab_tables.traffic):
        grid = make(table)
        assert grid is not None and grid.notes == ("¹ in one bucket: an invented note",)
        assert grid.markdown().endswith(f"|\n\n{grid.notes[0]}")
        assert f'<p class="remark">{grid.notes[0]}</p>' in grid.html()
    assert cells(lab_tables.steps(table), "torch PowerSGD, rank 1¹") and not Notes().mark("")


@pytest.mark.parametrize(("step", "verdict"), [(55.0, "slower than torch PowerSGD, rank 1"), (9e9, "wins")])
def test_no_win_rests_on_a_dilated_powersgd(step: float, verdict: str, tmp_path: Path) -> None:
    """Faster than it is no win; slower than it is said."""
    rows = list(report_fixtures.lab_rows(10))
    for row in rows:
        if row["method"] == "powersgd-1":
            row["step_ms"] = step
    grid = lab_tables.everywhere(table_of(rows, tmp_path, "scalability_dilated"))
    shown = cells(grid, "8 hosts at 10 Gbit/s")
    assert "PowerSGD" not in shown["best torch hook, ms"]
    assert shown["torch PowerSGD, rank 1, ms: not comparable"] == f"{step:.1f}¹"
    assert grid is not None and shown[grid.head[-1]].endswith(verdict)


def test_whole_runs_are_compared_with_powersgd(tmp_path: Path) -> None:
    rows = list(report_fixtures.lab_rows())
    for row in rows:
        if row["method"] == "powersgd-1":
            row["step_ms"] = 1.0
    grid = lab_tables.everywhere(table_of(rows, tmp_path))
    shown = cells(grid, "8 hosts at 1 Gbit/s")
    assert shown["best torch hook, ms"] == "1.0 (torch PowerSGD, rank 1¹)"
    assert grid is not None and shown[grid.head[-1]] == "loses"


def test_traffic_is_of_one_rate(tmp_path: Path) -> None:
    rows = list(report_fixtures.lab_rows())
    for row in rows:
        if row["rate"] != "1gbit" and row["wire_sent"]:
            row["wire_sent"] = 1e12
    table = table_of(rows, tmp_path)
    found, hosts = whole_model(table.rows)
    assert {row["rate"] for row in found} == {"1gbit"} and hosts == [2, 4, 8, 16]
    grid = lab_tables.traffic(table)
    assert grid is not None and grid.caption.endswith("all at 1 Gbit/s")
    shown = cells(grid, "ours: sharded")
    assert all(shown[f"{n} hosts"].endswith(" (0.65 %)") for n in hosts)
    assert shown["4 to 16 hosts"] == "+25 %"


def test_filling_a_page_replaces_remarks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = experiment.load("pages")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("Before\n\n<!-- it -->\n\n| old |\n|---|\n\n¹ old\n\n² older\n\nAfter\n")
    for grid in (Grid("", ("new",), [["1"]], notes=("¹ one", "² two")), Grid("", ("new",), [["1"]])):
        pages.fill("page.md", "it", grid.markdown())
        assert page.read_text() == f"Before\n\n<!-- it -->\n\n{grid.markdown()}\n\nAfter\n"


def test_every_row_of_results_names_command_commit_and_machine() -> None:
    folder = Path(__file__).resolve().parents[2] / "results"
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                assert all(row.get(name) for name in ("command", "commit", "machine")), path.name
