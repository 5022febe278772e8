"""The lab's worker: methods side by side, on real gloo processes."""

from __future__ import annotations

import csv
import ctypes
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import lab_jobs
import pytest
import torch
from pool import Pool

from compressed_ddp.lab import bench
from compressed_ddp.lab.emulate import EmulatedModel, GradientPool, model_shapes, scaled_shapes
from compressed_ddp.lab.measure import COLUMNS, Plan
from compressed_ddp.lab.methods import METHODS, pick
from compressed_ddp.lab.run import give_back
from compressed_ddp.lab.timeline import fill_buckets
from compressed_ddp.metrics import SocketMeter

WORLD = 3
RUNS_HERE = [name for name in METHODS if name not in ("none", "bf16")]


@pytest.fixture(scope="module")
def synchronised(pool: Pool) -> list[dict[str, list[torch.Tensor]]]:
    """Every rank's synchronised gradients of four steps, by method."""
    return pool.run(WORLD, lab_jobs.synchronise, RUNS_HERE, steps=4)


@pytest.mark.parametrize("name", RUNS_HERE)
def test_every_rank_gets_the_same_average(
    synchronised: list[dict[str, list[torch.Tensor]]], name: str
) -> None:
    """To the bit; and it has something to do with the true mean."""
    for step, gradient in enumerate(synchronised[0][name]):
        for other in synchronised[1:]:
            assert torch.equal(other[name][step], gradient), f"step {step}"
        true = torch.stack([lab_jobs.pool_of(rank).window(step) for rank in range(WORLD)]).mean(0)
        alike = torch.nn.functional.cosine_similarity(gradient, true, dim=0)
        assert alike > 0.1, f"step {step}"


@pytest.mark.parametrize(("name", "tolerance"), [("plain", 1e-6), ("fp16", 5e-3)])
def test_dense_methods_are_near_the_true_mean(
    synchronised: list[dict[str, list[torch.Tensor]]], name: str, tolerance: float
) -> None:
    for step, gradient in enumerate(synchronised[0][name]):
        true = torch.stack([lab_jobs.pool_of(rank).window(step) for rank in range(WORLD)]).mean(0)
        torch.testing.assert_close(gradient, true, rtol=tolerance, atol=tolerance)


def test_both_write_up_methods_say_the_same(synchronised: list[dict[str, list[torch.Tensor]]]) -> None:
    """They differ in how they travel alone."""
    ways = zip(synchronised[0]["writeup-sparse"], synchronised[0]["writeup-dense"], strict=True)
    for sparse, dense in ways:
        torch.testing.assert_close(sparse, dense)
        assert 0.04 < sparse.count_nonzero() / sparse.numel() < 0.05 * WORLD + 0.01


def test_write_up_keeps_what_it_did_not_send(
    synchronised: list[dict[str, list[torch.Tensor]]],
) -> None:
    """The steps after the buckets were laid out anew: most of what is sent had waited."""
    first, later = synchronised[0]["writeup-sparse"][1], synchronised[0]["writeup-sparse"][3]
    assert later.norm() > 1.1 * first.norm()


@pytest.fixture(scope="module")
def measured(pool: Pool) -> list[dict[str, Any]]:
    """What Bench found on every rank, without compute, in two repeats of a few methods."""
    methods = ("none", "plain", "bf16", "powersgd-1", "writeup-*", "ours-[as]*-int8")
    plan = {"elements": 200_000, "compute": 0.0, "steps": 2, "repeats": 2}
    return pool.run(WORLD, lab_jobs.bench, methods=methods, **plan)


def row_of(measured: list[dict[str, Any]], method: str) -> dict[str, Any]:
    return next(row for row in measured[0]["rows"] if row["method"] == method)


def test_rows_are_complete_and_alike(measured: list[dict[str, Any]]) -> None:
    rows = measured[0]["rows"]
    assert all(other["rows"] == rows for other in measured[1:])
    assert all(tuple(row) == COLUMNS for row in rows)
    good = [row for row in rows if not row["failed"]]
    assert {row["method"] for row in rows} - {row["method"] for row in good} == {"bf16"}
    for row in good:
        assert row["hosts"] == WORLD and abs(row["elements"] - 200_000) < 2_000
        assert row["step_ms"] > 0 and row["cpu_ms"] > 0
        ours = row["method"].startswith("ours")
        assert (row["select_ms"] is not None) == (row["kernels"] is not None) == ours
        assert (row["ratio"] is None) == (not ours and not row["method"].startswith("writeup"))
        assert row["buckets"] == (1 if row["method"] == "powersgd-1" else 4)
    assert "one bucket" in row_of(measured, "powersgd-1")["note"]


