"""experiments/scalability_analysis.py: planning within a budget, going on where it was stopped, its CSV."""

from __future__ import annotations

import sys
from pathlib import Path

import experiment
import pytest

from compressed_ddp.lab import Figure, LabError, Network, missing
from compressed_ddp.lab.measure import Plan

script = experiment.load("scalability_analysis")
planning = experiment.load("lab_cells")
LACKING = missing()


def judge(network: Network) -> list[Figure]:
    """A self-test that takes no time: 100 Gbit/s is too much."""
    assert network.rate is not None
    if network.rate == 100e9:
        raise LabError("this machine does not hold 100.0 Gbit/s\nfor reasons")
    return [Figure(0, "", 0.9 * network.rate, 0.95 * network.rate)]


def test_it_measures_and_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.csv"
    flags = ["--hosts=2", "--elements=20000", "--repeats=1", "--steps=1", "--compute=5ms", f"--out={out}"]
    flags += ["--ratios=0.01,0.1", "--methods=none,plain,ours-sharded-int8"]
    flags += ["--loopback"] if LACKING else ["--rates=50mbit,100gbit"]
    monkeypatch.setattr(sys, "argv", ["scalability_analysis.py", *flags])
    monkeypatch.setattr(script, "check", judge)
    script.main()
    printed, rows = capfd.readouterr(), script.read(out)
    assert tuple(rows[0]) == script.COLUMNS and script.COLUMNS[:4] == tuple(script.origin())
    measured = [row for row in rows if row["method"]]
    assert [(row["method"], row["ratio"]) for row in measured] == [
        *(("none", ""), ("plain", ""), ("ours-sharded-int8", "0.01"), ("ours-sharded-int8", "0.1"))
    ]
    assert all(not row["failed"] and row["step_ms"] and row["dilation"] == "1" for row in measured)
    if LACKING is None:
        (refused,) = [row for row in rows if not row["method"]]
        assert (refused["rate"], refused["failed"]) == ("100gbit", "this machine does not hold 100.0 Gbit/s")
        assert "not reported" in printed.err and not refused["step_ms"]
        for row in measured:
            assert (row["rate"], row["link_share"]) == ("50mbit", "0.9") and float(row["wire_sent"]) > 0
        assert "resnet50 ours-sharded-int8    0.1    2: " in printed.out
    others = [
        measured[1] | {"model": "resnet18", "step_ms": "1"},
        measured[1] | {"elements": "77", "step_ms": "2"},
        measured[1] | {"compute_ms": "50.0", "step_ms": "3"},
        measured[1] | {"hosts": "5", "step_ms": "4"},
        measured[1] | {"dilation": "10", "step_ms": "5"},
    ]
    early = [row | {"step_ms": "0"} for row in measured if row["ratio"] != "0.1"]
    out.unlink()
    script.append(out, [*others, *early, *(row | {"elements": ""} for row in rows if not row["method"])])
    script.main()
    again = script.read(out)
    assert again[:5] == others, "they are of other work, or of another lab"
    assert sorted(map(script.key, again[5:])) == sorted(map(script.key, rows))
    assert all(row["step_ms"] != "0" for row in again), "what is compared is of one run"
    assert not list(tmp_path.glob("*.part"))
    script.main()
    assert [row for row in script.read(out) if row["method"]] == [row for row in again if row["method"]]


ROW = {
    **{"hosts": "2", "rate": "", "model": "resnet50", "elements": "25557032", "compute_ms": "50.0"},
    **{"dilation": "1", "ratio": "", "failed": "", "step_ms": "7"},
}


def complete(**other: str) -> list[dict[str, str]]:
    """Two repeats of three methods."""
    sparse = {"method": "ours-sharded-int8", "ratio": "0.01"}
    return [ROW | each | other for each in ({"method": "none"}, {"method": "plain"}, sparse) for _ in "12"]


def test_a_lab_that_lacks_a_method_is_measured_as_a_whole() -> None:
    chosen = options("--hosts=2", "--repeats=2", "--methods=none,plain,ours-sharded-int8")
    cell = script.Cell(2, None)
    assert script.unfinished(chosen, cell, complete()) == []
    for rows in (complete()[:-1], complete()[2:], complete(model="resnet18"), complete(elements="2555628")):
        (plan,) = script.unfinished(chosen, cell, rows)
        assert plan.methods == ("none", "plain", "ours-sharded-int8")
    for other in ({"compute_ms": "20.0"}, {"dilation": "10"}, {"hosts": "3"}, {"rate": "1gbit"}):
        assert script.unfinished(chosen, cell, complete(**other))
    for other in ({"link_share": "0.94"}, {"commit": "another"}):
        mixed = [*complete()[:4], *(row | other for row in complete()[4:])]
        (plan,) = script.unfinished(chosen, cell, mixed)
        assert plan.methods == ("none", "plain", "ours-sharded-int8"), "complete, but of two runs"
    failed = [row | {"failed": "not here"} for row in complete()]
    assert script.unfinished(chosen, cell, failed[::2]) == [], "it would fail again"


