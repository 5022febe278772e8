"""Tables of the lab's rows: what is computed, what may be compared, and that remarks reach the reader."""

from __future__ import annotations

import csv
from pathlib import Path

import experiment
import pytest
import report_fixtures

from compressed_ddp.lab.measure import Plan
from compressed_ddp.lab.summary import summarise
from compressed_ddp.report import SOURCES, Table, lab_tables, read_table, tables
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
        idle = each.method in ("none", "plain")
        assert shown["compression CPU, ms"] == ("-" if idle else f"{each.codec:.1f}")
        computed = shown[lab_tables.COMPUTED]
        assert computed == "-" if each.method == "none" else computed.startswith(f"{each.own_cores:.1f} (")
    assert cells(grid, "plain")[lab_tables.COMPUTED].endswith(" (1.00)")


def test_nothing_is_computed_from_dilated_rows(tmp_path: Path) -> None:
    grid = lab_tables.steps(table_of(list(report_fixtures.lab_rows(10)), tmp_path, "scalability_dilated"))
    assert grid is not None and lab_tables.COMPUTED not in grid.head


def test_remarks_stand_below(tmp_path: Path) -> None:
    table = table_of(list(report_fixtures.lab_rows()), tmp_path)
    bucket = "¹ in one bucket: an invented note"
    for make, notes in (
        (lab_tables.steps, (bucket, "² not here")),
        (lab_tables.everywhere, (bucket,)),
        (lab_tables.traffic, (bucket,)),
    ):
        grid = make(table)
        assert grid is not None and grid.notes == notes
        assert grid.markdown().endswith("|\n\n" + "\n\n".join(notes))
        assert all(f'<p class="remark">{note}</p>' in grid.html() for note in notes)
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


def test_traffic_of_dilated_rows_is_named_by_what_it_stands_for(tmp_path: Path) -> None:
    rows = list(report_fixtures.lab_rows(10))
    more = [row | {"rate": "100mbit", "rate_bits": 1e8} for row in rows if row["hosts"] in (2, 4, 16)]
    for mine, rate in ((rows, "10 Gbit/s"), ([*rows, *more], "1 Gbit/s")):
        grid = lab_tables.traffic(table_of(mine, tmp_path, "scalability_dilated"))
        assert grid is not None and f"256 M elements, all at {rate}, dilated 10 times" in grid.caption
    assert cells(grid, "ours: sharded")["4 to 16 hosts"].endswith(" %")


def test_what_was_measured_and_how_far_dilated_runs_go(tmp_path: Path) -> None:
    overview = experiment.load("lab_overview")
    rows, dilated = list(report_fixtures.lab_rows()), list(report_fixtures.lab_rows(10))
    lacking = [row for row in rows if (row["hosts"], row["rate"]) != (2, "1gbit")]
    for row in dilated:
        row["cpu_ms"] = row["cpu_ms"] and float(str(row["cpu_ms"])) / 4
    found = {
        "scalability_analysis": table_of(lacking, tmp_path),
        "scalability_dilated": table_of(dilated, tmp_path, "scalability_dilated"),
    }
    lines = overview.measured(found).splitlines()
    assert lines[0] == "|  | 100 Mbit/s | 1 Gbit/s | 10 Gbit/s |" and len(lines) == 6
    alone = overview.measured({"scalability_analysis": found["scalability_analysis"]}).splitlines()
    assert alone[2].split(" | ")[2] == "not measured" and "whole" in alone[4]
    assert overview.measured({}).count("not measured") == 12
    for line in overview.dilated_cpu(found).splitlines()[2:]:
        assert line.endswith(" | 0.25 |") and "no communication" not in line
    assert "not measured yet" in overview.dilated_cpu({})
    assert "not measured yet" in overview.dilated_low_rank({})


