"""The short version of ``make fuzz``: the Python target on drawn inputs and on changed seeds.

The native targets' short version is in tests/unit/test_sanitizers.py.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import experiment
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FUZZ = Path(__file__).resolve().parents[2] / "fuzz"
sys.path.insert(0, str(FUZZ))
import messages  # noqa: E402
import states  # noqa: E402
from python_messages import MESSAGES, decoders, one_input, seeds  # noqa: E402

fuzzed = settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
ALL = messages.SIZE | messages.HEADER | messages.CHECKSUM


@fuzzed
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    """From nowhere: only the expected errors, and both kernels and the specification agree."""
    one_input(data)


@fuzzed
@given(
    case=st.integers(0, len(messages.cases()) - 1),
    repairs=st.sampled_from([0, messages.CHECKSUM, ALL, ALL | messages.COUNT]),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=8),
)
def test_changed_messages(case: int, repairs: int, changes: list[tuple[float, int]]) -> None:
    """Good messages with some bytes changed, most of them with a right checksum again."""
    message = bytearray(messages.cases()[case].message)
    for where, byte in changes:
        message[int(where * len(message))] = byte
    one_input(bytes([0, case, repairs]) + bytes(message))


def changed(rng: random.Random, data: bytes) -> bytes:
    """``data`` with up to five bytes replaced, inserted or left out."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(found) + 1)
        found[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
    return bytes(found)


def test_every_decoder_on_changed_seeds() -> None:
    """A bounded run of what the fuzzer does, the same every time; and it gets past the first checks."""
    rng, every = random.Random(0), seeds()
    assert all(map(one_input, (seed for seed in every if seed[:1] == b"\0" and seed[2] == 0)))
    accepted = {first: 0 for first in ("message", "other")}
    for _ in range(4000):
        data = changed(rng, rng.choice(every))
        accepted["message" if not data or data[0] < MESSAGES else "other"] += one_input(data)
    assert accepted["message"] > 700 and accepted["other"] > 50


def test_the_target_reaches_every_decoder() -> None:
    """Every format has a receiver, and every decoder seeds: what none of them chooses is not fuzzed."""
    from compressed_ddp.wire import INDEX_FORMATS
    from compressed_ddp.wire.values import _FORMATS

    found = [case.codec for case in messages.cases()]
    assert {codec.indices.code for codec in found} == {it.code for it in INDEX_FORMATS.values()}
    assert {codec.values.code for codec in found} == {it.code for it in _FORMATS.values()}
    assert set(states.seeds()) == set(decoders())


def test_seeds_of_the_guard_are_its_rows() -> None:
    """A straggler is named from the first; of the second all parameters are alike, so that more is read."""
    rows, alike = states.seeds()[states.one_guard]
    for seed in (rows, alike):
        assert len(seed) % states._ROW.size == 0 and states.one_guard(seed)
    size = states._ROW.size
    assert not states._look([rows[:size]]) and states._look([alike[:size]])


@pytest.mark.parametrize("lie", ["accepts", "writes", "reads"])
def test_the_target_notices(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that takes what it should not, writes before it has checked, or reads another value."""
    from compressed_ddp.kernels import reference
    from compressed_ddp.wire import MessageCodec
    from compressed_ddp.wire import codec as module

    at = next(i for i, case in enumerate(messages.cases()) if case.name == "packed_fp32_1")
    message = bytearray(messages.cases()[at].message)
    one_input(bytes([0, at, 0]) + message)
    if lie == "accepts":
        message[-1] ^= 1
        monkeypatch.setattr(
            module, "_checksum", lambda data: int.from_bytes(bytes(data[28:32].tolist()), "little")
        )
    elif lie == "writes":
        message[32:48] = b"\xff" * 16
        sum_ = MessageCodec.sum_
        monkeypatch.setattr(MessageCodec, "sum_", lambda self, out, *more: sum_(self, out.zero_(), *more))
    else:
        decode = reference.float_decode
        monkeypatch.setattr("compressed_ddp.wire.values.float_decode", lambda *given: decode(*given) + 1)
    with pytest.raises(AssertionError):
        one_input(bytes([0, at, messages.CHECKSUM if lie == "writes" else 0]) + message)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    """Without clang: what to install, and no trace of a compiler's error."""
    script = FUZZ.parent / "experiments" / "fuzzing.py"
    folders = ["--work", str(tmp_path), "--out", str(tmp_path)]
    command = [sys.executable, str(script), "--targets", "native_messages", *folders]
    environment = {**os.environ, "PATH": str(tmp_path), "CLANGXX": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no clang++ on the PATH" in done.stderr and "apt-get install clang" in done.stderr
    assert not (tmp_path / "fuzz.csv").exists()


def test_the_page_has_the_last_figures() -> None:
    """The page says what the file says: ``python experiments/fuzzing.py --table`` prints it."""
    script = experiment.load("fuzzing")
    found = script.rows.read(FUZZ.parent / "results" / "fuzz.csv")
    assert found and all(row["crashes"] == "0" for row in found)
    assert script.table(found) in (FUZZ.parent / "docs" / "fuzzing.md").read_text()


def test_an_interrupted_fuzzer_is_no_crash(tmp_path: Path) -> None:
    """Nor is it a result: a run that someone ended must not stand for one that was whole."""
    script = experiment.load("fuzzing")
    for status, found in (("exit 72", 0), ("kill -TERM $$", 0), ("exit 77", 1)):
        corpus, crashes = tmp_path / status / "corpus", tmp_path / status / "crashes"
        for folder in (corpus, crashes):
            folder.mkdir(parents=True)
        stopped = pytest.raises(script.Interrupted) if not found else nullcontext()
        with stopped:
            script.fuzz(["sh", "-c", status], "native_messages", 10, corpus, crashes)
        assert len(list(crashes.iterdir())) == found
