"""The benchmark of trainings: its plan, its rows, going on, and a run that diverges."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import experiment
import pytest
import tiny_data

from compressed_ddp.lab import Figure, Loopback, missing
from compressed_ddp.report import SOURCES, read_table

SUMMARY = {
    **{"model": "simple_cnn", "workers": 4, "seconds": 7.0, "steps": 9, "parameters": 10, "method": "Top-K"},
    **{"test_accuracy": 97.0, "test_loss": 0.1, "socket_sent": 1000, "payload_sent": 900, "dense_ring": 9000},
    "history": [{"seconds": 3.0, "test_accuracy": 90.0}, {"seconds": 7.0, "test_accuracy": 97.0}],
}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The experiment with a training that takes no time; ``asked`` has what was trained."""
    module: Any = experiment.load("benchmark_training")
    module.asked = []

    def train(run: Any, task: Any, data_dir: Path, more: Any, start: Any) -> dict[str, Any]:
        module.asked.append((run, {**task.flags, **more}))
        if run.ratio == 0.001:
            raise SystemExit("compressed-ddp: the loss is nan at step 3: lower --lr\n")
        best = run.purpose == "tune" and run.lr == 0.1
        return SUMMARY | {"model": task.flags["model"], "test_accuracy": 98.5 if best else 97.0}

    monkeypatch.setattr(module, "train", train)
    return module


def test_rates_are_chosen_and_ratios_compared(script: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    script.main(["--out", str(out), "--datasets", "mnist", "--target", "95"])
    rows = rows_of(out)
    assert list(rows[0]) == list(script.COLUMNS)
    assert [(r["purpose"], float(r["lr"])) for r in rows[:4]] == [("tune", lr) for lr in script.RATES]
    tests = rows[4:]
    assert [(float(r["ratio"]), r["seed"]) for r in tests] == [
        (ratio, str(seed)) for seed in (0, 1, 2) for ratio in (1.0, 0.1, 0.01, 0.001)
    ]
    assert {r["lr"] for r in tests} == {"0.1"}
    for row in tests:
        if row["ratio"] == "0.001":
            assert "the loss is nan" in row["failed"] and row["accuracy"] == ""
        else:
            assert (row["accuracy"], row["sent"], row["dense_bytes"]) == ("97.0", "1000", "9000")
            assert (row["first_to"], row["target"], row["failed"]) == ("7.0", "95.0", "")
    read_table(SOURCES["benchmark_training"], out)


def test_it_goes_on_where_it_was_stopped(script: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    common = ["--out", str(out), "--datasets", "cifar10", "--lr", "0.05", "--seeds", "0"]
    script.main([*common, "--ratios", "1,0.1"])
    assert len(script.asked) == 2
    script.main([*common, "--ratios", "1,0.1,0.01"])
    assert [run.ratio for run, _ in script.asked] == [1.0, 0.1, 0.01]
    script.main([*common, "--ratios", "1", "--epochs", "2", "--limit", "7", "--model", "resnet18"])
    _, flags = script.asked[-1]
    assert (flags["epochs"], flags["limit"], flags["model"]) == (2, 7, "resnet18")
    assert len(rows_of(out)) == 4


def test_other_failures_are_not_hidden(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: Any) -> None:
        raise SystemExit("no MNIST files")

    monkeypatch.setattr(script, "train", train)
    with pytest.raises(SystemExit, match="no MNIST files"):
        script.main(["--out", str(tmp_path / "out.csv"), "--datasets", "mnist"])
    with pytest.raises(SystemExit):
        script.main(["--lab", "4 hosts"])


class Shaped(Loopback):
    """A lab without root: nothing holds its rate."""

    def __init__(self, hosts: int, rate: str) -> None:
        super().__init__(hosts)
        self.rate = 1e8


DIVERGES = """
import os, sys, time
if os.environ["RANK"] == "{rank}":
    print("compressed-ddp: {words}", file=sys.stderr, flush=True)
    sys.exit(1)
time.sleep(60)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_diverges_on_a_lab_gets_a_row(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Whichever rank notices first."""
    program = DIVERGES.replace("{rank}", str(rank))

    def train(run: Any, task: Any, data_dir: Path, more: Any, start: Any) -> dict[str, Any]:
        if run.ratio == 1.0:
            return SUMMARY
        said = "the loss is nan at step 3: lower --lr" if run.ratio == 0.1 else "no MNIST files"
        start([sys.executable, "-I", "-S", "-c", program.replace("{words}", said)])
        raise AssertionError("it ended well")

    monkeypatch.setattr(script, "train", train)
    monkeypatch.setattr("compressed_ddp.lab.Lab", Shaped)
    monkeypatch.setattr("compressed_ddp.lab.check", lambda network: [Figure(0, "", 95e6, 94e6)])
    out = tmp_path / "out.csv"
    flags = ["--lab", "2,100mbit", "--datasets", "mnist", "--lr", "0.1", "--seeds", "0", "--out", str(out)]
    script.main([*flags, "--ratios", "1,0.1"])
    dense, sparse = rows_of(out)
    assert dense["failed"] == "" and dense["accuracy"] == "97.0"
    assert sparse["failed"] == "compressed-ddp: the loss is nan at step 3: lower --lr"
    assert (sparse["hosts"], sparse["rate"], sparse["accuracy"]) == ("2", "100mbit", "")
    with pytest.raises(SystemExit, match="no MNIST files"):
        script.main([*flags, "--ratios", "0.01"])


def test_a_real_one(tmp_path: Path) -> None:
    """On a lab, or on this machine where there can be none."""
    lab = missing() is None
    tiny_data.write(tmp_path / "data")
    out = tmp_path / "out.csv"
    small = ["--datasets", "mnist", "--lr", "0.01", "--seeds", "0", "--epochs", "1", "--ratios", "0.1"]
    where = ["--lab", "2,100mbit", "--no-check"] if lab else ["--workers", "2"]
    files = ["--data-dir", str(tmp_path / "data"), "--out", str(out)]
    experiment.load("benchmark_training").main([*small, *where, *files])
    (row,) = rows_of(out)
    assert (row["workers"], row["steps"], row["model"]) == ("2", "1", "simple_cnn")
    assert 0 < int(row["sent"]) and 0 < int(row["dense_bytes"])
    assert str(tmp_path / "data") not in row["command"]
    if lab:
        assert (row["hosts"], row["rate"]) == ("2", "100mbit") and float(row["link_share"]) > 0
    read_table(SOURCES["lab_training" if lab else "benchmark_training"], out)
