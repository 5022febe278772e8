"""``compressed-ddp train`` with two workers: killed while it writes checkpoints, and resumed, many times."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from compressed_ddp.training import checkpoint
from compressed_ddp.training.checkpoint import Checkpoints, find, read

WORKERS = 2
FLAGS = [
    *(
        "train",
        "--model=gpt",
        "--dataset=text",
        "--block=16",
        "--limit=160",
        "--batch-size=4",
        "--epochs=10000",
    ),
    *("--compress", "--ratio=0.05", "--checkpoint-every=1", "--keep=2", "--threads=1", "--no-tensorboard"),
    *("--resume=auto", "--log-every=5", "--device=cpu", "--backend=gloo"),
]
"""A checkpoint of 17 MB after each step: most of the time goes into writing."""
_PATIENCE = 120.0


class Training:
    """One run, however often it is killed."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._folder = Path(tempfile.mkdtemp())
        text = self._folder / "text.txt"
        text.write_bytes(bytes(chance.choices(b"abcdefgh \n", k=40_000)))
        self._flags = [*FLAGS, f"--text={text}"]
        self._workers: list[subprocess.Popen[bytes]] = []

    def point(self) -> dict[str, Any]:
        """Resume, let it write some checkpoints, kill one worker or both in the middle of one, and look."""
        run, chance = self._folder / "killed", self._chance
        before = _newest(run)
        self._start(run, 10**6)
        self._wait(run, before + 2)
        delay, victims = chance.uniform(0, 0.03), chance.choice([[0], [1], [0, 1]])
        self._wait_for_a_folder(run / "checkpoints")
        time.sleep(delay)
        reported = _newest(run)
        for rank in victims:
            self._workers[rank].kill()
        phase = _phase(run)  # before a survivor tidies up
        self._join()
        resumed = _newest(run)
        for file in checkpoint.manifest_of(find(run))["files"]:
            read(find(run), file)
        killed = f"rank {victims[0]}" if len(victims) < WORKERS else "all"
        row = {"killed": killed, "delay_ms": round(1e3 * delay, 1), "phase": phase, "reported": reported}
        right = reported <= resumed <= reported + 1
        return row | {"resumed": resumed, "begun": "", "result": "complete" if right else "an older one"}

    def finish(self) -> dict[str, Any]:
        """Let it end, and compare it with a run that nobody killed."""
        last = _newest(self._folder / "killed") + 2
        for name in ("killed", "whole"):
            self._start(self._folder / name, last)
            if any(worker.wait(_PATIENCE + 5 * last) for worker in self._workers):
                return {"killed": "", "phase": "", "result": f"{name} run failed"}
        ends = [find(self._folder / name) for name in ("killed", "whole")]
        right = ends[0].name == ends[1].name and all(
            _same(*(_timeless(read(end, file)) for end in ends))
            for file in checkpoint.manifest_of(ends[1])["files"]
        )
        return {
            **{"killed": "", "phase": f"the end, step {last}", "resumed": last},
            "result": "same bits" if right else "other bits than a run that was not killed",
        }

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()
        shutil.rmtree(self._folder)

    def _start(self, run: Path, steps: int) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        with (self._folder / "log").open("ab") as log:
            self._workers = [
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "compressed_ddp",
                        *self._flags,
                        f"--run-dir={run}",
                        f"--max-steps={steps}",
                    ],
                    env=os.environ
                    | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
                    | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
                    | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
                    stdout=log,
                    stderr=log,
                )
                for rank in range(WORKERS)
            ]

    def _wait(self, run: Path, step: int) -> None:
        end = time.monotonic() + _PATIENCE
        while _newest(run) < step:
            if time.monotonic() > end or any(worker.poll() is not None for worker in self._workers):
                raise RuntimeError(f"no step {step}: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.002)

    def _wait_for_a_folder(self, checkpoints: Path) -> None:
        """Until a checkpoint is begun: a step takes longer than writing one."""
        end = time.monotonic() + _PATIENCE
        while not any(checkpoints.glob(".step-*")) and time.monotonic() < end:
            time.sleep(0.0005)

    def _join(self) -> None:
        for worker in self._workers:
            if worker.wait(_PATIENCE) not in (1, -signal.SIGKILL):
                raise RuntimeError(f"a worker whose peer was killed ended with {worker.returncode}")


def _newest(run: Path) -> int:
    found = Checkpoints(run / "checkpoints", 1).all()
    return int(found[-1].name.removeprefix("step-")) if found else 0


def _phase(run: Path) -> str:
    """What the folder shows of the moment of the kill."""
    hidden = sorted((run / "checkpoints").glob(".step-*"))
    if not hidden:
        return "between two checkpoints"
    if hidden[0].name.endswith("-old"):
        return "pruning"
    try:
        files = {path.name: path.stat().st_size for path in hidden[0].iterdir()}
    except FileNotFoundError:  # a survivor was faster
        return "writing"
    written = " and ".join(f"{size} B of {name}" for name, size in sorted(files.items()))
    return f"writing: {written or 'no file yet'}"


def _timeless(state: dict[str, Any]) -> dict[str, Any]:
    """Without what depends on the clock or on how often the run was started."""
    for name in ("config", "moved", "logged"):
        state.pop(name, None)
    for part in ("position", "ledger"):
        for name in ("seconds", "select", "encode", "wait", "decode", "exposed", "history"):
            state.get(part, {}).pop(name, None)
    return state


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b
