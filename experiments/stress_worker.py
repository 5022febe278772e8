"""The worker thread of ``stress.py`` alone: threads that submit, close, forget and collect at once."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from stress_rounds import PATIENCE, Broken, in_background, join

from compressed_ddp.communication.worker import Worker


class Owner:
    """As GradientSync: the worker is closed when this is forgotten."""

    def __init__(self, alive: Callable[[], bool], name: str) -> None:
        self.worker = Worker(alive, name)
        weakref.finalize(self, self.worker.close, PATIENCE)
        self.itself = self  # so that only the collector can end it


def worker_round(number: int, seed: int) -> None:
    """Threads that submit, close, forget and collect at once: what was accepted is done, once, in order."""
    chance = random.Random(f"{seed} worker {number}")
    alive, collects, name = [True], chance.random() < 0.3, f"stress-{seed}-{number}"

    def is_alive() -> bool:
        if collects:  # as the collector may whenever something is allocated
            gc.collect()
        return alive[0]

    owner: list[Owner] = [Owner(is_alive, name)]
    accepted: dict[int, list[int]] = {who: [] for who in range(3)}
    done: dict[int, list[int]] = {who: [] for who in range(3)}

    def submit(who: int, worker: Worker, pause: float) -> None:
        with suppress(RuntimeError):  # closed
            for piece in range(20):
                worker.submit(lambda piece=piece: done[who].append(piece))  # type: ignore[misc]
                accepted[who].append(piece)
                time.sleep(pause)

    worker = owner[0].worker
    works: list[Callable[[], object]] = [
        partial(submit, who, worker, chance.choice((0, 0.0005, 0.002))) for who in accepted
    ]
    works += [lambda: alive.__setitem__(0, False)] if chance.random() < 0.5 else []
    works += chance.choice([[worker.close], [worker.close, worker.close], [owner.clear, gc.collect]])
    join(in_background(chance, *works))
    owner.clear()
    gc.collect()
    worker.close()
    if accepted != done:
        raise Broken(f"worker round {number}: accepted {accepted}, done {done}")
    if any(thread.name == name for thread in threading.enumerate()):
        raise Broken(f"worker round {number}: its thread is still there")
