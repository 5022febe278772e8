"""What stands before figures: which method, which rate, how many seeds; and sentences that rest on them."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import experiment
import report_fixtures

from compressed_ddp import report
from compressed_ddp.lab.shaping import Shape
from compressed_ddp.report import SOURCES, lab_tables, read_table, sections, tables
from compressed_ddp.report.figures import good, median, setting_of
from compressed_ddp.report.grid import Grid

ROOT = Path(__file__).resolve().parents[2]
Rows = list[dict[str, object]]


def table_of(rows: Rows, folder: Path, name: str) -> report.Table:
    report_fixtures.write(folder / f"{name}.csv", rows)
    return read_table(SOURCES[name], folder / f"{name}.csv")


def lines_of(grid: Grid | None) -> dict[str, list[str]]:
    assert grid is not None
    return {row[0]: list(row[1:]) for row in grid.rows}


def test_both_first_figures_are_of_one_method_that_is_named(tmp_path: Path) -> None:
    """Also where another one is faster, or where sharded was not run."""
    rows = list(report_fixtures.lab_rows())
    for row in rows:
        if row["method"] == "ours-allgather-int8":
            row["step_ms"] = 51.0
    for lacking, name in (("", "ours: sharded, int8"), ("ours-sharded-int8", "ours: all-gather, int8")):
        mine = [row for row in rows if row["method"] != lacking]
        table = table_of(mine, tmp_path, "scalability_analysis")
        facts = sections.short({"scalability_analysis": table})
        shown = lines_of(lab_tables.steps(table))[name]
        assert [number for number, _ in facts] == [f"{float(shown[1]):.1f} x", f"{shown[7]} %"]
        assert all(name in what for _, what in facts)
    plain = table_of([row for row in rows if row["method"] == "plain"], tmp_path, "scalability_analysis")
    assert sections.short({"scalability_analysis": plain}) == []


def test_the_slower_rate_has_a_table_of_its_own_where_it_was_measured(tmp_path: Path) -> None:
    rows = list(report_fixtures.lab_rows())
    grid = lab_tables.slow_steps(table_of(rows, tmp_path, "scalability_analysis"))
    assert grid is not None and "8 hosts at 100 Mbit/s" in grid.caption and lab_tables.COMPUTED in grid.head
    fast = [row for row in rows if row["rate"] != "100mbit"]
    assert lab_tables.slow_steps(table_of(fast, tmp_path, "scalability_analysis")) is None


def test_a_refusal_is_told_without_what_versions_add(tmp_path: Path) -> None:
    rows = list(report_fixtures.lab_rows())
    rows[-1]["failed"] = f"{rows[-1]['failed']} (3 attempts; a link holds it at 85% to 102%):\na table"
    grid = lab_tables.everywhere(table_of(rows, tmp_path, "scalability_analysis"))
    assert grid is not None and grid.rows[-1][0].endswith("on all links of 16 hosts at once")


def test_a_caption_says_how_many_seeds(tmp_path: Path) -> None:
    rows = list(report_fixtures.training_rows(lab=True))
    first = [row for row in rows if row["seed"] == 0]
    for mine, begins in (
        (rows, "Means over 3 seeds; accuracy ± standard deviation"),
        (first, "One seed"),
        ([row for row in rows if row["seed"] == 0 or row["dataset"] == "mnist"], "Means over 1 to 3 seeds"),
    ):
        grid = tables.training(table_of(mine, tmp_path, "lab_training"))
        assert grid is not None and grid.caption.startswith(begins)


def test_the_models_errors_of_ours_by_rate(tmp_path: Path) -> None:
    about = {"hosts": 2, "ratio": 0.01, "held_out": False, "measured_ms": 100.0}
    rows: Rows = [
        about | {"rate": rate, "method": method, "predicted_ms": predicted}
        for rate, method, predicted in (
            ("1gbit", "ours-sharded-int8", 101.0),
            ("100mbit", "ours-sharded-int8", 70.0),
            ("100mbit", "ours-allgather-int8", 110.0),
            ("100mbit", "plain", 300.0),
        )
    ]
    shown = lines_of(tables.model_check(table_of(rows, tmp_path, "cost_model_check")))
    assert list(shown) == ["fitted on", "ours at 100 Mbit/s", "ours at 1 Gbit/s"]
    assert shown["ours at 100 Mbit/s"] == ["2", "20.0", "30.0", "-30.0 to +10.0"]


def test_readme_shows_whole_runs_first_and_their_remarks_alone(tmp_path: Path) -> None:
    script = experiment.load("result_tables")
    dilated = list(report_fixtures.lab_rows(10))
    for row in dilated:
        row["note"] = row["note"] and "of dilated bytes"
    found = {
        "scalability_analysis": table_of(list(report_fixtures.lab_rows()), tmp_path, "scalability_analysis"),
        "scalability_dilated": table_of(dilated, tmp_path, "scalability_dilated"),
    }
    head, *lines = script.headline(found).splitlines()
    names = [cell.strip() for cell in head.strip("|").split("|")]
    assert [name.split(", ")[-1] for name in names[1:]] == [
        *("whole", "whole", "own cores: COMPUTED", "dilated", "dilated", "bytes")
    ]
    assert lines[-1] == "¹ in one bucket: an invented note"
    other = script.elsewhere(found)
    assert "8 hosts" not in other and "not reported" not in other and "2 hosts at 10 Gbit/s" in other
    assert "not measured yet" in script.elsewhere({}) and script.headline({}).count("| - |") >= 8


def test_what_passes_at_once_by_hand(tmp_path: Path) -> None:
    """Five buckets, two parts of a sharded exchange; no more than there is."""
    rows = list(report_fixtures.lab_rows())
    for row in rows:
        if row["method"] == "ours-sharded-int8":
            row["wire_sent"] = 1e6
    overview = experiment.load("lab_overview")
    found = {"scalability_analysis": table_of(rows, tmp_path, "scalability_analysis")}
    made = [line.split(" | ") for line in overview.unshaped(found).splitlines()]
    shown = {line[0].removeprefix("| "): line[1:] for line in made}
    for rate, bits in (("100 Mbit/s", 1e8), ("1 Gbit/s", 1e9)):
        burst = Shape.of(bits).burst
        line = shown[f"ours: sharded, int8, {rate}, whole"]
        assert line[1] == "10" and line[3] == f"{8e9 / bits:.1f}"
        assert line[4] == f"{8e3 * min(1e6, 10 * burst) / bits:.1f}"
        assert shown[f"ours: all-gather, int8, {rate}, whole"][1] == "5"
    assert "not measured yet" in overview.unshaped({})


def steps_of(found: Mapping[str, report.Table]) -> dict[tuple[int, float], dict[str, float]]:
    """Median steps of the whole runs: by hosts and rate, then by method."""
    rows = good(found["scalability_analysis"].rows)
    groups: dict[tuple[int, float], dict[str, list[dict[str, object]]]] = {}
    for row in rows:
        where = setting_of(row)
        groups.setdefault((where.hosts, where.rate_bits), {}).setdefault(row["method"], []).append(row)
    return {
        where: {name: median(mine, "step_ms") or 0.0 for name, mine in by.items()}
        for where, by in groups.items()
    }


def test_sentences_about_wins_and_losses_are_so() -> None:
    """Those of README, docs/results.md and docs/analysis.md that no command writes."""
    found = report.load(ROOT / "results")
    lost = []
    for where, step in steps_of(found).items():
        others = [ms for name, ms in step.items() if name in ("plain", "fp16") or name.startswith("powersgd")]
        lost += [
            (where, name)
            for name in ("ours-allgather-int8", "ours-sharded-int8")
            if step.get(name, 0.0) > min(others)
        ]
    assert lost == [((8, 1e8), "ours-allgather-int8")]
    step = steps_of(found)[8, 1e9]
    assert all(step[f"ours-powersgd-{rank}"] > step[f"powersgd-{rank}"] for rank in (1, 2, 4))
    slow = lines_of(lab_tables.slow_steps(found["scalability_analysis"]))
    own = {
        name.rstrip("¹"): float(cells[-1].split(" ")[0]) for name, cells in slow.items() if cells[-1] != "-"
    }
    assert own["ours: sharded, int8"] < own["torch PowerSGD, rank 1"] < own["ours: all-gather, int8"]


def test_sentences_about_the_map_and_the_trainings_are_so() -> None:
    found = report.load(ROOT / "results")
    alone = [row for row in found["cost_model_map"].rows if row["method"] == "ours-allgather-int8"]
    winning = {row["workers"] for row in alone if row["gain"] > 1}
    assert max(winning) < 512 and 512 in {row["workers"] for row in alone}
    errors = lines_of(tables.model_check(found["cost_model_check"]))["ours at 100 Mbit/s"]
    assert errors[-1].startswith("-30.") and "up to 30 % too fast" in (ROOT / "docs/results.md").read_text()
    with (ROOT / "results" / "lab_training.csv").open(newline="") as file:
        machines = {
            (row["dataset"], row["machine"]) for row in csv.DictReader(file) if row["model"] == "simple_cnn"
        }
        file.seek(0)
        resnet = {
            (float(row["ratio"]), int(row["epochs"])): row
            for row in csv.DictReader(file)
            if row["model"] == "resnet18"
        }
    accuracy, seconds = (
        {at: float(row[name]) for at, row in resnet.items()} for name in ("accuracy", "seconds")
    )
    assert max(accuracy[0.1, 6], accuracy[0.01, 6]) < accuracy[1.0, 6] <= accuracy[0.1, 12]
    assert 4.5 < seconds[1.0, 6] / seconds[0.1, 6] < 6 and seconds[0.1, 12] < seconds[1.0, 6] / 2
    assert len(machines) == 2  # a machine for each dataset, and not the same one
    assert len({machine for _, machine in machines}) == 2


def test_longer_trainings_have_no_part_in_how_many_times_faster(tmp_path: Path) -> None:
    faster = experiment.load("claim_figures").faster("mnist")
    rows = list(report_fixtures.training_rows(lab=True))
    sparse = next(row for row in rows if row["dataset"] == "mnist" and row["ratio"] != 1.0)
    told = faster(table_of(rows, tmp_path, "lab_training"))
    longer = [*rows, sparse | {"epochs": 99, "seconds": 1e6}]
    assert told and faster(table_of(longer, tmp_path, "lab_training")) == told
