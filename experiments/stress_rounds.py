"""The rounds of ``stress.py``: every way, and every moment, in which a synchroniser may end."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # torch's optimizers load it in their first step; here it is done once for all workers
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compressed_ddp import CompressionConfig, GradientSync, attach

RANKS = 2
STEPS = 4
PATIENCE = 10.0
"""Seconds in which threads and descriptors must be gone."""
TIMEOUT = 30.0


class Broken(AssertionError):
    """Something that must hold does not."""


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def all_threads() -> int:
    """Of Python, of gloo, of torch."""
    return len(os.listdir("/proc/self/task"))


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "compressed-ddp" in thread.name]


def within_patience(what: str, holds: Callable[[], bool], found: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            raise Broken(f"{what}: {found()} after {PATIENCE:g} s")
        time.sleep(0.002)


class Training:
    """A small network in three buckets, and what a user holds of it."""

    def __init__(self, rank: int, config: CompressionConfig) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
        self.rank, self.net, self.done = rank, nn.Sequential(*layers), 0
        self.ddp = DistributedDataParallel(self.net, bucket_cap_mb=0.01)
        self.sync: GradientSync = attach(self.ddp, config)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def step(self) -> None:
        generator = torch.Generator().manual_seed(RANKS * self.done + self.rank)
        self.optimizer.zero_grad()
        self.ddp(torch.randn(4, 16, generator=generator)).square().mean().backward()
        self.optimizer.step()
        self.done += 1

    def until_it_ends(self) -> None:
        """Train until someone ends it. What is heard then is one of our errors, or torch's about a group that
        is gone; anything but a RuntimeError or a ValueError is a bug."""
        with suppress(RuntimeError, ValueError):
            while self.done < 50:  # groups that were destroyed still serve who holds them
                self.step()

    def weights(self) -> str:
        flat = torch.cat([p.detach().reshape(-1) for p in self.net.parameters()])
        return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


# --- endings: each leaves nothing behind but what ``training`` holds ------------------------------


def in_background(chance: random.Random, *work: Callable[[], object]) -> list[threading.Thread]:
    """Each piece of ``work`` on a thread of its own, after some milliseconds."""

    def later(delay: float, act: Callable[[], object]) -> None:
        time.sleep(delay)
        act()

    threads = [threading.Thread(target=later, args=(chance.uniform(0, 0.03), act)) for act in work]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(TIMEOUT + PATIENCE)
        if thread.is_alive():
            raise Broken("a thread that closes a synchroniser does not come back")


def before_the_first_step(training: Training, chance: random.Random) -> None:
    training.sync.close()
    try:
        training.step()
    except RuntimeError as error:
        if "closed" not in str(error):
            raise Broken(f"backward after close says {error}") from error
    else:
        raise Broken("backward after close went on without synchronising")


def between_steps_and_twice(training: Training, chance: random.Random) -> None:
    training.step()
    training.step()
    training.sync.close()
    training.sync.close()


def by_another_thread(training: Training, chance: random.Random) -> None:
    """During backward, or between two of them; the ranks do not agree on the moment."""
    threads = in_background(chance, training.sync.close)
    training.until_it_ends()
    join(threads)


def by_several_threads(training: Training, chance: random.Random) -> None:
    threads = in_background(chance, *(training.sync.close for _ in range(4)))
    training.until_it_ends()
    training.sync.close()
    join(threads)
    if not dist.is_initialized():
        raise Broken("closing a synchroniser destroyed the user's process groups")


def inside_backward(training: Training, chance: random.Random) -> None:
    """By a hook of the user's on one of the gradients."""
    training.step()
    target = chance.choice(list(training.net.parameters()))
    target.register_hook(lambda gradient: training.sync.close())
    training.until_it_ends()


def after_an_error_of_the_users(training: Training, chance: random.Random) -> None:
    """Some buckets are on their way, others never come: the step is never finished."""
    training.step()

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("the user's own")

    chance.choice(list(training.net.parameters())).register_hook(fail)
    training.until_it_ends()
    training.sync.close()


def by_garbage_collection(training: Training, chance: random.Random) -> None:
    training.step()
    forget(training)


def by_garbage_collection_elsewhere(training: Training, chance: random.Random) -> None:
    """While this thread goes on to do other things."""
    training.step()
    threads = in_background(chance, gc.collect, gc.collect)
    forget(training, collect=False)
    join(threads)