def test_what_the_file_has_beside_it_is_measured_again_too() -> None:
    """Otherwise the new method would stand beside rows of another run."""
    chosen = options("--hosts=2", "--repeats=2", "--methods=fp16,ours-sharded-int8", "--ratios=0.1")
    rows = [*complete(), ROW | {"method": "gone-by-now"}, ROW | {"method": "powersgd-1", "model": "resnet18"}]
    found = script.unfinished(chosen, script.Cell(2, None), rows)
    assert [(plan.ratio, plan.methods) for plan in found] == [
        (0.1, ("none", "plain", "fp16", "ours-sharded-int8")),
        (0.01, ("ours-sharded-int8",)),
    ]


def test_rows_are_taken_out_in_one_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.csv"
    mine, theirs = complete(), complete(model="resnet18")
    script.append(out, [*mine, *theirs])
    before = out.read_bytes()
    plans = script.plans(options("--methods=none,plain"), script.Cell(2, None))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", killed)
        script.drop(out, script.Cell(2, None), plans, 1.0)
    assert out.read_bytes() == before
    script.drop(out, script.Cell(2, None), plans, 1.0)
    assert [row["model"] for row in script.read(out)] == ["resnet18"] * 6


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        *(("--dilate=0", "0 is not"), ("--dilate=-2", "-2 is not"), ("--dilate=nan", "nan is not")),
        *(("--hosts=4,1", "1 hosts: a lab has 2"), ("--hosts=251", "251 hosts"), ("--hosts=", "''")),
        *(("--budget=0", "0 is not"), ("--budget=inf", "inf is not")),
        *(("--rates=", "''"), ("--rates=1gbit,,", "''"), ("--rates=quick", "'quick'")),
    ],
)
def test_wrong_flags_are_named(flag: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(flag)
    printed = capsys.readouterr().err
    assert flag.partition("=")[0] in printed and said in printed


def test_a_slow_cell_has_fewer_steps_and_then_fewer_repeats() -> None:
    """ResNet-50, 8 hosts, 100 Mbit/s: a dense step takes 15 s, and four of them a repeat are needed."""
    cell, plan = script.Cell(8, "100mbit"), Plan(("plain",), steps=10)
    step, first = planning.guess("plain", plan, cell)
    assert 14.3 < step == first < 18
    roomy = planning.fit(plan, cell, 600)
    assert roomy.repeats == 5 and step < roomy.block_seconds < 600 / 5 - 3 * step
    tight = planning.fit(plan, cell, 150)
    assert tight.repeats == 2 and tight.warm_up == 3 and tight.methods == ("plain",)
    assert planning.fit(plan, cell, 1).repeats == 1
    quick = planning.fit(Plan(("ours-sharded-int8",)), cell, 600)
    assert quick.repeats == 5 and quick.block_seconds > 60
    step, first = planning.guess("powersgd-1", plan, cell)
    assert first > 5 * step, "it begins after two dense steps"


def options(*flags: str) -> object:
    return script.parse(["--loopback", *flags])


def test_later_ratios_are_for_sparse_methods_alone() -> None:
    found = list(script.plans(options("--ratios=0.01,0.1"), script.Cell(2, None)))
    assert [plan.ratio for plan in found] == [0.01, 0.1]
    assert "plain" in found[0].methods and set(found[1].methods) == {
        *("writeup-dense", "writeup-sparse", "ours-allgather-int8", "ours-sharded-int8")
    }


def test_dilation_divides_elements_and_rates_and_has_a_file_of_its_own() -> None:
    chosen = options("--dilate=10", "--hosts=2,16", "--rates=100mbit,1gbit")
    assert chosen.out.name == "scalability_dilated.csv"
    assert next(iter(script.plans(chosen, script.Cell(2, None)))).elements == 2_555_703
    chosen.loopback = False
    assert script.cells(chosen) == [(2, "100mbit"), (16, "100mbit"), (2, "10mbit"), (16, "10mbit")]


def test_growth_by_hand() -> None:
    def row(hosts: int, method: str, sent: str, ratio: str = "") -> dict[str, str]:
        return {
            **{"hosts": str(hosts), "rate": "1gbit", "method": method, "ratio": ratio},
            **{"wire_sent": sent, "failed": "", "model": "resnet50"},
        }

    rows = [row(4, "none", "1000"), row(16, "none", "3000")]
    rows += [row(4, "ours-sharded-int8", sent, "0.01") for sent in ("101000", "1", "201000")]
    rows += [row(16, "ours-sharded-int8", "123000", "0.01"), row(4, "ours-allgather-int8", "", "0.01")]
    (line,) = script.growth(rows).splitlines()[1:]
    assert line.split() == [
        "1gbit",
        "resnet50",
        "ours-sharded-int8",
        "0.01",
        "4:",
        "0.100",
        "(1.00),",
        "16:",
        "0.120",
        "(1.20)",
    ]
    assert "no growth" in script.growth([])


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(script, "missing", lambda: "it needs root")
    for flags, said in (
        (["--hosts=2"], "it needs root"),
        (["--loopback", "--hosts=2", "--steps=0"], "steps"),
    ):
        with pytest.raises(SystemExit):
            script.parse(flags)
        assert said in capsys.readouterr().err