def test_order_goes_there_and_back(measured: list[dict[str, Any]]) -> None:
    order = {
        n: [row["method"] for row in measured[0]["rows"] if row["repeat"] == n and not row["failed"]]
        for n in (1, 2)
    }
    assert order[2] == order[1][::-1] and len(order[1]) == 7


def test_a_method_that_torch_refuses_is_reported_once(measured: list[dict[str, Any]]) -> None:
    rows = [row for row in measured[0]["rows"] if row["method"] == "bf16"]
    if not rows[0]["failed"]:
        pytest.skip("this torch runs its bf16 hook on CPUs")
    assert len(rows) == 1 and "BF16" in rows[0]["failed"] and rows[0]["step_ms"] is None


def test_announced_before_and_after_on_rank_0(measured: list[dict[str, Any]]) -> None:
    events, good = measured[0]["events"], [row for row in measured[0]["rows"] if not row["failed"]]
    expected = [(event, row["method"], row["repeat"], 2) for row in good for event in ("begin", "end")]
    assert [(e["event"], e["method"], e["repeat"], e["steps"]) for e in events] == expected
    assert all(other["events"] == [] for other in measured[1:])


@pytest.mark.skipif(SocketMeter().source is None, reason="no counts of sockets on this system")
def test_bytes_on_sockets(measured: list[dict[str, Any]]) -> None:
    """Received ones: a busy machine may send some twice."""
    good = [row for row in measured[0]["rows"] if not row["failed"]]
    moved, elements = {row["method"]: row["socket_received"] for row in good}, good[0]["elements"]
    assert moved["none"] < 2_000
    ring = 2 * (WORLD - 1) / WORLD * 4 * elements
    assert moved["plain"] == pytest.approx(ring, rel=0.02)
    assert moved["writeup-dense"] == pytest.approx(moved["plain"], rel=0.01), "it saves nothing"
    # gloo's own words are some 500 bytes for each bucket.
    entries = 12 * 0.01 * elements * (WORLD - 1)
    assert entries < moved["writeup-sparse"] < 1.08 * entries
    for name in ("ours-allgather-int8", "ours-sharded-int8"):
        assert moved[name] < 0.015 * moved["plain"] and moved[name] < 0.25 * moved["writeup-sparse"]
    # Ranks do not look at the same instant: words of the last barrier may be on their way.
    assert all(row["socket_sent"] > row["socket_received"] - 500 for row in good)


def test_a_failure_on_one_rank_ends_the_method_and_nothing_else(pool: Pool) -> None:
    plan = {"elements": 20_000, "compute": 0.0, "steps": 1, "repeats": 2, "timeout": 60.0}
    ranks = pool.run(WORLD, lab_jobs.bench_with_broken_methods, methods=("all",), **plan)
    rows = ranks[0]["rows"]
    assert all(rank["rows"] == rows for rank in ranks)
    failed = {row["method"]: row["failed"] for row in rows if row["failed"]}
    assert failed["breaks-at-once"] == "ValueError: not on rank 1"
    assert "rank 1 had enough" in failed["breaks-in-a-step"]
    assert [row["method"] for row in rows if not row["failed"]] == ["none", "plain", "plain", "none"]


