"""Being ended in order: a signal must not skip what a ``with`` block has to remove."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
    """Signals that would end this thread wait until the end of the block."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_endings()})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
