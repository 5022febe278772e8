"""One worker of the soak: trains under DDP and ``attach``, keeps books, and says how it is doing.

``soak.py`` starts four of these, kills one of them now and then, and starts all of them again.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import itertools
import json
import math
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # torch's optimizers load it in their first step; here it is done once for all workers
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compressed_ddp import CompressionConfig, SyncError, attach
from compressed_ddp.training.checkpoint import SHARED, Checkpoints, rank_file, read
from compressed_ddp.training.place import Place

WORKERS = 4
LOST_A_PEER = 3
"""Exit status of a worker that was told of a peer's end, and ended too."""
RATIO, RATE = 0.02, 0.01
LIBC = ctypes.CDLL(None)
WAYS, CAPS, FORMATS = ("sharded", "allgather"), (0.01, 0.03, 0.1, 25.0), ("int8", "fp32", "int4")
TOUR = 40
"""Steps that each wrapping is used for at the beginning of a life."""


@dataclass(frozen=True)
class Job:
    """What a soak does; the same in all of its lives. A life is one start of all workers."""

    folder: Path
    port: int
    """Where the workers find each other."""
    seed: int
    pace: float
    """Seconds that a worker sleeps in each step, so that it leaves the machine to others."""
    save_every: int
    rewrap_every: int
    overflow_every: int
    """Steps between two of them, on average."""
    sample_seconds: float
    timeout: float

    def chance(self, *of: object) -> random.Random:
        """Random numbers that all workers draw alike."""
        return random.Random(f"{self.seed} {of}")

    def wrapping(self, life: int, done: int) -> tuple[CompressionConfig, float] | None:
        """How gradients travel from now on, and how large DDP's buckets are; None: as before.

        ``done`` counts the steps of this life. It begins with a tour of everything there is, so that what the
        first use of each needs is not taken for a leak later; then changes come at random.
        """
        everything = list(itertools.product(WAYS, FORMATS, CAPS))
        self.chance("tour", life).shuffle(everything)
        turn, rest = divmod(done, TOUR)
        chance = self.chance("wrapping", life, done)
        if turn < len(everything):
            if rest:
                return None
            way, values, cap = everything[turn]
        elif chance.random() * self.rewrap_every < 1:
            way, values, cap = chance.choice(everything)
        else:
            return None
        return CompressionConfig(ratio=RATIO, values=values, collective=way, sync_timeout=self.timeout), cap

    def overflow(self, life: int, step: int) -> tuple[int, float] | None:
        """Which rank's gradient is not finite in this step, and how; most often none is."""
        chance = self.chance("overflow", life, step)
        if chance.random() * self.overflow_every >= 1:
            return None
        return chance.randrange(WORKERS), chance.choice((math.inf, -math.inf, math.nan))

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder / "checkpoints", keep=2)

    @property
    def stop(self) -> Path:
        """When this file is there, the workers end together after their next checkpoint."""
        return self.folder / "stop"

    def note(self, kind: str, life: int, rank: int) -> Path:
        return self.folder / f"{kind}-{life}-{rank}.json"

    @property
    def samples(self) -> Path:
        return self.folder / "samples"


class Sample(NamedTuple):
    """A row of results/soak.csv."""

    time: float
    rank: int
    life: int
    step: int
    rss: int
    anonymous: int
    threads: int
    fds: int


