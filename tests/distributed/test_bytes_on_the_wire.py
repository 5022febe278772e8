"""The ledger against the kernel's own counters: bytes that really crossed the interface."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 3
COUNTERS = Path("/proc/self/net/dev")
MEASURE = Path(__file__).parent / "measure_wire.py"


def alone_on_its_network() -> list[str]:
    """A prefix that gives a command a network namespace of its own, where that is allowed."""
    prefix = ["unshare", "--net"]
    if shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
        return prefix
    return []


@pytest.mark.skipif(
    not Path("/proc/self/net/dev").exists(), reason="the kernel's interface counters are Linux's"
)
def test_interface_counters_agree_with_the_ledger() -> None:
    """4 ranks, 5.2 million parameters, sharded at 1 %: within 10 %, and below 5 % of plain DDP."""
    command = [*alone_on_its_network(), sys.executable, str(MEASURE), str(STEPS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stderr
    plain, ours = json.loads(result.stdout)
    assert ours[0]["parameters"] > 5_000_000
    crossed, plain_crossed = (
        ranks[0]["crossed"] - sum(rank["resent"] for rank in ranks) for ranks in (ours, plain)
    )
    ledger, dense = (sum(rank[name] for rank in ours) for name in ("sent", "dense"))
    assert abs(crossed - ledger) < 0.10 * ledger
    assert crossed < 0.05 * plain_crossed
    assert abs(plain_crossed - dense) < 0.10 * dense, "the dense equivalent is not what DDP moves"
