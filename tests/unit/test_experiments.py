"""The experiments run and write what their readers expect. Nothing about their figures."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_benchmark_compression(tmp_path: Path) -> None:
    pytest.importorskip("compressed_ddp.kernels._native", reason="it compares the extension")
    script = ROOT / "experiments" / "benchmark_compression.py"
    command = [sys.executable, str(script), "--quick", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "| target | measured | |" in result.stdout

    with (tmp_path / "benchmark_compression.csv").open() as file:
        rows = list(csv.DictReader(file))
    columns = {"kind", "method", "distribution", "elements", "ratio", "entries", "threads", "calls"}
    columns |= {"best_ms", "median_ms", "passes", "median_passes", "gb_per_s", "index_bits", "entropy_bits"}
    assert set(rows[0]) == columns | {"command", "commit", "version", "machine"}
    methods = {kind: {row["method"] for row in rows if row["kind"] == kind} for kind in ("memory", "codec")}
    assert methods["memory"] == {"add_ (one pass)", "read", "copy_", "zero_"}
    assert methods["codec"] == {"encode", "decode", "zero, decode, add 8"}
    takes = {"torch.topk", "naive torch", "reference", "native", "native exact=False", "native 4 shards"}
    takes |= {"native baseline", "select", "take_ out=", "take_ in place"}
    for distribution in ("gaussian", "heavy", "real"):
        for threads in ("1", "2"):
            mine = [r for r in rows if (r["distribution"], r["threads"]) == (distribution, threads)]
            assert {row["method"] for row in mine if row["kind"] == "take"} == takes
            assert {row["ratio"] for row in mine} == {"0.1", "0.01", "0.001"}
    assert (tmp_path / "benchmark_compression.png").read_bytes().startswith(b"\x89PNG")
