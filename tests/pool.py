"""Real processes for distributed tests: started once, used by all of them."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


def _serve(rank: int, pipe: Connection) -> None:
    """A worker process: run what comes down the pipe, each job in a process group of its own."""
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while True:
        try:
            job, world, store, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=60),
            )
            # A rank that is through at once must not take its connections down while others still
            # make theirs.
            dist.barrier()
            answer: tuple[str, Any] = ("done", job(rank, world, *args, **kwargs))
        except BaseException as error:
            answer = ("failed", (f"{type(error).__name__}: {error}", traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        data = io.BytesIO()
        torch.save(answer, data)
        pipe.send_bytes(data.getvalue())


class JobFailed(AssertionError):
    """A job raised on some ranks; ``errors`` maps them to 'Type: message'."""

    def __init__(self, errors: dict[int, tuple[str, str]]) -> None:
        self.errors = {rank: text for rank, (text, _) in errors.items()}
        super().__init__("\n".join(f"rank {rank}:\n{trace}" for rank, (_, trace) in errors.items()))


class Pool:
    """Up to ``size`` ranks. A rank that dies takes the pool with it; the next run starts anew."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self, world: int, job: Callable[..., Any], *args: Any, timeout: float = 90, **kwargs: Any
    ) -> list[Any]:
        """``job(rank, world, *args, **kwargs)`` on ``world`` ranks; results in rank order."""
        self._start()
        pipes = [pipe for _, pipe in self._workers[:world]]
        with tempfile.TemporaryDirectory() as folder:
            for pipe in pipes:
                pipe.send((job, world, os.path.join(folder, "store"), args, kwargs))
            answers = [self._answer(rank, pipe, timeout) for rank, pipe in enumerate(pipes)]
        errors = {rank: value for rank, (state, value) in enumerate(answers) if state == "failed"}
        if errors:
            raise JobFailed(errors)
        return [value for _, value in answers]

    def _answer(self, rank: int, pipe: Connection, timeout: float) -> tuple[str, Any]:
        if pipe.poll(timeout):
            try:
                return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
            except EOFError:
                pass
        process = self._workers[rank][0]
        process.join(0.2)
        reason = (
            f"exit code {process.exitcode}" if process.exitcode is not None else f"silent for {timeout} s"
        )
        self.close()
        raise JobFailed({rank: (f"Died: {reason}", f"rank {rank} died: {reason}")})

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        if self._workers:
            return
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, mine))

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join(5)
        self._workers = []
