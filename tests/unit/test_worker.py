"""The worker thread: order, and every way to its end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from compressed_ddp.communication import worker as module
from compressed_ddp.communication.worker import Worker
from compressed_ddp.types import SyncError


def ends(name: str) -> bool:
    """Whether the thread called ``name`` is gone within ten seconds."""
    deadline = time.monotonic() + 10
    while any(thread.name == name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return all(thread.name != name for thread in threading.enumerate())


def test_work_is_done_in_order_before_the_end() -> None:
    worker, done = Worker(lambda: True, "ordered"), []
    for number in range(100):
        worker.submit(lambda number=number: done.append(number))
    worker.close()
    assert done == list(range(100)) and ends("ordered")
    worker.close()
    with pytest.raises(SyncError, match="closed"):
        worker.submit(lambda: None)


def test_closed_from_its_own_thread() -> None:
    """The garbage collector may run a finalizer there; the thread must still end."""
    worker = Worker(lambda: True, "own")
    worker.submit(lambda: worker.close(5.0))
    assert ends("own")


def test_closed_by_the_collector_while_it_looks_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run on the worker's thread at any moment, and its owner's finalizer with it."""
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.01)
    worker: Worker

    def alive() -> bool:
        assert worker.close(5.0)  # it is this thread that ends
        return True

    worker = Worker(alive, "looking")
    worker.submit(lambda: None)
    assert ends("looking")


def test_an_error_keeps_nothing_but_its_text() -> None:
    """Its frames held the process group, and its future held it for ever."""

    class Group:
        pass

    def fail() -> None:
        group = Group()
        groups.append(weakref.ref(group))
        try:
            raise RuntimeError("gloo's words")
        except RuntimeError as error:
            raise SyncError("ours") from error

    groups: list[weakref.ref[Group]] = []
    errors: list[BaseException] = []
    worker = Worker(lambda: True, "failing")
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    worker.promise(future, torch.zeros(1), fail, errors.append)
    worker.close()
    [error] = errors
    assert future.done()  # DDP reads it in C++; reading it here would put this frame into the traceback
    assert error.__traceback__ is not None and "gloo's words" in str(error.__cause__)
    assert groups[0]() is None
    gone = weakref.ref(error)
    errors.clear()
    del error, future
    gc.collect()
    assert gone() is None


def test_what_fails_after_an_error_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Backward waits for the future: it must complete, and with the first error; the thread goes on."""

    def fail() -> None:
        raise SyncError("the first")

    def full(_: Exception) -> None:
        raise OSError("Too many open files")

    worker, done = Worker(lambda: True, "full"), threading.Event()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    worker.promise(future, torch.zeros(1), fail, full)
    worker.submit(done.set)
    assert done.wait(10)
    assert future.done()
    with pytest.raises(SyncError, match="the first"):
        future.wait()
    assert "Too many open files" in caplog.text
    worker.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_is_replaced() -> None:
    """Work that does not deal with its error ends the thread, and not what is queued later."""
    worker, done = Worker(lambda: True, "dying"), threading.Event()
    worker.submit(lambda: 1 / 0)
    assert ends("dying")
    worker.submit(done.set)
    assert done.wait(10)
    worker.close()


def test_ends_when_the_process_group_is_gone_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.01)
    alive, done = [True], threading.Event()
    worker = Worker(lambda: alive[0], "orphan")
    worker.submit(lambda: None)
    alive[0] = False
    assert ends("orphan")
    worker.submit(done.set)
    assert done.wait(10)
    worker.close()


def test_an_idle_worker_does_not_keep_its_work_alive() -> None:
    class Owner:
        def act(self) -> None:
            pass

    owner, worker = Owner(), Worker(lambda: True, "idle")
    worker.submit(owner.act)
    reference = weakref.ref(owner)
    del owner
    deadline = time.monotonic() + 10
    while reference() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert reference() is None
    worker.close()


LAST_REFERENCE = """
import os, threading, time
from compressed_ddp.communication.worker import Worker

class Group:
    def alive(self):
        return True
    def __del__(self):
        time.sleep(0.2)  # as a process group that joins its own threads
        os.write(1, b"let go")

def main():
    group, started = Group(), threading.Event()
    worker = Worker(group.alive)
    worker.submit(lambda: (started.set(), time.sleep(0.2), worker.close()))
    started.wait()  # from here on the thread alone keeps both

main()
"""


def test_at_exit_a_forgotten_thread_is_waited_for() -> None:
    """What it lets go of last may need the interpreter; a shutdown in between aborts the process."""
    result = subprocess.run([sys.executable, "-c", LAST_REFERENCE], capture_output=True, check=True)
    assert result.stdout == b"let go"


def test_close_waits_for_a_thread_that_is_ending_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.01)
    leaving, leave = threading.Event(), threading.Event()

    class Slow(threading.Thread):
        def run(self) -> None:
            super().run()
            leaving.set()
            leave.wait(10)

    monkeypatch.setattr(threading, "Thread", Slow)
    worker = Worker(lambda: False, "leaving")
    worker.submit(lambda: None)
    assert leaving.wait(10)
    assert not worker.close(0.01)
    leave.set()
    assert worker.close(10) and ends("leaving")
