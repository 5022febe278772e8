"""What people see while training: on a terminal, in a log file, and as JSON lines."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from compressed_ddp.metrics import amount
from compressed_ddp.training import progress as module
from compressed_ddp.training.progress import Progress

STEP = {
    "loss": 0.1234,
    "accuracy": 97.12,
    "step_seconds": 0.041,
    "saved_percent": 99.5,
    "compress_share": 0.06,
    "wait_share": 0.12,
}
EPOCH = {
    "train_loss": 0.5,
    "test_loss": 0.25,
    "test_accuracy": 97.1,
    "seconds": 12.34,
    "saved_percent": 99.97,
}
EPOCH_LINE = "epoch 2/10  train loss 0.500  test loss 0.250  acc 97.1 %  12.3 s  saved 99.97 %"


class Terminal(io.StringIO):
    """Says that it is a terminal; ``COLUMNS`` says how wide."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def drawings(self) -> list[str]:
        """What stood in the current line, one after the other."""
        return [text.strip() for text in re.split(r"[\r\n]|\x1b\[A", self.getvalue()) if text.strip()]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until it is set."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def epoch(progress: Progress, steps: int = 5, **more: Any) -> None:
    progress.start_epoch(1, steps, **more)
    for _ in range(steps - more.get("done", 0)):
        progress.step(STEP)
    progress.end_epoch(EPOCH)


def test_a_log_file_gets_one_line_an_epoch() -> None:
    stream = io.StringIO()
    progress = Progress(epochs=10, enabled=True, json_lines=False, stream=stream)
    epoch(progress)
    progress.note("a note")
    progress.summary([("method", "topk"), ("test accuracy", "97.1 %")], {"method": "topk"})
    progress.close()
    assert stream.getvalue() == (f"{EPOCH_LINE}\na note\n\nmethod         topk\ntest accuracy  97.1 %\n")


def test_a_terminal_shows_a_bar_with_everything(clock: list[float]) -> None:
    stream = Terminal()
    progress = Progress(epochs=10, enabled=True, json_lines=False, stream=stream)
    progress.start_epoch(1, 469, done=119)
    clock[0] += 1
    progress.step(STEP)
    assert re.fullmatch(
        r"epoch 2/10  \S+ +step 120/469  loss 0\.123  acc 97\.1 %  41 ms/step  saved 99\.5 %"
        r"  compress 6 %  wait 12 %",
        stream.drawings()[-1],
    )
    assert "█" in stream.drawings()[-1]
    progress.end_epoch(EPOCH)
    progress.close()
    assert stream.getvalue().endswith(f"\r{EPOCH_LINE}\n")


def test_the_bar_is_drawn_at_most_ten_times_a_second(clock: list[float]) -> None:
    stream = Terminal()
    progress = Progress(epochs=1, enabled=True, json_lines=False, stream=stream)
    progress.start_epoch(0, 1000)
    for _ in range(999):
        clock[0] += 0.001
        progress.step(STEP)
    drawings = len(stream.drawings())
    assert 9 <= drawings <= 11
    progress.step(STEP)  # the last one is always shown
    assert "step 1000/1000" in stream.drawings()[-1]
    progress.close()


