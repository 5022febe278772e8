"""Being ended in order: a signal must not skip what a ``with`` block has to remove."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def _endings() -> list[signal.Signals]:
    """SIGTERM and, where it exists, the signal of a closed terminal."""
    names = ("SIGTERM", "SIGHUP")
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def _unwind(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt.

    Handlers that somebody else has set stay as they are; and only the main thread can set any.
    """
    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number in _endings() if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _unwind)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def held_back() -> Iterator[None]:
    """Signals that would end this process are remembered, and given to it at the end of the block.

    By handlers, because a mask is one thread's own: where there is another thread, the kernel gives the
    signal to that one, and Python raises in the main thread all the same. By a mask as well, because
    programs that are started meanwhile inherit it, and Ctrl-C goes to all that a terminal runs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # nothing is ever raised here
        return
    held: list[int] = []
    before: dict[signal.Signals, Any] = {}

    def remember(number: int, frame: FrameType | None) -> None:
        held.append(number)

    ends = {signal.SIGINT, *_endings()}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ends) if hasattr(signal, "pthread_sigmask") else None
    try:
        for number in ends:
            if (handler := signal.getsignal(number)) is not None:  # else it is not Python's to restore
                before[number] = handler
                signal.signal(number, remember)
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what waits is remembered now
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(held):
            signal.raise_signal(late)
