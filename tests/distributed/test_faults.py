"""The fault matrix: a worker is killed, stopped, cut off or loses its connections, in every phase.

experiments/faults.py has the workers and the faults; experiments/fault_matrix.py measures the same cells.
"""

from __future__ import annotations

import sys
from typing import Any

import experiment
import fault_jobs as jobs
import pytest
from pool import Pool

from compressed_ddp.lab import missing

if sys.platform != "linux":
    pytest.skip("forks, /proc and signals as Linux has them", allow_module_level=True)

faults = experiment.load("faults")
Records = dict[tuple[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def records() -> Records:
    """Every cell, several at a time: most of it is waiting for time-outs."""
    found: Records = {}
    for record in faults.run(faults.cells(), timeout=4.0, together=6):
        found.setdefault((record["phase"], record["fault"]), []).append(record)
    return found


# Where the others are stuck when the victim stops in a phase: what they must name.
STUCK = {
    "select": ("all-to-all", 1),
    "all-to-all": ("all-to-all", 1),
    "all-gather": ("all-gather", 1),
    "decode": ("all-to-all", 1),
    "checkpoint write": ("writing a checkpoint", None),
}


@pytest.mark.parametrize("fault", faults.FAULTS)
@pytest.mark.parametrize("phase", faults.PHASES)
def test_survivors_say_what_happened(records: Records, phase: str, fault: str) -> None:
    """Each raises a SyncError that names phase, bucket and rank, has lost nothing, and ends by itself."""
    if fault == "cut" and missing():
        pytest.skip(f"a link to cut: {missing()}")
    ranks = records[phase, fault]
    assert [record["rank"] for record in ranks] == [0, 1, 2]
    victim = ranks[faults.VICTIM]
    alive = ranks if fault in ("cut", "close") else ranks[: faults.VICTIM]
    if victim not in alive:
        assert victim["code"] == -9 and "error" not in victim
    for record in alive:
        assert record["code"] == faults.RAISED, record
        assert record["error"] == "SyncError", record
        assert (record["told"], record["bucket"]) == STUCK[phase]
        assert record["told"] in record["text"]
        assert record["intact"], "a residual, or the last complete checkpoint, has changed"
        if phase != "checkpoint write":
            assert record["moved"] and record["quoted"]
            assert "step 3, bucket 1 ('0.bias' and 1 more)" in record["text"]
        if fault == "close":  # all are alive; at most the victim notices late
            assert set(record["ranks"]) <= {faults.VICTIM}
        else:
            assert record["ranks"] == ([0, 1] if record is victim else [faults.VICTIM])
        if record["ranks"] == [faults.VICTIM]:
            assert f"rank 2 is {'gone' if fault == 'kill' else 'silent'}" in record["text"]
    if phase != "checkpoint write":
        left = ranks[0]["left"]
        assert left["threads"] == left["tasks"] == 0 and left["sockets"] <= 0


def test_the_page_has_what_its_command_makes() -> None:
    script = experiment.load("fault_matrix")
    rows = script.read(script.ROOT / "results" / "fault_matrix.csv")
    assert {row["error"] for row in rows} == {"SyncError"}
    assert script.table(rows) in (script.ROOT / "docs" / "reliability.md").read_text()


@pytest.mark.parametrize("way", ["attach", "backend"])
def test_whose_own_fault_it_was(pool: Pool, way: str) -> None:
    """A rank that fails by itself says so to the others, which need not guess."""
    first, second, third = pool.run(3, jobs.own_fault, way)
    assert second == ("ArithmeticError: no", [])
    for text, ranks in (first, third):
        assert "rank 1 is out of step by an error of its own" in text and ranks == [1]


def test_a_straggler_is_named_by_rank_0(pool: Pool) -> None:
    """Rank 1 sleeps in every step: the ledger of every rank shows who waits, and rank 0 warns."""
    said, *others = pool.run(3, jobs.straggling)
    assert all(not warned for warned, _ in others)
    warned, waits = said
    assert warned and all(text.startswith("rank 1 is a straggler: the others wait") for text in warned)
    assert min(waits) == waits[1]
    assert all(seen == waits for _, seen in others)
