"""Being ended while a lab is taken down: nothing is left, and the signal is not forgotten."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from compressed_ddp.lab import Loopback
from compressed_ddp.lab.signals import held_back

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def another_thread() -> Iterator[None]:
    """A thread that takes the signals which the main one masks; and Ctrl-C works, as in a terminal."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, daemon=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    yield
    stop.set()
    thread.join()
    signal.signal(signal.SIGINT, before)


class Slow(Loopback):
    """Removing it takes two moments, and in between this process is told to end, in every way."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(2)
        self.seen: list[str] = []
        self.fails = fails

    def _remove(self) -> None:
        self.seen.append("begun")
        for number in BOTH:
            os.kill(os.getpid(), number)
        time.sleep(0.05)  # Python would raise here
        if self.fails:
            self.fails = False
            raise OSError("not now")
        self.seen.append("removed")


@pytest.mark.usefixtures("another_thread")
@pytest.mark.parametrize("first", [None, *BOTH])
def test_signals_during_the_removal_wait_until_it_is_done(first: signal.Signals | None) -> None:
    """``first``: the signal that ended the block; the others come while it is taken down."""
    network = Slow()
    with pytest.raises((KeyboardInterrupt, SystemExit)), network:
        if first is not None:
            os.kill(os.getpid(), first)
            time.sleep(1)
    assert network.seen == ["begun", "removed"]
    network.close()
    assert network.seen == ["begun", "removed"], "once is enough"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("another_thread")
def test_what_could_not_be_removed_is_tried_again_at_the_end() -> None:
    network = Slow(fails=True)
    with suppress(KeyboardInterrupt, SystemExit), network:
        pass
    assert network.seen == ["begun"]
    with suppress(KeyboardInterrupt):
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            network.close()  # as at the end of the process
        finally:
            signal.signal(signal.SIGTERM, before)
    assert network.seen == ["begun", "begun", "removed"]


@pytest.mark.usefixtures("another_thread")
def test_a_signal_is_given_after_the_block_and_only_once() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), held_back():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        reached = True
    assert reached
    time.sleep(0.05)


def test_a_thread_may_hold_back_too() -> None:
    done = []

    def work() -> None:
        with held_back():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
