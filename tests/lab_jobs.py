"""What the ranks of the lab's tests run. Every function is ``job(rank, world, ...)``."""

from __future__ import annotations

import functools
import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from compressed_ddp.lab.emulate import EmulatedModel, GradientPool, model_shapes, scaled_shapes
from compressed_ddp.lab.measure import Bench, Plan
from compressed_ddp.lab.methods import METHODS, Handle, Method, NoHandle, Settings
from compressed_ddp.lab.run import MethodRun

ELEMENTS = 60_000
BUCKET_MB = 0.06


@functools.cache
def shapes() -> list[torch.Size]:
    return scaled_shapes(model_shapes("resnet50"), ELEMENTS)


@functools.cache
def pool_of(rank: int) -> GradientPool:
    return GradientPool(sum(shape.numel() for shape in shapes()), seed=rank)


def flat_gradients(model: EmulatedModel) -> Tensor:
    return torch.cat([weight.grad.reshape(-1) for weight in model.weights if weight.grad is not None])


def synchronise(rank: int, world: int, names: list[str], *, steps: int) -> dict[str, list[Tensor]]:
    """The synchronised gradients of every step, by method."""
    found: dict[str, list[Tensor]] = {}
    group = dist.new_group()
    gc.freeze()  # closing a run collects garbage, and torch is large
    for name in names:
        model = EmulatedModel(shapes(), pool_of(rank), 0.0)
        run = MethodRun(METHODS[name], Settings(ratio=0.05, min_compress_numel=2), BUCKET_MB, group)
        run.attach(model)
        found[name] = []
        for _ in range(steps):
            run.prepare()
            run.step()
            found[name].append(flat_gradients(model))
        run.close()
    gc.unfreeze()
    dist.barrier()  # nobody leaves while another one still needs its connections
    return found


def bench(rank: int, world: int, **plan: Any) -> dict[str, Any]:
    """All rows of a plan, and what was announced on this rank."""
    events: list[Any] = []
    rows = list(Bench(Plan(**plan), events.append).rows())
    return {"rows": rows, "events": events}


class _Breaks:
    """A hook's state: dense until rank 1 comes to its fourth bucket."""

    def __init__(self, group: Any) -> None:
        self.group, self.calls = group, 0


def _breaking_hook(state: _Breaks, bucket: Any) -> Any:
    state.calls += 1
    if state.calls == 4 and dist.get_rank() == 1:
        raise RuntimeError("rank 1 had enough")
    work = dist.all_reduce(bucket.buffer(), group=state.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


# DDP compares annotations as objects, and here they are strings.
_breaking_hook.__annotations__.clear()


def _breaks_in_a_step(model: DistributedDataParallel, settings: Settings) -> Handle:
    model.register_comm_hook(_Breaks(model.process_group), _breaking_hook)
    return NoHandle()


def _breaks_at_once(model: DistributedDataParallel, settings: Settings) -> Handle:
    if dist.get_rank() == 1:
        raise ValueError("not on rank 1")
    return NoHandle()


def bench_with_broken_methods(rank: int, world: int, **plan: Any) -> dict[str, Any]:
    """As ``bench``, with two methods more that fail on rank 1: before the others, and between them."""
    usual = dict(METHODS)
    METHODS.clear()
    METHODS["breaks-at-once"] = Method("fails when it is attached", _breaks_at_once)
    METHODS["none"] = usual["none"]
    METHODS["breaks-in-a-step"] = Method("fails in a hook", _breaks_in_a_step)
    METHODS["plain"] = usual["plain"]
    try:
        return bench(rank, world, **plan)
    finally:
        METHODS.clear()
        METHODS.update(usual)


def watch_buckets(rank: int, world: int, *, compute: float) -> list[tuple[int, int, float]]:
    """Which buckets DDP found ready in one backward pass, how large and when."""
    seen: list[tuple[int, int, float]] = []

    def hook(state: Any, bucket):  # type: ignore[no-untyped-def]
        seen.append((bucket.index(), bucket.buffer().numel(), time.perf_counter() - start))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = EmulatedModel(shapes(), pool_of(rank), compute)
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True, init_sync=False
    )
    ddp.register_comm_hook(None, hook)
    for step in range(3):
        token = ddp()
        seen.clear()
        start = time.perf_counter()
        token.backward()
        right = torch.equal(flat_gradients(model), pool_of(rank).window(step))
        assert right, f"step {step} has other gradients than its window of the pool"
    return list(seen)