def test_a_narrow_terminal_keeps_the_bar_in_its_line(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    progress = Progress(epochs=10, enabled=True, json_lines=False, stream=stream)
    progress.start_epoch(1, 469)
    clock[0] += 1
    progress.step(STEP)
    assert max(map(len, stream.drawings())) < 80
    assert "acc 97.1 %" in stream.drawings()[-1]
    progress.close()


def test_notes_do_not_break_the_bar(clock: list[float]) -> None:
    stream = Terminal()
    progress = Progress(epochs=1, enabled=True, json_lines=False, stream=stream)
    progress.start_epoch(0, 10)
    clock[0] += 1
    progress.step(STEP)
    progress.note("checkpoint saved")
    before, after = stream.getvalue().split("checkpoint saved\n")
    assert before.rsplit("\r", 2)[1].strip() == "" and before.endswith("\r")  # wiped, and back at the start
    assert "step 1/10" in after  # and drawn again below
    progress.close()
    progress.close()


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
@pytest.mark.parametrize("columns", [0, 70])  # 0: it does not know, as in many containers
def test_a_real_terminal(columns: int) -> None:
    import fcntl
    import pty
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        before = threading.active_count()
        progress = Progress(epochs=10, enabled=True, json_lines=False, stream=stream)
        epoch(progress, steps=3)
        progress.close()
        assert threading.active_count() == before
        data = b""
        while not data.endswith(b"\n"):  # comes in pieces
            data += os.read(master, 1 << 16)
    os.close(master)
    text = data.decode()
    assert "step 3/3" in text and ("wait 12 %" in text) == (columns == 0)
    assert text.endswith(f"\r{EPOCH_LINE}\r\n")


def test_without_tqdm_a_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    stream = Terminal()
    epoch(Progress(epochs=10, enabled=True, json_lines=False, stream=stream))
    notice, line = stream.getvalue().splitlines()
    assert "pip install 'compressed-ddp[train]'" in notice
    assert line == EPOCH_LINE


@pytest.mark.parametrize("json_lines", [False, True])
def test_a_disabled_one_is_silent(json_lines: bool, capfd: pytest.CaptureFixture[str]) -> None:
    stream = Terminal()
    for progress in (
        Progress(epochs=1, enabled=False, json_lines=json_lines, stream=stream),
        Progress(epochs=1, enabled=False, json_lines=json_lines),
    ):
        epoch(progress)
        progress.note("a note")
        progress.summary([("a", "b")], {"a": 1})
        progress.close()
    assert stream.getvalue() == ""
    assert capfd.readouterr() == ("", "")


def test_programs_get_json_lines_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(epochs=10, enabled=True, json_lines=True, every=2)
    progress.note("two\nlines")
    progress.start_epoch(1, 7, done=2)
    for number in range(3, 8):
        progress.step({"loss": number / 2, "event": 5.0})
    progress.end_epoch({"test_loss": math.nan, "step": 70, "epoch": 99})
    nested = {"method": "topk", "folder": Path("runs"), "all": [1.0, math.inf, {"x": (math.nan, None, True)}]}
    progress.summary([("method", "topk")], nested)
    progress.close()
    out, err = capsys.readouterr()
    assert err == ""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    where = {"event": "step", "epoch": 2, "epoch_steps": 7}
    assert [json.loads(line, parse_constant=refuse) for line in out.splitlines()] == [
        {"event": "note", "text": "two\nlines"},
        {**where, "epoch_step": 4, "loss": 2.0},
        {**where, "epoch_step": 6, "loss": 3.0},
        {**where, "epoch_step": 7, "loss": 3.5},
        {"event": "epoch", "epoch": 2, "epochs": 10, "test_loss": None, "step": 70},
        {
            "event": "summary",
            "method": "topk",
            "folder": "runs",
            "all": [1.0, None, {"x": [None, None, True]}],
        },
    ]
    assert all(line.startswith('{"event": ') for line in out.splitlines())


def test_json_lines_have_no_bar_on_a_terminal() -> None:
    stream = Terminal()
    epoch(Progress(epochs=10, enabled=True, json_lines=True, stream=stream))
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["step", "epoch"]


def test_people_read_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    epoch(Progress(epochs=10, enabled=True, json_lines=False))
    assert capsys.readouterr() == ("", f"{EPOCH_LINE}\n")


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        ({"train_loss": 2.5, "test_perplexity": 12.18}, "epoch 1/1  train loss 2.500  perplexity 12.2"),
        ({"train_loss": 2.5, "test_accuracy": None}, "epoch 1/1  train loss 2.500"),
        ({"test_loss": 0.00012, "seconds": 185}, "epoch 1/1  test loss 1.20e-04  3 min 5 s"),
        ({"train_loss": math.nan, "seconds": 0.0041}, "epoch 1/1  train loss nan  4.1 ms"),
        ({"saved_percent": 100.0}, "epoch 1/1  saved 100.0 %"),
        ({"saved_percent": -3.14}, "epoch 1/1  saved -3.1 %"),
    ],
)
def test_what_is_absent_is_not_shown(figures: dict[str, float], line: str) -> None:
    stream = io.StringIO()
    progress = Progress(epochs=1, enabled=True, json_lines=False, stream=stream)
    progress.start_epoch(0, 1)
    progress.end_epoch(figures)
    assert stream.getvalue() == line + "\n"


def test_every_must_be_a_number_of_steps() -> None:
    with pytest.raises(ValueError, match="every=0"):
        Progress(epochs=1, enabled=True, json_lines=True, every=0)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_950_000, "1.95 MB"),
        (12_340_000_000, "12.34 GB"),
        (-1500, "-1.50 kB"),
        (None, "not measured"),
    ],
)
def test_bytes_for_people(nbytes: int | None, text: str) -> None:
    assert amount(nbytes) == text