def test_low_rank_bytes_of_a_dilated_run_by_hand(tmp_path: Path) -> None:
    """It sends 2 % of plain DDP's bytes where the whole model's are 1 %: the rest takes half of its wire."""
    rows = {1: list(report_fixtures.lab_rows()), 10: list(report_fixtures.lab_rows(10))}
    for dilation, mine in rows.items():
        for row in mine:
            if row["wire_sent"] and row["method"] in ("plain", "powersgd-1"):
                share = 1 if row["method"] == "plain" else 0.01 if dilation == 1 else 0.02
                row["wire_sent"] = share * 1e9 / dilation
            if row["method"] == "powersgd-1":
                row["step_ms"] = 300.0
    overview = experiment.load("lab_overview")
    found = {
        "scalability_analysis": table_of(rows[1], tmp_path),
        "scalability_dilated": table_of(rows[10], tmp_path, "scalability_dilated"),
    }
    (line,) = [x for x in overview.dilated_low_rank(found).splitlines() if "rank 1, 8 hosts at 1 Gbit/s" in x]
    # 1 MB too much at 100 Mbit/s: 80 ms.
    assert line.split(" | ")[1:6] == ["2.00", "1.00", "300.0", "80.0", "220.0"]


def test_a_table_may_have_many_remarks() -> None:
    notes = Notes()
    marks = [notes.mark(f"remark {n}") for n in range(12)]
    assert len(set(marks)) == 12 and marks[5] == "⁶" and marks[11] == "¹²"
    assert notes.mark("remark 5") == "⁶" and notes.lines()[11] == "¹² remark 11"


def test_break_even_by_hand(tmp_path: Path) -> None:
    """Of the map's own rates; where between two of them it ends, nobody computed."""
    figures = {
        (32, 1e9): (2.0, 0.5),
        (32, 1e10): (0.9, 1.1),
        (32, 1e11): (0.8, 0.7),
        (64, 1e9): (3.0, 0.1),
        (128, 1e9): (0.2, 0.1),
    }
    rows: Rows = [
        {"workers": workers, "rate_bits": rate, "method": method, "predicted_ms": 1, "dense_ms": gain}
        | {"gain": gain}
        for (workers, rate), gains in figures.items()
        for method, gain in zip(("ours-allgather-int8", "ours-sharded-int8"), gains, strict=True)
    ]
    rows.append(rows[-1] | {"method": "fp16", "gain": 9.0})
    report_fixtures.write(tmp_path / "cost_model_map.csv", rows)
    grid = tables.break_even(read_table(SOURCES["cost_model_map"], tmp_path / "cost_model_map.csv"))
    assert grid is not None and grid.head[0] == "the better of all-gather and sharded"
    assert grid.head[1] == "wins at the map's rates up to: times faster (the next one)"
    assert [row[1] for row in grid.rows] == [
        "10 Gbit/s: 1.10 (100 Gbit/s: 0.80)",
        "1 Gbit/s: 3.00",
        "nowhere",
    ]
    assert grid.rows[0][2:] == ["2.0 at 1 Gbit/s", "0.80 at 100 Gbit/s", "2.00 at 1 Gbit/s"]
    assert grid.rows[2][2:] == ["0.2 at 1 Gbit/s", "0.20 at 1 Gbit/s", "0.20 at 1 Gbit/s"]


def test_filling_a_page_replaces_remarks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = experiment.load("pages")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("Before\n\n<!-- it -->\n\n| old |\n|---|\n\n¹ old\n\n² older\n\nAfter\n")
    remarks = ("¹ one", "² two", "⁶ six", "¹² twelve")
    for grid in (Grid("", ("new",), [["1"]], notes=remarks), Grid("", ("new",), [["1"]])):
        pages.fill("page.md", "it", grid.markdown())
        assert page.read_text() == f"Before\n\n<!-- it -->\n\n{grid.markdown()}\n\nAfter\n"


def test_every_row_of_results_names_command_commit_and_machine() -> None:
    folder = Path(__file__).resolve().parents[2] / "results"
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                assert all(row.get(name) for name in ("command", "commit", "machine")), path.name
