"""The thread that owns the process group: work in, futures out, in order."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..types import SyncError

logger = logging.getLogger("compressed_ddp")

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


def _empty_frames(error: BaseException | None) -> None:
    """Drop the local variables of all that has failed; the traceback's text stays.

    They hold the process group. As long as someone does, its sockets stay open, and peers wait for this rank
    until they time out.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


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
        # Whoever holds it may be interrupted by the garbage collector, on the same thread, and that by close.
        self._lock = threading.RLock()
        self.closed = False

    def submit(self, work: Callable[[], Any]) -> None:
        """Queue ``work``; it must deal with its own errors."""
        with self._lock:
            if self.closed:
                raise SyncError("this worker is closed; build a new DistributedDataParallel to go on")
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
        # This frame is part of an error's traceback. If it still held the future, which then holds the error,
        # neither would ever be freed: the collector does not see through torch's futures.
        promised = [future]

        def run() -> None:
            try:
                work()
            except Exception as error:
                _empty_frames(error)
                try:
                    failed(error)
                except Exception:
                    # Backward waits for the future, whatever else went wrong; and what it waits for is the
                    # first error, not this one.
                    logger.exception("cleaning up after a failed step failed as well")
                finally:
                    promised.pop().set_exception(error)  # type: ignore[arg-type]
            else:
                promised.pop().set_result(result)

        self.submit(run)

    def close(self, timeout: float | None = None) -> bool:
        """Finish what is queued, then end the thread; whether it has ended within ``timeout``.

        Safe to call twice, and from any thread. On the worker's own thread, where its owner's last
        reference may go, it says yes: this was the last that it did.
        """
        with self._lock:
            self.closed = True
            thread = self._thread
        if thread is None:
            return True
        self._queue.put(None)
        if thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # also if work did not deal with its error: the next piece starts a new thread
            with self._lock:
                if self._thread is threading.current_thread():
                    self._serving = False

    def _serve(self) -> None:
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