def by_garbage_collection_on_the_worker(training: Training, chance: random.Random) -> None:
    """The collector runs on whichever thread happens to allocate: also on the synchroniser's own."""
    training.step()
    worker = training.sync._worker
    gc.disable()
    try:
        forget(training, collect=False)
        with suppress(RuntimeError):  # it was no garbage that needs a collector, and is closed already
            worker.submit(lambda: gc.collect() and None)
            within_patience("the worker thread", lambda: not ours(), ours)
    finally:
        gc.enable()


def destroyed_first(training: Training, chance: random.Random) -> None:
    training.step()
    dist.destroy_process_group()
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0, 0.1))
    training.sync.close()


def destroyed_and_forgotten(training: Training, chance: random.Random) -> None:
    """The thread notices by itself."""
    training.step()
    dist.destroy_process_group()
    within_patience("threads after destroy_process_group", lambda: not ours(), ours)


def destroyed_by_another_thread(training: Training, chance: random.Random) -> None:
    """During backward, or between two of them."""
    threads = in_background(chance, dist.destroy_process_group)
    training.until_it_ends()
    join(threads)
    training.sync.close()


ENDINGS = (
    before_the_first_step,
    between_steps_and_twice,
    by_another_thread,
    by_several_threads,
    inside_backward,
    after_an_error_of_the_users,
    by_garbage_collection,
    by_garbage_collection_elsewhere,
    by_garbage_collection_on_the_worker,
    destroyed_first,
    destroyed_and_forgotten,
    destroyed_by_another_thread,
)
IN_STEP = (between_steps_and_twice, by_garbage_collection)
"""After these the user's own group can go on: no rank left another one waiting in it."""


def forget(training: Training, *, collect: bool = True) -> None:
    for name in ("ddp", "sync", "optimizer", "net"):
        training.__dict__.pop(name, None)
    if collect:
        gc.collect()


# --- a round ---------------------------------------------------------------------------------------


def start(store: dist.Store, name: str, rank: int) -> None:
    """The user's process groups, in a part of ``store`` of their own."""
    part, patience = dist.PrefixStore(name, store), timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=part, rank=rank, world_size=RANKS, timeout=patience)
    dist.barrier()


def one_round(number: int, rank: int, store: dist.Store, seed: int, expected: dict[str, str]) -> str:
    """End a synchroniser in one way, look that nothing is left, and train again; returns the way's name."""
    alike, own = random.Random(f"{seed} {number}"), random.Random(f"{seed} {number} {rank}")
    ending = ENDINGS[number % len(ENDINGS)] if number < 2 * len(ENDINGS) else alike.choice(ENDINGS)
    config = CompressionConfig(
        ratio=0.1, collective=alike.choice(("allgather", "sharded")), sync_timeout=TIMEOUT
    )
    files, threads = open_files(), all_threads()
    start(store, f"{number} first", rank)
    users = open_files()
    training: Any = Training(rank, config)
    ending(training, own)
    forget(training)
    del training
    within_patience("our threads", lambda: not ours(), ours)
    wanted = users if dist.is_initialized() else files  # or fewer: a faster peer has destroyed its groups
    within_patience(f"descriptors, not {wanted}", lambda: open_files() <= wanted, open_files)
    if ending not in IN_STEP:
        if dist.is_initialized():
            dist.destroy_process_group()
        start(store, f"{number} second", rank)
    train_again(rank, config, expected)
    dist.destroy_process_group()
    gc.collect()
    within_patience("our threads at the end", lambda: not ours(), ours)
    within_patience(f"descriptors at the end, not {files}", lambda: open_files() == files, open_files)
    within_patience(f"threads, not {threads}", lambda: all_threads() == threads, all_threads)
    return ending.__name__


def train_again(rank: int, config: CompressionConfig, expected: dict[str, str]) -> None:
    """A new synchroniser gives the weights that it always gives, and both ranks the same."""
    training = Training(rank, config)
    for _ in range(STEPS):
        training.step()
    training.sync.close()
    found = training.weights()
    if expected.setdefault(config.collective, found) != found:
        raise Broken(f"{config.collective}: other weights than in the first round")
    mine = torch.frombuffer(bytearray.fromhex(found), dtype=torch.uint8)
    rows = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(rows, mine)
    if not torch.equal(*rows):
        raise Broken(f"{config.collective}: the ranks have different weights")
