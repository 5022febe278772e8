"""Start and end: torchrun, spawn, and programs that never call close."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENDINGS = {
    "close": "sync.close()\ndist.destroy_process_group()",
    "destroy only": "dist.destroy_process_group()",
    "neither": "",
    "exit": "raise SystemExit(0)",
}
PROGRAM = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from compressed_ddp import CompressionConfig, attach

def main(rank=None, world=None, store=None):
    if rank is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{{store}}", rank=rank, world_size=world)
    model = DistributedDataParallel(nn.Linear(100, 100))
    sync = attach(model, CompressionConfig(ratio=0.01))
    for _ in range(3):
        model(torch.randn(4, 100)).sum().backward()
    print(f"steps {{sync.stats.total.steps}}\\n", end="", flush=True)  # one write: two ranks share the pipe
{ending}

if __name__ == "__main__":
    {start}
"""


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run([*launch, *arguments])


def write(folder: Path, ending: str, start: str) -> str:
    body = "\n".join(f"    {line}" for line in ending.splitlines())
    path = folder / "program.py"
    path.write_text(PROGRAM.format(ending=body, start=start))
    return str(path)


@pytest.mark.parametrize("ending", ENDINGS)
def test_torchrun_programs_end_by_themselves(tmp_path: Path, ending: str) -> None:
    """However a program ends, it ends: exit code 0, no hang on our thread."""
    result = torchrun(write(tmp_path, ENDINGS[ending], "main()"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("steps 3") == 2
    assert "Traceback" not in result.stderr and "Fatal Python error" not in result.stderr


@pytest.mark.parametrize("ending", ["close", "neither"])
def test_spawned_programs_end_by_themselves(tmp_path: Path, ending: str) -> None:
    start = f"torch.multiprocessing.spawn(main, args=(2, {str(tmp_path / 'store')!r}), nprocs=2)"
    result = run([sys.executable, write(tmp_path, ENDINGS[ending], start)])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("steps 3") == 2


def test_quickstart_prints_the_ledger() -> None:
    """The example of the README, as the README starts it."""
    path = ROOT / "examples" / "quickstart.py"
    assert len(path.read_text().splitlines()) < 40
    result = torchrun(str(path))
    assert result.returncode == 0, result.stderr
    assert "test accuracy" in result.stdout
    for word in ("sent", "received", "dense ring", "saved", "select", "encode", "wait", "decode", "exposed"):
        assert f"\n{word}" in result.stdout
