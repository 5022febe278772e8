"""Comparing methods on a network: rows, the table, and what is computed from them."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compressed_ddp.cli import main
from compressed_ddp.lab import Counters, Loopback, missing
from compressed_ddp.lab import session as sessions
from compressed_ddp.lab.measure import SEEDS, Plan
from compressed_ddp.lab.methods import METHODS
from compressed_ddp.lab.selftest import Figure
from compressed_ddp.lab.shaping import parse_rate, rate_code
from compressed_ddp.lab.summary import own_cores, summarise, table
from compressed_ddp.lab.timeline import Bucket, buckets_of, fill_buckets, step_seconds

LACKING = missing()
TINY = ["--elements=20000", "--steps=2", "--repeats=2", "--compute=5ms"]
METHODS_HERE = "none,plain,bf16,ours-sharded-int8"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def lines_of(printed: str) -> dict[str, list[str]]:
    """The cells of each method."""
    return {line.split()[0]: line.split() for line in printed.splitlines() if line.split()[:1]}


@pytest.mark.skipif(LACKING is not None, reason=f"no network lab: {LACKING}")
def test_methods_side_by_side_in_a_lab(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether this machine is quiet enough now is not what is tested.
    monkeypatch.setattr("compressed_ddp.lab.selftest.LEAST", 0.0)
    out = tmp_path / "rows.csv"
    flags = ["--hosts=3", "--rate=100mbit", f"--methods={METHODS_HERE}", f"--out={out}", *TINY]
    assert main(["lab", "run", *flags, "--elements=200000"]) == 0
    printed = capfd.readouterr()
    assert "EMULATED" in printed.err and "every link holds it" in printed.err
    assert "[7/7] none, repeat 2" in printed.err, "a method that failed is not tried again"
    assert "at the interface" in printed.out and "COMPUTED" in printed.out
    rows = rows_of(out)
    assert tuple(rows[0]) == sessions.COLUMNS
    assert [row["method"] for row in rows] == [
        *("none", "plain", "bf16", "ours-sharded-int8"),
        *("ours-sharded-int8", "plain", "none"),
    ]
    for row in rows:
        assert (row["hosts"], row["rate"], float(row["rate_bits"])) == ("3", "100mbit", 100e6)
        assert row["model"] == "resnet50" and float(row["link_share"]) > 0
    good = {row["method"]: row for row in rows if not row["failed"]}
    assert set(good) == {"none", "plain", "ours-sharded-int8"}
    ring = 2 * 2 / 3 * 4 * float(good["plain"]["elements"])
    headers = 1 + 66 / 1448
    sent, received = (float(good["plain"][f"wire_{way}"]) for way in ("sent", "received"))
    for crossed in (sent, received):  # a busy machine sends some of it again
        assert headers * ring < crossed < 1.3 * ring
    assert float(good["plain"]["frames_sent"]) > ring / 1448
    assert float(good["plain"]["socket_sent"]) < sent
    assert float(good["none"]["wire_sent"]) < 0.01 * sent
    assert float(good["ours-sharded-int8"]["wire_sent"]) < 0.03 * sent
    lines = lines_of(printed.out)
    assert lines["plain"][3:5] == ["1.00", f"{float(lines['plain'][4]):.1f}"]
    assert "|" in lines["plain"] and lines["plain"][-1] == "1.00"


def test_methods_side_by_side_on_loopback(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    flags = ["--hosts=2", "--loopback", f"--methods={METHODS_HERE}", f"--out={out}", *TINY]
    assert main(["lab", "run", *flags, "--repeats=1"]) == 0
    printed = capfd.readouterr()
    assert "without shaping" in printed.err and "2 hosts share" in printed.err
    assert "COMPUTED" not in printed.out and "at the interface" not in printed.out
    rows = rows_of(out)
    assert [row["method"] for row in rows] == METHODS_HERE.split(",")
    assert all(row["rate"] == row["wire_sent"] == "" for row in rows)


def test_options_of_a_comparison_are_not_for_a_program(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--hosts=2", "--warm-up=4", "--", "true"], "--warm-up is about comparing methods"),
        (["--hosts=2", "--out=x.csv", "--", "true"], "--out is about comparing methods"),
        (["--hosts=2", "--methods=plane"], "did you mean 'plain'"),
        (["--hosts=2", "--warm-up=1"], "warm_up must be at least 3"),
    ):
        assert main(["lab", "run", "--loopback", *arguments]) == 2
        assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        *(("--elements=0", "elements must be at least 1, got 0"), ("--elements=-5", "got -5")),
        *(("--elements=100", "100 elements are too few for 161 tensors"), ("--timeout=inf", "got inf")),
        *(("--timeout=nan", "got nan"), ("--bucket-mb=inf", "bucket_mb must be positive and at most")),
        *(("--block-seconds=inf", "block_seconds"), (f"--seed={1 << 70}", f"got {1 << 70}")),
        *((f"--seed={-(1 << 53)}", "seed must be less"), ("--out=no/such/folder/rows.csv", "no/such/folder")),
        ("--out=.", "cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_built(
    flag: str, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(options: object) -> None:
        raise AssertionError("a network is built")

    monkeypatch.setattr("compressed_ddp.lab.cli._network", built)
    assert main(["lab", "run", "--hosts=2", "--loopback", flag]) == 2
    printed = capfd.readouterr()
    assert said in printed.err and "Traceback" not in printed.err and printed.out == ""


def test_the_largest_seeds_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (SEEDS - 1, 1 - SEEDS):
        assert Plan(seed=seed).seed == seed
        torch.Generator().manual_seed(1000 * seed + (249 if seed > 0 else 0))


def test_if_no_method_ran_the_exit_status_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--hosts=2", "--loopback", *TINY, "--repeats=1"]
    assert main(["lab", "run", *flags, "--methods=bf16"]) == 1, "gloo has no bf16 for torch's hook"
    printed = capfd.readouterr()
    assert "bf16" in printed.out and "failed: " in printed.out and "repeats" not in printed.out
    assert "no method ran" in printed.err


def test_fewer_steps_where_they_take_long() -> None:
    """A thousand steps are asked for, and time for two at most."""
    plan = Plan(("plain",), elements=1000, compute=0.1, steps=1000, repeats=1, block_seconds=0.25)
    with Loopback(2) as network:
        (row,) = sessions.measure(network, plan)
    # Floors that hold on any machine: a step sleeps 0.1 s and no sleep returns early; three never fit 0.25 s.
    assert row["steps"] in (1, 2) and row["step_ms"] >= 100
    with pytest.raises(ValueError, match="block_seconds must be positive and at most 1,000,000, got 0"):
        Plan(block_seconds=0)


def test_rows_that_were_told_hold_when_a_process_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def launch(network: object, command: list[str], env: object, *, listen: Any) -> None:
        assert command[0] == sys.executable and "--ack" in command
        assert listen('{"event": "begin", "method": "plain", "repeat": 1, "steps": 2}') == "go on"
        assert listen('{"event": "end", "method": "plain", "repeat": 1, "steps": 2}') == "go on"
        assert listen('{"method": "plain", "step_ms": 5.0, "failed": null}') is None
        assert listen("not for us") is None
        raise RuntimeError("rank 1 died")

    monkeypatch.setattr(sessions, "launch", launch)
    with pytest.raises(RuntimeError, match="rank 1 died"):
        sessions.measure(Loopback(2), Plan(), None, told.append)
    assert [(row["method"], row["hosts"], row["step_ms"], row["wire_sent"]) for row in told] == [
        ("plain", 2, 5.0, None)
    ]


def test_bytes_a_step_and_host() -> None:
    passed = [Counters(0, 0, 0, 0, 600, 6, 1200, 12), Counters(0, 0, 0, 0, 1000, 10, 400, 4)]
    found = sessions.per_step(passed, steps=2)
    assert found == pytest.approx({"wire_sent": 400, "wire_received": 400, "frames_sent": 4})


def test_the_weakest_link_counts() -> None:
    figures = [Figure(0, "", 95e6, 94e6), Figure(1, "", 93e6, 90e6)]
    assert sessions.link_share(figures, 100e6) == 0.9


@pytest.mark.parametrize("code", ["100mbit", "1gbit", "2.5gbit", "10gbit", "1.5mbit"])
def test_rates_there_and_back(code: str) -> None:
    assert rate_code(parse_rate(code)) == code
    assert rate_code(500e3) == "500kbit"


# When a step ends.


def test_buckets_fill_from_the_last_layer() -> None:
    shapes = [torch.Size(shape) for shape in ((10, 10), (10,), (30, 10), (5, 2))]
    # Three layers of 110, 300 and 10 elements; a bucket of 1200 bytes is full after the second.
    assert fill_buckets(shapes, 1200, 0.3) == [Bucket(310, pytest.approx(0.2)), Bucket(110, 0.3)]
    assert fill_buckets(shapes, 4, 0.3)[0] == Bucket(10, pytest.approx(0.1))
    whole = buckets_of("resnet50", None, 25.0, 0.05)
    assert len(whole) == 4 and sum(bucket.elements for bucket in whole) == 25_557_032
    assert whole[-1].ready == 0.05 and sorted(whole, key=lambda bucket: bucket.ready) == whole
    scaled = buckets_of("resnet50", 255_570, 25.0, 0.05)
    assert len(scaled) == 4 and sum(bucket.elements for bucket in scaled) == pytest.approx(255_570, rel=0.01)
    assert buckets_of("resnet50", None, 25.0, 0.05, one=True) == [Bucket(25_557_032, 0.05)]


def test_a_bucket_waits_for_backward_and_for_the_one_before() -> None:
    buckets = [Bucket(1, 0.1), Bucket(1, 0.2), Bucket(1, 0.9)]
    assert step_seconds(buckets, [0.3, 0.1, 0.2]) == pytest.approx(1.1)  # idle before the last
    assert step_seconds(buckets, [0.5, 0.5, 0.2]) == pytest.approx(1.3)  # 0.6, 1.1, 1.3


def test_own_cores_by_hand() -> None:
    """8 Mbit/s: 1 MB is a second. CPU: 0.2 s, of which 1 MB at 0.1 us a byte is 0.1 s for moving."""
    buckets = [Bucket(75, 0.0), Bucket(25, 0.05)]
    rounds = 5e-5 * METHODS["plain"].rounds(3)
    assert rounds == pytest.approx(2e-4)
    found = own_cores(3, "plain", 0.2, 1e6, 8e6, buckets, 1e-7)
    assert found == pytest.approx(0.1 + 1.0 + 2 * rounds)
    # Where moving bytes takes longer than the wire, it counts instead: 0.1 s against 0.01 s.
    found = own_cores(3, "plain", 0.2, 1e6, 8e8, buckets, 1e-7)
    assert found == pytest.approx(0.1 + 0.1 + 2 * rounds)
    # The last bucket is ready late: half of the CPU after it, which is more than its quarter.
    late = [Bucket(75, 0.0), Bucket(25, 5.0)]
    assert own_cores(3, "plain", 0.2, 1e6, 8e6, late, 1e-7) == pytest.approx(5 + 0.05 + 0.25 + rounds)


@pytest.mark.parametrize(
    ("method", "rounds"),
    [
        *(("none", 0), ("plain", 14), ("writeup-dense", 14), ("writeup-sparse", 7)),
        *(("ours-allgather-int8", 1), ("ours-sharded-int4", 2), ("powersgd-2", 42), ("ours-powersgd-2", 28)),
    ],
)
def test_rounds_of_eight_hosts(method: str, rounds: int) -> None:
    assert METHODS[method].rounds(8) == rounds


def row(method: str, ms: float, cpu: float, sent: float | None, **more: Any) -> dict[str, Any]:
    made = dict.fromkeys(sessions.COLUMNS) | {"method": method, "hosts": 2, "compute_ms": 50.0}
    return made | {"step_ms": ms, "cpu_ms": cpu, "wire_sent": sent} | more


ROWS = [
    *(row("none", 50.0, 4.0, 1e3), row("plain", 200.0, 14.0, 10e6), row("plain", 400.0, 14.0, 10e6)),
    *(row("ours-sharded-int8", 60.0, 7.0, 1e5), row("bf16", 0, 0, None, failed="not here")),
]


def test_the_table_by_hand() -> None:
    plan = Plan(compute=0.05)
    lines = lines_of(table(ROWS, plan, rate=1e9))
    plain = ["plain", "300.0", "200.0-400.0", "1.00", "16.7", "%", "10.00", "MB", "100.00", "10.0", "-"]
    ours = ["ours-sharded-int8", "60.0", "60.0-60.0", "5.00", "83.3", "%", "100.00", "kB", "1.00", "3.0"]
    assert lines["plain"][:-3] == [*plain, "250.0"]
    # Moving a byte takes plain 1 ns: of 3 ms, 100 kB took 0.1.
    assert lines["ours-sharded-int8"][:12] == [*ours, "2.9", "10.0"]
    assert [each.codec for each in summarise(ROWS, plan)] == [None, None, pytest.approx(2.9)], "at any rate"
    assert lines["bf16"] == ["bf16", "failed:", "not", "here"]
    _, dense, sparse = summarise(ROWS, plan, rate=1e9)
    # 80 ms of wire, begun while backward goes on; and all that compression costs, 2.9 of 3 ms of CPU.
    assert 80 < dense.own_cores < 130 and 50 < sparse.own_cores < 55
    assert lines["plain"][-2] == f"{dense.own_cores:.1f}"
    assert lines["ours-sharded-int8"][-1] == f"{dense.own_cores / sparse.own_cores:.2f}"


def test_what_is_not_known_is_not_computed() -> None:
    plan = Plan(compute=0.05)
    assert all(each.own_cores is None for each in summarise(ROWS, plan))
    assert all(each.codec is None for each in (*summarise(ROWS[1:], plan), *summarise(ROWS[3:4], plan)))
    assert all(each.own_cores is None for each in summarise(ROWS[1:], plan, rate=1e9)), "without `none`"
    assert all(each.own_cores is None for each in summarise(ROWS[3:4], plan, rate=1e9)), "without plain"
    alone = table([row("ours-sharded-int8", 60.0, 7.0, None)], plan, rate=1e9)
    assert "None" not in alone and "COMPUTED" not in alone and "not counted here" in alone
    assert summarise([], plan) == []
