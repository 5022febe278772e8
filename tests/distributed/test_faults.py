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
        left, ours = record["left"], record["may_be_left"]
        assert left["threads"] <= ours and left["tasks"] <= ours and left["sockets"] <= 0, record
        assert ours == (0 if record["rank"] == 0 or phase == "checkpoint write" else 1)


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


def test_what_goes_wrong_after_a_failure_hides_nothing(pool: Pool) -> None:
    """Nobody can be called and no group destroyed: backward still ends, with the first error."""
    _, (said, later) = pool.run(2, jobs.clean_up_fails)
    assert "no" in said.split()  # torch's words around it differ
    assert "synchronisation failed in an earlier step: no" in later


@pytest.mark.parametrize("way", ["allgather", "sharded"])
def test_a_bad_message_names_its_sender(pool: Pool, way: str) -> None:
    """Who cannot read it does not seem to be the culprit, neither here nor there."""
    for rank, (text, ranks) in enumerate(pool.run(3, jobs.bad_message, way)):
        assert ranks == [2], text
        if way == "allgather" or rank == 0:
            assert f"decode failed on rank {rank}: message from rank 2 is damaged" in text
            assert text.endswith("(rank 2 sent it)")
        else:
            assert "rank 2 is the sender of a message that another rank cannot read" in text


@pytest.mark.parametrize("what", ["drift", "error", "gradient"])
def test_what_fails_before_the_first_bucket(pool: Pool, what: str) -> None:
    """The group is closed there too, and who failed alone says so: nobody waits for a time-out."""
    first, second, third = pool.run(3, jobs.guard_fails, what)
    assert first[2] and second[2] and third[2], "a group was left open"
    if what == "drift":
        assert all("parameter 'bias' of rank 1 is not that of rank 0" in each[0] for each in (first, second))
        return
    found = {"error": "ZeroDivisionError: ", "gradient": "TypeError: parameter 'bias': "}[what]
    assert second[0].startswith(found)
    for text, ranks, _ in (first, third):
        assert "rank 1 is out of step by an error of its own" in text and ranks == [1]


def test_a_gradient_that_is_unfit_at_first(pool: Pool) -> None:
    first, second = pool.run(2, jobs.unfit_at_first)
    assert second.startswith("TypeError: parameter 'bias': ")
    assert first.startswith("SyncError: rank 1 cannot take part: parameter 'bias': ")


def test_a_bucket_that_is_unfit(pool: Pool) -> None:
    first, second, third = pool.run(3, jobs.unfit_bucket)
    assert second == ("TypeError: unfit", [])
    for text, ranks in (first, third):
        assert "rank 1 is out of step by an error of its own" in text and ranks == [1]


@pytest.mark.parametrize("what", ["differs", "forgotten", "local", "masking"])
def test_no_socket_is_left(pool: Pool, what: str) -> None:
    """By a synchroniser that could not start, or that was forgotten without a close."""
    assert max(pool.run(2, jobs.sockets_left, what)) <= 0


@pytest.mark.parametrize(
    ("what", "told", "ranks"),
    [
        ("differs", "rank 2 differs from rank 1 in config.ratio: 0.2, not 0.1", []),
        ("unreadable", "(rank 2, 1 of its group, sent it)", [2]),
        ("fails", "all-gather failed on rank 1 of 3: rank 2 is out of step by an error of its own", [2]),
    ],
)
def test_a_part_of_the_job_is_told_the_jobs_ranks(pool: Pool, what: str, told: str, ranks: list[int]) -> None:
    """Ranks 1 and 2 are 0 and 1 to their group. Nobody may hear of rank 1's fault, least of all rank 1."""
    said, blamed = pool.run(3, jobs.part_of_the_job, what)[1]
    assert told in said and blamed == ranks


def test_frozen_weights_that_drift_apart(pool: Pool) -> None:
    for said in pool.run(2, jobs.frozen_drift):
        assert "at step 2 parameter '0.weight' of rank 1 is not that of rank 0" in said


def test_a_straggler_is_named_by_rank_0(pool: Pool) -> None:
    """Rank 1 sleeps in every step: the ledger of every rank shows who waits, and rank 0 warns."""
    said, *others = pool.run(3, jobs.straggling)
    assert all(not warned for warned, _ in others)
    warned, waits = said
    assert warned and all(text.startswith("rank 1 is a straggler: the others wait") for text in warned)
    assert min(waits) == waits[1]
    assert all(seen == waits for _, seen in others)