def test_buckets_come_one_after_the_other_and_none_before_its_time(pool: Pool) -> None:
    (found,) = pool.run(1, lab_jobs.watch_buckets, compute=0.4)
    expected = fill_buckets(lab_jobs.shapes(), lab_jobs.BUCKET_MB * 2**20, 0.4)
    assert len(expected) >= 3
    assert [(index, size) for index, size, _ in found] == list(enumerate(each.elements for each in expected))
    for (_, _, seen), bucket in zip(found, expected, strict=True):
        # A floor that holds on any machine: `seen` counts from before the pass, the pass sleeps until a
        # layer is due, and time.sleep never returns early. How late it is, nobody asks.
        assert seen >= bucket.ready


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None) if os.name == "posix" else None, "malloc_trim"), reason="glibc's"
)
def test_free_memory_goes_back_to_the_system() -> None:
    """In small pieces, with something above them in the heap: free() alone keeps their pages."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    held = [torch.empty(16_000, dtype=torch.uint8).fill_(1) for _ in range(4_000)]
    full, roof = resident(), torch.empty(16_000, dtype=torch.uint8)
    held.clear()
    give_back()
    assert full - resident() > 4_000 * 16_000 // 2 and roof.numel()


def test_shapes() -> None:
    full = model_shapes("resnet50")
    assert sum(shape.numel() for shape in full) == 25_557_032
    tenth = scaled_shapes(full, 2_555_703)
    assert len(tenth) == len(full)
    assert abs(sum(shape.numel() for shape in tenth) - 2_555_703) < 0.002 * 2_555_703
    vectors = [sum(s.numel() for s in shapes if len(s) < 2) for shapes in (full, tenth)]
    assert vectors[1] == pytest.approx(vectors[0] / 10, rel=0.05)
    with pytest.raises(ValueError, match="100 elements are too few for 161 tensors"):
        scaled_shapes(full, 100)
    with pytest.raises(ValueError, match="did you mean 'resnet50'"):
        model_shapes("resnet51")


def test_gradients_differ_from_step_to_step_and_from_rank_to_rank() -> None:
    mine, theirs = GradientPool(1000, seed=0), GradientPool(1000, seed=1)
    assert not torch.equal(mine.window(0), theirs.window(0))
    assert not torch.equal(mine.window(0), mine.window(1))
    assert torch.equal(mine.window(0), GradientPool(1000, seed=0).window(0))
    with pytest.raises(ValueError, match="does not fit 7 elements"):
        EmulatedModel([torch.Size([7])], mine, 0.0)


def test_names_and_patterns() -> None:
    assert pick(["ours-sharded-int8", "plain"]) == ["plain", "ours-sharded-int8"]
    assert pick(["powersgd-*"]) == ["powersgd-1", "powersgd-2", "powersgd-4"]
    assert pick(["all"]) == list(METHODS)
    with pytest.raises(ValueError, match="unknown method 'plane'; did you mean 'plain'"):
        pick(["plane"])
    with pytest.raises(ValueError, match="no method was named"):
        pick([])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"warm_up": 2}, "warm_up must be at least 3, got 2"),
        ({"timeout": 0.0}, "timeout must be positive and at most 1,000,000, got 0.0"),
        ({"ratio": 0.0}, r"ratio must be in \(0, 1\], got 0.0"),
        ({"compute": float("inf")}, "got inf"),
        ({"elements": 0}, "elements must be at least 1, got 0"),
        ({"compute": -1.0}, "compute must be 0 to 1,000,000 seconds, got -1.0"),
    ],
)
def test_plans_that_make_no_sense(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**setting)


def test_durations() -> None:
    assert (bench.duration("50ms"), bench.duration("0.5s"), bench.duration("0ms")) == (0.05, 0.5, 0.0)
    for wrong in ("50", "ms", "-1s", "nans", "1h"):
        with pytest.raises(bench.argparse.ArgumentTypeError, match="write 50ms"):
            bench.duration(wrong)


def test_flags_of_a_plan_make_it_again() -> None:
    plan = Plan(("none", "ours-sharded-int8"), "gpt", 5_000, 0.003, 0.0123, 2, 4, 3, 1.5, 7, 9.5, 2.5)
    assert bench.parse(bench.arguments_for(plan))[1] == plan
    assert bench.parse(bench.arguments_for(Plan()))[1] == Plan()


def test_without_a_place_it_says_how_to_start_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert bench.main(["--methods", "plain"]) == 2
    assert "RANK" in capsys.readouterr().err
    for arguments, message in ((["--ack"], "--announce"), (["--methods", "x"], "unknown method 'x'")):
        with pytest.raises(SystemExit):
            bench.main(arguments)
        assert message in capsys.readouterr().err


def test_the_program_and_its_announcements(tmp_path: Path) -> None:
    """Two processes, as a lab starts them; each announcement waits to be answered."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    out = tmp_path / "rows.csv"
    command = [sys.executable, "-m", "compressed_ddp.lab.bench", "--methods", "none,plain", "--repeats", "1"]
    command += ["--model", "simple_cnn", "--compute", "10ms", "--steps", "2", "--out", str(out)]
    command += ["--announce", "-", "--ack"]
    ranks = []
    for rank in range(2):
        environment = {**os.environ, **place, "RANK": str(rank)}
        if sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    try:
        events = []
        for _ in range(4):
            events.append(json.loads(ranks[0].stdout.readline()))
            assert all(process.poll() is None for process in ranks)
            print("go on", file=ranks[0].stdin, flush=True)
        errors = [process.communicate(timeout=60)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], errors
    assert [(event["event"], event["method"]) for event in events] == [
        *(("begin", "none"), ("end", "none"), ("begin", "plain"), ("end", "plain"))
    ]
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["none", "plain"]
    assert float(rows[1]["compute_ms"]) == 10
    assert float(rows[1]["step_ms"]) >= 10  # a step sleeps that long, and no sleep returns early
    assert "plain" in errors[0] and "plain" not in errors[1]
