"""Short versions of the long runs: the same programs with small numbers, and nothing about memory."""

from __future__ import annotations

import csv
import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import experiment
import pytest
from pool import Pool
from stress_jobs import close_at_once

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments"
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="Linux's /proc says what a process holds"
)


def run(folder: Path, script: str, *flags: str) -> str:
    command = [sys.executable, str(EXPERIMENTS / script), "--out", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_short_soak(tmp_path: Path) -> None:
    """Three lives, two kills: identical replicas, nothing lost, threads and descriptors constant."""
    numbers = "--minutes 0.11 --quiet 0 --between 2 3 --pace 0.005 --save-every 15 --rewrap-every 20"
    said = run(
        tmp_path, "soak.py", *numbers.split(), *"--overflow-every 3 --sample-seconds 0.2 --timeout 30".split()
    )
    assert said.endswith("PASS\n")
    verdicts = {row["check"]: row for row in read(tmp_path / "soak_summary.csv")}
    assert verdicts.pop("memory")["verdict"] == "not judged"  # seconds say nothing about a slope
    checks = ["lives", "training", "replicas", "conservation", "survivors", "errors in a step"]
    checks += ["threads left", "threads", "fds"]
    assert {name: row["verdict"] for name, row in verdicts.items()} == dict.fromkeys(checks, "PASS")
    assert "3 lives, 2 kills" in verdicts["lives"]["found"]
    assert verdicts["survivors"]["found"].startswith("6 of 6")
    samples = read(tmp_path / "soak.csv")
    held = {"time", "rank", "life", "step", "rss", "anonymous", "threads", "fds"}
    assert set(samples[0]) == held | {"date", "command", "commit", "machine"}
    assert {(row["life"], row["rank"]) for row in samples} == {(a, b) for a in "012" for b in "0123"}


def test_a_short_stress(tmp_path: Path) -> None:
    """Every way to end a synchroniser at least twice, and the worker thread alone."""
    said = run(tmp_path, "stress.py", "--rounds", "30", "--worker-rounds", "60")
    assert "PASS: " in said
    rows = read(tmp_path / "stress.csv")
    counts = Counter({row["check"]: int(row["rounds"]) for row in rows})
    assert counts.pop("all") == counts.total() == 90 and counts.pop("the worker thread alone") == 60
    assert len(counts) == 12 and min(counts.values()) >= 2


def test_the_page_has_the_tables_of_the_last_run() -> None:
    """And that run passed."""
    if not (ROOT / "results" / "soak_summary.csv").is_file():
        pytest.skip("`make soak` has not been run: there is no table to look for")
    tables, page = experiment.load("soak_tables"), (ROOT / "docs" / "soak.md").read_text()
    for table in (tables.soak(), tables.stress()):
        assert table in page and "FAIL" not in table and "PASS" in table


@pytest.mark.parametrize(("growth", "verdict"), [(0.0, "PASS"), (900.0, "PASS"), (1200.0, "FAIL")])
def test_memory_that_grows_is_noticed(growth: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kilobytes an hour, on top of what comes and goes; what a warm-up takes does not count."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    checks: Any = importlib.import_module("soak_checks")
    held = [200_000 + max(0, 300 - at) * -10 + growth * at / 3600 + (at % 7) * 20 for at in range(0, 1800, 5)]
    samples = [checks.Sample(5.0 * i, 0, 0, i, int(rss), int(rss), 8, 24) for i, rss in enumerate(held)]
    life = checks.Life(0, 1800)
    found = {row.check: row.verdict for row in checks.verdicts([life], samples, 360)}
    assert found["memory of rank 0 in life 0"] == verdict
    assert found["threads"] == found["fds"] == "PASS" and found["replicas"] == found["conservation"] == "FAIL"
    changed = [*samples, samples[-1]._replace(threads=9, fds=25)]
    found = {row.check: row.verdict for row in checks.verdicts([life], changed, 360)}
    assert found["threads"] == found["fds"] == "FAIL"


@pytest.mark.parametrize(
    ("doing", "sync", "verdict"),
    [("a step", True, "PASS"), ("a step", False, "FAIL"), ("DDP's forward", False, "PASS")],
)
def test_an_error_in_a_step_must_be_explained(
    doing: str, sync: bool, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A survivor that only has gloo's words to say, where ours belong, is a fault."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    checks: Any = importlib.import_module("soak_checks")
    told = {"kind": "RuntimeError", "doing": doing, "sync": sync, "threads": []}
    life = checks.Life(0, 1800, told=[told])
    samples = [checks.Sample(5.0 * i, 0, 0, i, 1, 1, 8, 24) for i in range(3)]
    found = {row.check: row.verdict for row in checks.verdicts([life], samples, 360)}
    assert found["errors in a step"] == verdict


def test_two_threads_close_at_once(pool: Pool) -> None:
    """The second one must not take the user's own groups down: for torch, no group means all of them."""
    assert pool.run(2, close_at_once) == [True, True]
