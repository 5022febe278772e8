"""The thread that owns the process group: work in, futures out, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_IDLE_SECONDS = 0.5
"""How often an idle worker looks whether its process group still exists."""


class Worker:
    """Runs submitted work one after the other on a thread of its own.

    The thread ends on ``close``, and soon after ``alive`` turns false (the user destroyed the
    process group). It is started by the first piece of work.
    """

    def __init__(self, alive: Callable[[], bool], name: str = "compressed-ddp") -> None:
        self._alive, self._name = alive, name
        self._queue: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.closed = False

    def submit(self, work: Callable[[], Any]) -> None:
        """Queue ``work``; it must deal with its own errors."""
        with self._lock:
            if self.closed:
                raise RuntimeError("this worker is closed")
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
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

    def close(self, timeout: float | None = None) -> None:
        """Finish what is queued, then end the thread. Safe to call twice, and from any thread."""
        with self._lock:
            self.closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            # The garbage collector may run its owner's finalizer on this very thread.
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _run(self) -> None:
        while True:
            try:
                work = self._queue.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty() and not self._alive():
                        self._thread = None
                        return
                continue
            if work is None:
                return
            work()
            del work  # or the idle thread would keep its owner alive
