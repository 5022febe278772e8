"""The thread that owns the process group: work in, futures out, in order."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_IDLE_SECONDS = 0.5
"""How often an idle worker looks whether its process group still exists."""

_threads: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Any]] = weakref.WeakKeyDictionary()


@atexit.register
def _end_all(timeout: float = 5.0) -> None:
    """At interpreter exit: end every worker's thread, also one whose Worker is forgotten.

    Its last act may be to let go of a process group. That takes the interpreter's lock, and torch
    aborts the process if the interpreter is shutting down by then.
    """
    for thread, waiting in list(_threads.items()):
        waiting.put(None)
        thread.join(timeout)


class Worker:
    """Runs submitted work one after the other on a thread of its own.

    The thread ends on ``close``, and soon after ``alive`` turns false (the user destroyed the
    process group). It is started by the first piece of work.
    """

    def __init__(self, alive: Callable[[], bool], name: str = "compressed-ddp") -> None:
        self._alive, self._name = alive, name
        self._queue: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._serving = False
        self._lock = threading.Lock()
        self.closed = False

    def submit(self, work: Callable[[], Any]) -> None:
        """Queue ``work``; it must deal with its own errors."""
        with self._lock:
            if self.closed:
                raise RuntimeError("this worker is closed")
            if not self._serving:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                _threads[self._thread] = self._queue
                self._thread.start()
                self._serving = True
            self._queue.put(work)

    def promise(
        self,
        future: torch.futures.Future[Tensor],
        result: Tensor,
        work: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Queue ``work``; then ``future`` completes with ``result``, or with an error that ``failed`` saw."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                failed(error)
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(result)

        self.submit(run)

    def close(self, timeout: float | None = None) -> bool:
        """Finish what is queued, then end the thread; whether it has ended within ``timeout``.

        Safe to call twice, and from any thread.
        """
        with self._lock:
            self.closed = True
            thread = self._thread
        if thread is None:
            return True
        self._queue.put(None)
        # The garbage collector may run its owner's finalizer on this very thread.
        if thread is not threading.current_thread():
            thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                work = self._queue.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty() and not self._alive():
                        self._serving = False
                        return
                continue
            if work is None:
                return
            work()
            del work  # or the idle thread would keep its owner alive
