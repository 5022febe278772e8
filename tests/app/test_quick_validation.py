"""The quick validation: all of it passes here, and every one of its checks can fail."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressed_ddp import CompressionConfig, GradientSync
from compressed_ddp.communication import hook, packer
from compressed_ddp.compression import TopKCompressor
from compressed_ddp.types import Slot, Stamp

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
if str(EXPERIMENTS) not in sys.path:  # the process that main() starts inherits it
    sys.path.append(str(EXPERIMENTS))
quick: Any = importlib.import_module("quick_validation")
WORK, CHECKS = quick.work, dict(quick.CHECKS)


def verdicts(text: str) -> dict[str, str]:
    """Each check's name, and PASS or FAIL."""
    return {name: word for word, name in re.findall(r"^(PASS|FAIL)  (\S+(?: \S+)*)  ", text, re.MULTILINE)}


def test_everything_passes() -> None:
    """As a reader would run it."""
    command = [sys.executable, str(EXPERIMENTS / "quick_validation.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert verdicts(result.stdout) == dict.fromkeys(quick.CHECKS, "PASS")
    lines = result.stdout.splitlines()
    assert len(lines) == len(quick.CHECKS) + 1 == 7
    assert re.fullmatch(r"6 of 6 passed in \d+\.\d s, loading torch not counted", lines[-1])


# --- what goes wrong -----------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def misses_the_largest(patch: Patch) -> None:
    """Top-K takes the second largest to the one after the k-th."""

    def select(self: TopKCompressor, flat: Tensor, k: int, stamp: Stamp) -> Tensor:
        return flat.abs().argsort(descending=True)[1 : k + 1].sort().values

    patch.setattr(TopKCompressor, "select", select)


def forgets_rounding(patch: Patch) -> None:
    """The kernel that leaves what rounding took in the residual does nothing."""

    class Kernels:
        @staticmethod
        def put_difference_(*_: object) -> None: ...

    patch.setattr(packer, "kernels_for", lambda _: Kernels)


def forgets_residual(patch: Patch) -> None:
    """What was not sent is dropped, as without error feedback."""
    commit = Slot.commit

    def forget(self: Slot) -> None:
        self.new.zero_()
        commit(self)

    patch.setattr(Slot, "commit", forget)


def sums_otherwise(patch: Patch) -> None:
    """A sum of messages is off in the last bits."""
    sum_ = packer.Packer.sum_

    def off(self: packer.Packer, out: Tensor, messages: Any, scale: float) -> None:
        sum_(self, out, messages, scale)
        out.mul_(1 + 1e-6)

    patch.setattr(packer.Packer, "sum_", off)


def loads_no_residuals(patch: Patch) -> None:
    """Loading a state leaves out what is owed."""
    load_state_dict = GradientSync.load_state_dict

    def forget(self: GradientSync, state: Mapping[str, Any]) -> None:
        zeros = {name: torch.zeros_like(residual) for name, residual in state["residuals"].items()}
        load_state_dict(self, {**state, "residuals": zeros})

    patch.setattr(GradientSync, "load_state_dict", forget)


def sends_half(patch: Patch) -> None:
    """Compression sends half of all entries, whatever it was told."""
    patch.setattr(quick, "attach", lambda model, _: hook.attach(model, CompressionConfig(ratio=0.5)))


def learns_nothing(patch: Patch) -> None:
    patch.setattr(quick, "RATE", 0.0)


def raises(patch: Patch) -> None:
    raise RuntimeError("something else is wrong")


def nothing(patch: Patch) -> None:
    """All is well."""


FEEDBACK = ("residual +", "allgather: applied", "sharded: applied")
WAYS = ("allgather:", "sharded:")
# The check, what goes wrong, on which ranks, and the claims that then do not hold.
BROKEN: list[tuple[str, Callable[[Patch], None], tuple[int, ...], tuple[str, ...]]] = [
    ("compression", misses_the_largest, (0, 1), ("Top-K finds",)),
    ("compression", misses_the_largest, (1,), ("the other worker",)),
    ("error feedback", forgets_rounding, (0, 1), FEEDBACK),
    ("error feedback", forgets_residual, (0, 1), FEEDBACK),
    ("identical replicas", nothing, (0, 1), ()),
    ("identical replicas", sums_otherwise, (1,), WAYS),
    ("ratio 1 is plain DDP", sums_otherwise, (0, 1), WAYS),
    ("exact resume", loads_no_residuals, (0, 1), WAYS),
    ("learns digits", sends_half, (0, 1), ("bytes sent",)),
    ("learns digits", learns_nothing, (0, 1), ("dense reaches", "Top-K 1 % reaches")),
    ("compression", raises, (0,), ()),
    ("compression", nothing, (0, 1), ()),
]


def broken_checks() -> dict[str, Callable[[Any], dict[str, bool]]]:
    """Every row of ``BROKEN`` as a check, by its number."""

    def check(here: Any, row: int) -> dict[str, bool]:
        name, breaks, ranks, _ = BROKEN[row]
        with pytest.MonkeyPatch.context() as patch:
            if here.rank in ranks:
                breaks(patch)
            claims: dict[str, bool] = CHECKS[name](here)
            return claims

    return {f"row {row}": partial(check, row=row) for row in range(len(BROKEN))}


def broken_work(rank: int, folder: Path) -> int:
    """A worker, with ``BROKEN`` for its checks. In the first one the test has put them there."""
    if rank > 0:
        quick.CHECKS = broken_checks()
    passed: int = WORK(rank, folder)
    return passed


def test_every_check_can_fail(monkeypatch: Patch, capfd: pytest.CaptureFixture[str]) -> None:
    """The program with all that can go wrong, one after the other: the right claims do not hold."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(quick, "CHECKS", broken_checks())
    monkeypatch.setattr(quick, "work", broken_work)
    assert quick.main() == 1
    assert not torch.distributed.is_initialized()
    *lines, total = capfd.readouterr().out.splitlines()
    assert len(lines) == len(BROKEN)
    assert total.startswith(f"1 of {len(BROKEN)} passed")
    *judged, raised, after = lines
    for row, (line, (_, breaks, _, claims)) in enumerate(zip(judged, BROKEN, strict=False)):
        assert verdicts(line) == {f"row {row}": "PASS" if breaks is nothing else "FAIL"}
        wrong = line.split("does not hold: ")[1].split("; ") if claims else []
        assert len(wrong) == len(claims), line
        assert all(said.startswith(claim) for said, claim in zip(wrong, claims, strict=True)), line
    assert raised.startswith("FAIL") and raised.endswith("RuntimeError: something else is wrong")
    assert after.startswith("FAIL") and after.endswith("not run after that")
