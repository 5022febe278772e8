"""The worker thread: order, and every way to its end."""

from __future__ import annotations

import threading
import time

import pytest

from compressed_ddp.communication import worker as module
from compressed_ddp.communication.worker import Worker


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
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(lambda: None)


def test_closed_from_its_own_thread() -> None:
    """The garbage collector may run a finalizer there; the thread must still end."""
    worker = Worker(lambda: True, "own")
    worker.submit(lambda: worker.close(5.0))
    assert ends("own")


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
    import gc
    import weakref

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