def network() -> nn.Module:
    """Sixty thousand parameters in tensors small and large, always with the same first weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 192), nn.LayerNorm(192), nn.Tanh(), nn.Linear(192, 256), nn.Tanh(), nn.Linear(256, 16)
    )


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(WORKERS * step + rank)
    return torch.randn(8, 32, generator=generator), torch.randn(8, 16, generator=generator)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def named(flat: Tensor, net: nn.Module) -> dict[str, Tensor]:
    """Views of ``flat`` by parameter name."""
    names, parameters = zip(*net.named_parameters(), strict=True)
    return dict(zip(names, flat.split([p.numel() for p in parameters]), strict=True))


class Training:
    """A small network under DDP. It keeps two sums in float64, over the steps that counted: this worker's
    own gradients, caught before DDP sees them, and the means that the optimizer was given."""

    def __init__(self, job: Job, rank: int, life: int) -> None:
        self.job, self.rank, self.life, self.step, self.skipped = job, rank, life, 0, 0
        first = job.wrapping(life, 0)
        assert first is not None, "a life begins with its tour"
        self.net = network()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=RATE, momentum=0.9)
        size = sum(p.numel() for p in self.net.parameters())
        self.true, self.applied, self._caught = torch.zeros(3, size, dtype=torch.float64)
        self._poison: float | None = None
        self.doing = "a step"
        views = named(self._caught, self.net)
        for number, (name, parameter) in enumerate(self.net.named_parameters()):
            parameter.register_hook(partial(self._catch, number, views[name]))
        self._wrap(*first)

    def _wrap(self, config: CompressionConfig, cap: float) -> None:
        self.ddp = DistributedDataParallel(self.net, bucket_cap_mb=cap)
        self.sync = attach(self.ddp, config)

    def rewrap(self, config: CompressionConfig, cap: float) -> None:
        """Other buckets, another way: all is built anew, and the state carried over."""
        state = self.sync.state_dict()
        self.sync.close()
        self._wrap(config, cap)
        self.sync.load_state_dict(state)

    def _catch(self, number: int, view: Tensor, gradient: Tensor) -> Tensor:
        view.copy_(gradient.reshape(-1))
        if self._poison is not None and number == self.step % len(list(self.net.parameters())):
            gradient = gradient.clone()
            gradient.view(-1)[self.step % gradient.numel()] = self._poison
        return gradient

    def train(self) -> None:
        """One step. What a step with an overflow does must be nothing at all, on all ranks."""
        hit = self.job.overflow(self.life, self.step)
        self._poison = hit[1] if hit is not None and hit[0] == self.rank else None
        self.optimizer.zero_grad()
        inputs, targets = batch(self.rank, self.step)
        self.doing = "DDP's forward"  # which lays buckets anew, with an exchange in DDP's own group
        outputs = self.ddp(inputs)
        self.doing = "a step"
        nn.functional.mse_loss(outputs, targets).backward()
        mean = torch.cat([p.grad.reshape(-1) for p in self.net.parameters() if p.grad is not None])
        finite = bool(torch.isfinite(mean).all())
        if finite != (hit is None):
            raise AssertionError(f"step {self.step}: an overflow of {hit} was seen as finite={finite}")
        if finite:
            self.true += self._caught
            self.applied += mean
            self.optimizer.step()
        self.skipped += not finite
        self.step += 1

    def weights(self) -> str:
        """A hash of all parameters."""
        return digest(torch.cat([p.detach().reshape(-1) for p in self.net.parameters()]))

    def save(self, place: Place) -> None:
        def shared() -> dict[str, object]:
            return {
                "step": self.step,
                "skipped": self.skipped,
                "model": self.net.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "applied": self.applied,
            }

        mine = {"sync": self.sync.state_dict(), "true": self.true, "weights": self.weights()}
        mine["applied"] = digest(self.applied)
        self.job.checkpoints.save(self.step, shared, mine, place, best=False)

    def load(self, checkpoint: Path) -> None:
        shared, mine = read(checkpoint, SHARED), read(checkpoint, rank_file(self.rank))
        self.step, self.skipped = shared["step"], shared["skipped"]
        self.net.load_state_dict(shared["model"])
        self.optimizer.load_state_dict(shared["optimizer"])
        self.applied.copy_(shared["applied"])
        self.true.copy_(mine["true"])
        self.sync.load_state_dict(mine["sync"])


def sample(training: Training) -> Sample:
    """What this process holds now, between two steps.

    After a collection, and with the pages given back that nothing lives on: how much garbage waits for the
    one, and free memory for the other, is Python's and malloc's own affair, and comes and goes.
    """
    gc.collect()
    LIBC.malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    rss, anonymous = (int(status[key].split()[0]) for key in ("VmRSS", "RssAnon"))
    fds = len(os.listdir("/proc/self/fd")) - 1  # one is that of the listing
    now = round(time.time(), 3)  # after all of it: what is older than a kill has not seen its effects
    return Sample(
        now, training.rank, training.life, training.step, rss, anonymous, int(status["Threads"]), fds
    )


@contextmanager
def together(job: Job, rank: int, life: int) -> Iterator[Place]:
    """All workers of one life in a process group."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    wait = timedelta(seconds=job.timeout)
    # As torchrun's: one outside, for all lives. One in a file would be read into every worker's memory.
    store = dist.PrefixStore(f"life {life}", dist.TCPStore("127.0.0.1", job.port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS, timeout=wait)
    dist.barrier()
    yield Place(rank, WORKERS, rank, torch.device("cpu"), "gloo")
    dist.destroy_process_group()


def work(rank: int, job: Job, life: int) -> None:
    """A worker's life: it ends when all are told to stop, or by SIGKILL, or because a peer did."""
    gc.freeze()  # what was imported is no garbage; collections are cheap then
    # Python's table of interned names doubles once, by 1.9 MB, after some minutes in which names come and go
    # (pickled ones, of checkpoints). Here it does so at once.
    for number in range(200_000):
        sys.intern(f"a name that goes at once {number}")
    with together(job, rank, life) as place:
        training = Training(job, rank, life)
        found = job.checkpoints.all()
        if found:
            training.load(found[-1])
        began = training.step
        try:
            serve(training, place)
        except RuntimeError as error:
            tell_the_end(training, error, began)
        training.sync.close()


def serve(training: Training, place: Place) -> None:
    """Steps, samples, checkpoints, and now and then all new buckets, until all are told to stop."""
    job, due, parent, began = training.job, 0.0, os.getppid(), training.step
    while True:
        training.train()
        wrapping = job.wrapping(training.life, training.step - began)
        # Right after a step, when everything is in use; but a faster peer may be closing its group already.
        if time.monotonic() >= due and wrapping is None:
            due = time.monotonic() + job.sample_seconds
            with job.samples.open("a") as file:  # one short write: rows of several processes do not mix
                file.write(",".join(map(str, sample(training))) + "\n")
        time.sleep(job.pace)
        if training.step % job.save_every == 0:
            training.doing = "a checkpoint"
            training.save(place)
            orphan = os.getppid() != parent  # who started us was killed
            if place.total([job.stop.exists() or orphan])[0]:
                return
        if wrapping is not None:
            training.doing = "new buckets"
            training.rewrap(*wrapping)
        training.doing = "a step"


def tell_the_end(training: Training, error: RuntimeError, began: int) -> None:
    """A peer is gone: say what was heard of it, let go of everything, and exit."""
    heard = training.sync.error or error
    training.sync.close()
    left = [thread.name for thread in threading.enumerate() if "compressed-ddp" in thread.name]
    told = {"kind": type(heard).__name__, "text": str(heard)[:300], "sync": isinstance(heard, SyncError)}
    told |= {"threads": left, "began": began, "step": training.step, "doing": training.doing}
    training.job.note("ended", training.life, training.rank).write_text(json.dumps(told))
    raise SystemExit(LOST_A_PEER)
