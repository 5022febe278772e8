"""What the ranks of the DDP-feature tests run. Every function is ``job(rank, world, ...)``."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from jobs import batch, flat, flat_grad, loss_of, owed, small_model
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from compressed_ddp import (
    CompressionConfig,
    DistributedBackend,
    ErrorFeedbackBuffer,
    SplitAdam,
    SplitSGD,
    SyncError,
    attach,
    compressed_hook,
    get_compressor,
    reshard_states,
)
from compressed_ddp.communication import GradientSync, transport
from compressed_ddp.communication.rollcall import open_sockets

PATIENT = 600.0
"""A sync_timeout beyond the pool's own deadline: a rank that waits for it fails its test."""
EXACT = {"ratio": 1.0, "values": "fp32"}


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "compressed" in thread.name]


def mean_of(tensor: Tensor, world: int) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / world


def accumulation(rank: int, world: int) -> tuple[Tensor, Tensor, int]:
    """Three micro-steps under no_sync, one with sync: the hook sees the sum, once."""
    model = DDP(small_model())
    sync = attach(model, CompressionConfig(**EXACT))
    twin = small_model()
    for micro in range(4):
        with model.no_sync() if micro < 3 else contextlib.nullcontext():
            loss_of(model, rank, micro).backward()
        loss_of(twin, rank, micro).backward()
    sync.close()
    return flat_grad(model), mean_of(flat_grad(twin), world), sync.step


def micro_batches(rank: int, world: int, config: dict[str, Any]) -> dict[str, Tensor]:
    """Where five steps of four micro-batches lead, and five steps of the same examples at once."""
    batches = [[batch(rank, 4 * step + micro) for micro in range(4)] for step in range(5)]
    found: dict[str, list[Tensor]] = {"parameters": [], "residuals": []}
    for together in (False, True):
        model = DDP(small_model(), bucket_cap_mb=0.01)
        sync = attach(model, CompressionConfig(**config))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for parts in batches:
            optimizer.zero_grad()
            if together:
                parts = [(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))]
            for i, (x, y) in enumerate(parts):
                with model.no_sync() if i + 1 < len(parts) else contextlib.nullcontext():
                    (nn.functional.mse_loss(model(x), y) / len(parts)).backward()
            optimizer.step()
        assert sync.step == 5, "compressed once for four micro-batches"
        found["parameters"].append(flat(model))
        found["residuals"].append(owed(sync, model.module))
        sync.close()
    assert found["residuals"][0].any()
    return {name: torch.stack(both) for name, both in found.items()}


class Branches(nn.Module):
    """Uses one of two branches, another one on every rank; ``never`` is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(20, 30), nn.Linear(20, 30), nn.Linear(20, 30)
        self.head = nn.Linear(30, 5)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return self.head(torch.tanh((self.left if left else self.right)(x)))


def unused(rank: int, world: int, config: dict[str, Any]) -> tuple[Tensor, bool]:
    torch.manual_seed(0)
    model = DDP(Branches(), find_unused_parameters=True, bucket_cap_mb=0.003)
    sync = attach(model, CompressionConfig(**config))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(10):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x, left=(rank + step) % 2 == 0), y).backward()
        optimizer.step()
    sync.close()
    never = model.module.never.weight.grad
    return flat(model), never is None or not never.any()


def with_ddp(rank: int, world: int, ddp: dict[str, Any], config: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A model of 2 MB trained by plain DDP and by ours with the same DDP options."""
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 700), nn.ReLU(), nn.Linear(700, 700), nn.ReLU(), nn.Linear(700, 5))
        model = DDP(net, **ddp)
        sync = attach(model, CompressionConfig(**config)) if ours else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        results.append(flat(model))
        if sync is not None:
            sync.close()
    return results[0], results[1]


def frozen_and_shared(rank: int, world: int) -> tuple[Tensor, Tensor, list[str]]:
    """A frozen layer and a weight used twice under two names."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(20, 20).requires_grad_(False)
            self.once = nn.Linear(20, 20, bias=False)
            self.twice = nn.Linear(20, 20, bias=False)
            self.twice.weight = self.once.weight
            self.head = nn.Linear(20, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.twice(torch.tanh(self.once(self.frozen(x)))))

    parameters = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = DDP(Tied())
        sync = attach(model, CompressionConfig(**EXACT)) if ours else None
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        parameters.append(flat(model))
    names = sorted(sync.state_dict()["residuals"])
    sync.close()
    return parameters[0], parameters[1], names


def uneven(rank: int, world: int, config: dict[str, Any]) -> tuple[Tensor, float, float]:
    """Rank r has 3 + 2 r batches; join() lets the others go on. A finished rank keeps its residual."""
    model = DDP(small_model(), bucket_cap_mb=0.01)
    sync = attach(model, CompressionConfig(**config))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join():
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        at_the_end_of_data = sync.residual_norm()
    after = sync.residual_norm()
    sync.close()
    return flat(model), at_the_end_of_data, after


def two_models(rank: int, world: int) -> tuple[Tensor, Tensor, int]:
    """Both backwards in flight by turns, in another order on every rank's second model."""
    models = [DDP(small_model(seed), bucket_cap_mb=0.01) for seed in (1, 2)]
    syncs = [attach(model, CompressionConfig(ratio=0.05)) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for step in range(10):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    threads = len(our_threads())
    for sync in syncs:
        sync.close()
    return flat(models[0]), flat(models[1]), threads


def half_precision(rank: int, world: int, dtype: str, collective: str) -> tuple[Tensor, float, str]:
    """A model whose parameters, and so gradients, are 16-bit; the law holds in float32."""
    model = DDP(small_model().to(getattr(torch, dtype)), bucket_cap_mb=0.01)
    sync = attach(model, CompressionConfig(ratio=0.05, collective=collective, min_compress_numel=100))
    true, applied = torch.zeros(2, flat(model).numel(), dtype=torch.float64)
    twin = small_model().to(getattr(torch, dtype))
    for step in range(20):
        x, y = batch(rank, step)
        for one in (model, twin):
            one.zero_grad()
            nn.functional.mse_loss(one(x.to(getattr(torch, dtype))).float(), y).backward()
        true += flat_grad(twin)
        applied += flat_grad(model)
    dist.all_reduce(true)
    debt = owed(sync, model.module).double()
    dist.all_reduce(debt)
    sync.close()
    error = (applied + debt / world - true / world).norm() / true.norm()
    residual = next(iter(sync.state_dict()["residuals"].values()))
    return applied, error.item(), str(residual.dtype)


def subgroup(rank: int, world: int) -> tuple[Tensor, int]:
    """DDP over ranks 0 and 1 only, attached twice; the others never hear of it."""
    group = dist.new_group([0, 1])
    if rank > 1:
        return torch.empty(0), 0
    for _ in range(2):
        model = DDP(small_model(), process_group=group)
        sync = attach(model, CompressionConfig(ratio=0.05))
        for step in range(3):
            model.zero_grad()
            loss_of(model, rank, step).backward()
        sync.close()
    return flat_grad(model), sync.stats.total.steps


def backend_by_device(rank: int, world: int, backend: str) -> tuple[str, bool]:
    """What is known of the network where the group has no single name, and whether ranks can be called."""
    sync = attach(DDP(small_model(), process_group=dist.new_group(backend=backend)))
    net = sync._transport
    found = net.backend, net._roll is not None
    sync.close()
    return found


def overflow(rank: int, world: int, collective: str) -> dict[str, Any]:
    """GradScaler: an infinity on one rank makes all ranks skip, residuals untouched, and go on."""
    model = DDP(small_model(), bucket_cap_mb=0.01)
    sync = attach(model, CompressionConfig(ratio=0.05, collective=collective))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    skipped = []
    for step in range(8):
        optimizer.zero_grad()
        before, parameters = sync.state_dict(), flat(model)
        loss = loss_of(model, rank, step)
        if step in (3, 5) and rank == step % world:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if torch.equal(parameters, flat(model)):
            skipped.append(step)
            after = sync.state_dict()
            for name, residual in before["residuals"].items():
                assert torch.equal(residual, after["residuals"][name]), name
            for old, new in zip(before["buckets"], after["buckets"], strict=True):
                for key, tensor in old["state"].items():
                    assert torch.equal(tensor, new["state"][key])
    sync.close()
    return {"skipped": skipped, "parameters": flat(model), "noted": sync.stats.total.skipped_steps}


def random_overflows(rank: int, world: int, collective: str, seed: int) -> dict[str, Any]:
    """Overflows at random ranks and steps: the law in unscaled units, over the steps that count."""
    chance = torch.Generator().manual_seed(seed)  # the same on all ranks
    model = DDP(small_model(), bucket_cap_mb=0.01)
    sync = attach(model, CompressionConfig(ratio=0.05, collective=collective))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    true, applied = torch.zeros(2, flat(model).numel(), dtype=torch.float64)
    scales, skipped = [], 0
    for step in range(30):
        hit = (
            int(torch.randint(world, (), generator=chance))
            if float(torch.rand((), generator=chance)) < 0.25
            else -1
        )
        twin = copy.deepcopy(model.module)
        loss_of(twin, rank, step).backward()
        optimizer.zero_grad()
        sync.loss_scale = scaler.get_scale()
        scales.append(sync.loss_scale)
        loss = loss_of(model, rank, step)
        scaler.scale(loss * torch.inf if rank == hit else loss).backward()
        before = flat(model)
        scaler.unscale_(optimizer)
        if hit < 0:
            true += mean_of(flat_grad(twin), world)
            applied += flat_grad(model)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, flat(model)) == (hit >= 0)
        skipped += hit >= 0
    debt = mean_of(owed(sync, model.module), world)
    assert sync.stats.total.skipped_steps == skipped
    sync.close()
    return {
        "parameters": flat(model),
        "law": (applied + debt - true).abs().max().item() / true.abs().max().item(),
        "scales": scales,
        "skipped": skipped,
    }


def drift(rank: int, world: int) -> list[str]:
    """Rank 1's weight changes by one bit: who says what, and when."""
    model = DDP(small_model(), bucket_cap_mb=0.01)
    sync = attach(model, CompressionConfig(ratio=0.05, guard_every=4))
    optimizer, said = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(10):
        if step == 5 and rank == 1:
            with torch.no_grad():
                bits = model.module[3].bias.view(torch.int32)
                bits[7] ^= 1
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        try:
            loss.backward()
        except RuntimeError:
            said.append(f"{step} {type(sync.error).__name__} {sync.error}")
            break
        optimizer.step()
    sync.close()
    return [*said, *our_threads()]


def refused(rank: int, world: int, what: str) -> str:
    """What ``attach`` or backward says to a model that cannot be compressed."""
    try:
        if what == "sparse":
            attach(DDP(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))))
        elif what == "complex":
            attach(DDP(nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])))
        elif what == "bare":
            attach(small_model())  # type: ignore[arg-type]
        elif what == "twice":
            model = DDP(small_model())
            attach(model)
            attach(model)
        elif what == "twice on one rank":
            model = DDP(small_model())
            if rank:
                model.register_comm_hook(None, default_hooks.allreduce_hook)
            attach(model, CompressionConfig(sync_timeout=PATIENT))
        elif what == "built in":
            model = DDP(small_model())
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
            attach(model)
        elif what == "text":
            attach(DDP(small_model()), "topk")  # type: ignore[arg-type]
        elif what == "pairs":
            DistributedBackend().allreduce_gradients(small_model().parameters())  # type: ignore[arg-type]
        elif what == "momentum twice":
            model = DDP(small_model())
            attach(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        elif what == "momentum twice on one rank":
            model = DDP(small_model())
            one = SplitSGD(model.parameters()) if rank else torch.optim.SGD(model.parameters(), 0.1, 0.9)
            attach(model, CompressionConfig(sync_timeout=PATIENT), optimizer=one)
        elif what == "ignored":
            net = small_model()
            DDP._set_params_and_buffers_to_ignore_for_model(net, ["0.bias"])
            model = DDP(net)
            attach(model, optimizer=SplitSGD(model.parameters()))
        elif what == "one bit, unused":
            model = DDP(small_model(), find_unused_parameters=True)
            attach(model, CompressionConfig(compressor="sign"))
        elif what == "closed":
            model = DDP(small_model())
            attach(model).close()
            loss_of(model, rank, 0).backward()
        elif what == "name":
            attach(DDP(small_model()), CompressionConfig(compressor="topq"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def disagree(rank: int, world: int, field: str) -> str:
    """The last rank differs in one thing; everyone must hear of it, soon."""
    odd = rank == world - 1
    ratio = 0.02 if odd and field == "ratio" else 0.01
    config = CompressionConfig(ratio=ratio, sync_timeout=PATIENT)
    model = small_model()
    if odd and field == "frozen":
        model[0].weight.requires_grad_(False)
    if odd and field == "version":
        from compressed_ddp.communication import handshake

        handshake.__version__ = "0.0.1"
    try:
        if field == "frozen":
            backend = DistributedBackend(get_compressor(0.01), ErrorFeedbackBuffer(), config=config)
            loss_of(model, rank, 0).backward()
            backend.allreduce_gradients(model.named_parameters())
        else:
            attach(DDP(model), config)
    except SyncError as error:
        return str(error)
    finally:
        if odd and field == "version":
            from compressed_ddp.version import __version__

            handshake.__version__ = __version__
    return "nothing was said"


def told_by_loading(sync: GradientSync, state: Any) -> str:
    try:
        sync.load_state_dict(state)
    except (ValueError, SyncError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def damaged_state(rank: int, world: int, what: str) -> tuple[str, bool]:
    """Rank 1's state does not fit: everyone must refuse, and nothing may change."""
    model = DDP(small_model())
    sync = attach(model, CompressionConfig(ratio=0.05, collective="sharded"))
    loss_of(model, rank, 0).backward()
    state = sync.state_dict()
    before = sync.residual_norm()
    if rank == 1:
        name = next(iter(state["residuals"]))
        if what == "shape":
            state["residuals"][name] = torch.zeros(3)
        elif what == "name":
            state["residuals"]["stranger"] = torch.zeros(3)
        elif what == "nan":
            state["residuals"][name][:] = torch.nan
        elif what == "rank":
            state["rank"] = 0
        elif what == "world":
            state["world_size"] = 7
        elif what == "step":
            state["step"] = 5
        elif what == "empty":
            state = {}
        elif what == "format":
            state["format"] = 99
        elif what == "none":
            state = None
        elif what == "list":
            state["residuals"][name] = [0.0]
        elif what == "integer":
            state["residuals"][name] = state["residuals"][name].long()
        elif what == "no names":
            del state["buckets"][0]["names"]
        elif what == "owner nan":
            state["buckets"][0]["state"]["owner"][:] = torch.nan
        elif what == "owner shape":
            state["buckets"][0]["state"]["owner"] = torch.zeros(5)
    said = told_by_loading(sync, state)
    unchanged = sync.residual_norm() == before and sync.step == 1
    loss_of(model, rank, 1).backward()
    sync.close()
    return said, unchanged


def invalid_on_one_rank(rank: int, world: int) -> str:
    scope = "tensor" if rank == 1 else "bucket"
    config = CompressionConfig(compressor="randomk", scope=scope, sync_timeout=PATIENT)
    try:
        attach(DDP(small_model()), config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def alternating_branches(rank: int, world: int, config: dict[str, Any]) -> float:
    """All ranks use the same branch, another one every step; relative error of applied + owed."""
    torch.manual_seed(0)
    model = DDP(Branches(), find_unused_parameters=True, bucket_cap_mb=0.003)
    sync = attach(model, CompressionConfig(**config))
    twin = copy.deepcopy(model.module)
    true, applied = torch.zeros(2, flat(model).numel(), dtype=torch.float64)
    for step in range(20):
        x, y = batch(rank, step)
        for net, sums in ((model, applied), (twin, true)):
            net.zero_grad()
            nn.functional.mse_loss(net(x, left=step % 2 == 0), y).backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
            sums += torch.cat([grad.reshape(-1) for grad in grads])
    debt = owed(sync, model.module).double()
    dist.all_reduce(true)
    dist.all_reduce(debt)
    sync.close()
    return float((applied + debt / world - true / world).norm() / (true / world).norm())


def fails_midway(rank: int, world: int, way: str) -> dict[str, Any]:
    """An error planted in rank 1's first bucket of the third step, with others queued behind it."""
    model = DDP(small_model(), bucket_cap_mb=0.01)
    sync = attach(model, CompressionConfig(ratio=0.05, collective=way, sync_timeout=PATIENT))
    for step in range(2):
        model.zero_grad()
        loss_of(model, rank, step).backward()
    before = sync.state_dict()
    if rank == 1:

        def fail(*_: Any, **__: Any) -> None:
            raise ValueError("planted")

        sync._reducer._reduce_part_ = fail  # type: ignore[method-assign]
    said = "nothing was said"
    try:
        loss_of(model, rank, 2).backward()
    except RuntimeError as error:
        said = str(error)
    after = sync.state_dict()
    unchanged = all(torch.equal(r, after["residuals"][name]) for name, r in before["residuals"].items())
    dist.barrier()  # the others must have heard before this rank closes anything
    sync.close()
    return {
        "said": said,
        "unchanged": unchanged,
        "steps": after["step"],
    }


def forgotten(rank: int, world: int) -> tuple[int, int]:
    """Three models attached, used and dropped without a close."""
    models = [DDP(small_model()) for _ in range(3)]
    for model in models:
        attach(model, CompressionConfig(ratio=0.05))
        loss_of(model, rank, 0).backward()
    running = len(our_threads())
    dist.barrier()
    del model, models
    deadline = time.monotonic() + 10
    while our_threads() and time.monotonic() < deadline:
        gc.collect()  # a thread may still be leaving its last piece of work when the first one runs
        time.sleep(0.05)
    return running, len(our_threads())


def channels_last(rank: int, world: int) -> tuple[float, bool]:
    """With one entry sent, all but one entry of the residual is the gradient, in logical order."""
    torch.manual_seed(0)
    net = nn.Conv2d(8, 16, 3, bias=False).to(memory_format=torch.channels_last)
    twin = copy.deepcopy(net)
    model = DDP(net)
    sync = attach(model, CompressionConfig(ratio=1e-6, values="fp32", min_compress_numel=0))
    x = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    twin(x).square().sum().backward()
    state = sync.state_dict()
    difference = (state["residuals"]["weight"] - twin.weight.grad).abs().reshape(-1)
    sync.load_state_dict(state)
    again = sync.state_dict()["residuals"]["weight"]
    sync.close()
    return difference.sort().values[:-1].max().item(), torch.equal(again, state["residuals"]["weight"])


def channels_last_penalty(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Everything sent, the same gradient on all: SplitAdam's L2 penalty, and that of torch's Adam."""
    torch.manual_seed(0)
    net = nn.Conv2d(8, 16, 3, bias=False).to(memory_format=torch.channels_last)
    twin, model = copy.deepcopy(net), DDP(net)
    options = {"lr": 0.01, "weight_decay": 0.5}
    half = SplitAdam(model.parameters(), beta1=0.9, decoupled_weight_decay=False, **options)
    whole = torch.optim.Adam(twin.parameters(), **options)
    with attach(model, CompressionConfig(**EXACT), optimizer=half):
        for step in range(5):
            x = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(step))
            for each, optimizer in ((model, half), (twin, whole)):
                optimizer.zero_grad()
                each(x).square().mean().backward()
                optimizer.step()
    return net.weight.detach(), twin.weight.detach()


def channels_last_owners(rank: int, world: int) -> tuple[float, str]:
    """A sharded step of a channels-last model, resharded to one worker: the law holds for what it owes."""
    torch.manual_seed(0)
    net = nn.Conv2d(8, 16, 3, bias=False).to(memory_format=torch.channels_last)
    twin, model = copy.deepcopy(net), DDP(net)
    sync = attach(model, CompressionConfig(ratio=0.02, collective="sharded", min_compress_numel=0))
    x = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    twin(x).square().sum().backward()
    applied, true = net.weight.grad, mean_of(twin.weight.grad.contiguous(), world)
    states: list[Any] = [None] * world
    dist.all_gather_object(states, sync.state_dict())
    assert any(state["buckets"][0]["state"]["owner"].any() for state in states)
    alone = reshard_states(states, 1)[0]["residuals"]["weight"]
    spoilt = states[rank]
    if rank == 0:  # and all hear of it
        spoilt["buckets"][0]["strides"][0] = list(torch.empty(16, 8, 3, 3).stride())
    try:
        sync.load_state_dict(spoilt)
        said = ""
    except (ValueError, SyncError) as error:
        said = str(error)
    sync.close()
    return (applied + alone - true).abs().max().item() / true.abs().max().item(), said


class Sliced(nn.Module):
    """A weight that is part of a larger tensor: its memory has gaps, and DDP lays its gradient by indices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(40, 60)[:, :45])
        self.head = nn.Linear(40, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ self.weight.t()))


def sliced(rank: int, world: int, way: str) -> tuple[bool, bool, float]:
    """Six steps in one go, and with a new model and a saved state after three; and the law for that state."""
    applied, true = torch.zeros(2, 40, 45)

    def go_on(begin: int, end: int, saved: tuple[Any, Any] | None = None) -> tuple[Any, Any, Any]:
        net = Sliced()
        model = DDP(net)
        with attach(model, CompressionConfig(ratio=0.05, collective=way)) as sync:
            if saved is not None:
                net.load_state_dict(saved[0])
                sync.load_state_dict(saved[1])
            for step in range(begin, end):
                x = torch.randn(8, 45, generator=torch.Generator().manual_seed(10 * step + rank))
                twin = copy.deepcopy(net)
                twin(x).square().mean().backward()
                model(x).square().mean().backward()
                if saved is None and step < 3:
                    applied.add_(net.weight.grad)
                    true.add_(twin.weight.grad)
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter -= 0.1 * parameter.grad
                model.zero_grad()
            assert not net.weight.is_contiguous()
            return copy.deepcopy(net.state_dict()), sync.state_dict(), sync.step

    whole = go_on(0, 6)
    applied.zero_(), true.zero_()
    half = go_on(0, 3)
    states: list[Any] = [None] * world
    dist.all_gather_object(states, half[1])
    owed = reshard_states(states, 1)[0]["residuals"]["weight"]
    law = (applied + owed - mean_of(true, world)).abs().max().item() / mean_of(true, world).abs().max().item()
    resumed = go_on(3, 6, half[:2])
    weights = all(torch.equal(whole[0][name], resumed[0][name]) for name in whole[0])
    debts = all(
        torch.equal(debt, resumed[1]["residuals"][name]) for name, debt in whole[1]["residuals"].items()
    )
    return weights, debts, law


def other_default(
    rank: int, world: int, default: torch.dtype, own: torch.dtype, config: dict[str, Any]
) -> tuple[Tensor, float]:
    """Ten steps of a model of dtype ``own`` where torch makes tensors of dtype ``default``; and the law."""
    net = small_model().to(own)
    torch.set_default_dtype(default)
    try:
        model, twin = DDP(net, bucket_cap_mb=0.01), copy.deepcopy(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        true = applied = torch.zeros_like(flat(net), dtype=torch.float64)
        with attach(model, CompressionConfig(**config, guard_every=1)) as sync:
            for step in range(10):
                generator = torch.Generator().manual_seed(100 * step + rank)
                x = torch.randn(8, 20, generator=generator, dtype=own)
                twin.load_state_dict(net.state_dict())
                twin.zero_grad()
                twin(x).square().mean().backward()
                true = true + flat_grad(twin)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                applied = applied + flat_grad(net)
                optimizer.step()
            owed = sync.state_dict()["residuals"]
        debts = [owed[name].reshape(-1) for name, _ in net.named_parameters() if name in owed]
        rest = applied + mean_of(torch.cat(debts), world) if debts else applied
        mean = mean_of(true, world)
        return flat(net), ((rest - mean).abs().max() / mean.abs().max()).item()
    finally:
        torch.set_default_dtype(torch.float32)


def manual_disagreement(rank: int, world: int, what: str) -> str:
    options = {"ratio": 0.02 if rank else 0.01} if what == "ratio" else {"values": "bf16" if rank else "fp16"}
    backend = DistributedBackend(get_compressor(**options), ErrorFeedbackBuffer())
    model = small_model()
    loss_of(model, rank, 0).backward()
    try:
        backend.allreduce_gradients(model.named_parameters())
    except SyncError as error:
        return str(error)
    return "nothing was said"


def manual_statistics(rank: int, world: int) -> tuple[str, float, dict[str, Any], str]:
    backend = DistributedBackend(get_compressor(0.1, values="fp16"), ErrorFeedbackBuffer())
    model = small_model()
    loss_of(model, rank, 0).backward()
    backend.allreduce_gradients(model.named_parameters())
    named = DistributedBackend(config=CompressionConfig(compressor="qsgd"))
    assert named.compressor is not None
    stats = backend.stats
    return str(stats), stats.total.exposed, vars(backend.compressor.stats), named.compressor.name


def destroyed(rank: int, world: int) -> tuple[list[str], list[str]]:
    """The user destroys all process groups and never calls close."""
    model = DDP(small_model())
    attach(model, CompressionConfig(ratio=0.05))
    loss_of(model, rank, 0).backward()
    running = our_threads()
    dist.barrier()
    dist.destroy_process_group()
    deadline = time.monotonic() + 10
    while our_threads() and time.monotonic() < deadline:
        time.sleep(0.05)
    return running, our_threads()


def manual(rank: int, world: int, config: dict[str, Any] | None, *, feedback: bool = True) -> dict[str, Any]:
    """The write-up's loop: several buckets, one parameter without a gradient on odd ranks."""
    model = small_model()
    compressor = None if config is None else get_compressor(**{"ratio": 0.05} | config)
    buffer = ErrorFeedbackBuffer() if feedback else None
    backend = DistributedBackend(compressor, buffer, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    true, applied = torch.zeros(2, flat(model).numel(), dtype=torch.float64)
    for step in range(30):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if rank % 2:
            model[-1].bias.grad = None
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        true += torch.cat([grad.reshape(-1) for grad in grads])
        backend.allreduce_gradients(model.named_parameters())
        applied += flat_grad(model)
        optimizer.step()
    dist.all_reduce(true)
    result = {"parameters": flat(model), "stats": backend.stats.as_dict()}
    result |= {"true": true / world, "applied": applied}
    if buffer:
        debt = torch.cat([buffer.residual(name).reshape(-1) for name, _ in model.named_parameters()]).double()
        dist.all_reduce(debt)
        result["debt"] = debt / world
    backend.close()
    return result


def manual_overflows(rank: int, world: int) -> dict[str, Any]:
    """A GradScaler in a loop of one's own: overflows on one rank; the law in the gradient's own units."""
    model = small_model()
    backend = DistributedBackend(get_compressor(0.05), ErrorFeedbackBuffer(), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    true, applied = torch.zeros(2, flat(model).numel(), dtype=torch.float64)
    skipped = []
    for step in range(12):
        optimizer.zero_grad()
        backend.loss_scale = scaler.get_scale()
        loss = loss_of(model, rank, step)
        overflows = step in (2, 7)
        scaler.scale(loss * torch.inf if overflows and rank == step % world else loss).backward()
        mine, before = flat_grad(model) / backend.loss_scale, flat(model)
        backend.allreduce_gradients(model.named_parameters())
        scaler.unscale_(optimizer)
        if not overflows:
            true += mine
            applied += flat_grad(model)
        scaler.step(optimizer)
        scaler.update()
        skipped += [step] if torch.equal(before, flat(model)) else []
    debt = mean_of(owed(backend, model).double(), world)
    law = (applied + debt - mean_of(true, world)).abs().max().item() / applied.abs().max().item()
    backend.close()
    return {"parameters": flat(model), "skipped": skipped, "law": law}


def foreign_message(rank: int, world: int) -> str:
    """Rank 0's network damages what it sends: the receiver's backward quotes the WireError."""
    model = DDP(small_model())
    sync = attach(model, CompressionConfig(ratio=0.05, collective="allgather", sync_timeout=5, guard_every=0))
    if rank == 0:
        real = sync._transport.all_gather

        def damaging(out: Tensor, row: Tensor) -> None:
            damaged = row.clone()
            damaged[100] ^= 0xFF
            real(out, damaged)

        sync._transport.all_gather = damaging  # type: ignore[method-assign]
    try:
        loss_of(model, rank, 0).backward()
    except RuntimeError as error:
        said = str(error)
    else:
        said = "nothing was said"
    try:
        loss_of(model, rank, 1).backward()
    except Exception as error:
        said += f" // then {type(error).__name__}: {error}"
    assert isinstance(sync.error, SyncError) and sync.error.phase == "decode"
    kept = f"{type(sync.error).__name__} of bucket {sync.error.bucket}"
    sync.close()
    return f"{said} // kept {kept}, by {type(sync.error.__cause__).__name__}"


def own_registration(rank: int, world: int) -> int:
    """The form every PyTorch user knows: register_comm_hook(state, hook)."""
    model = DDP(small_model())
    sync = GradientSync(model, CompressionConfig(ratio=0.05))
    model.register_comm_hook(sync, compressed_hook)
    loss_of(model, rank, 0).backward()
    sync.close()
    return sync.stats.total.steps


def odd_state_of_a_channels_last_model(rank: int, world: int, what: str) -> tuple[str, bool]:
    """Rank 1's state is not one that a run saves: laying it out in memory's order must not raise alone."""
    net = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    model = DDP(net)
    sync = attach(model, CompressionConfig(ratio=0.05, collective="sharded", sync_timeout=PATIENT))
    model(torch.ones(2, 4, 5, 5)).sum().backward()
    state, before = sync.state_dict(), sync.residual_norm()
    if rank == 1:
        residuals = state["residuals"]
        if what == "meta":
            residuals["weight"] = torch.empty(8, 4, 3, 3, device="meta")
        elif what == "sparse":
            residuals["weight"] = torch.zeros(8, 4, 3, 3).to_sparse()
        elif what == "wide":
            residuals["weight"] = torch.full((8, 4, 3, 3), 1e300, dtype=torch.float64)
        elif what == "deep":
            for _ in range(3000):
                residuals["a"] = {}
                residuals = residuals["a"]
        elif what == "buckets":
            state["buckets"] = 5
        elif what == "strides":
            state["buckets"][0]["strides"] = [5]
    said = told_by_loading(sync, state)
    unchanged = sync.residual_norm() == before and sync.step == 1
    model(torch.ones(2, 4, 5, 5)).sum().backward()
    sync.close()
    return said, unchanged


def refused_addresses(rank: int, world: int) -> tuple[str, list[tuple[int, int, int]]]:
    """Attaching fails after the group was made: group, threads and sockets are given back each time."""

    class Refuses:
        def __init__(self, *_: Any) -> None:
            raise SyncError("rank 1 gave b'x' as its address")

    model, said, held = DDP(small_model()), "nothing was said", []
    kept, transport.RollCall = transport.RollCall, Refuses  # type: ignore[misc]
    try:
        for _ in range(3):
            try:
                attach(model, CompressionConfig())
            except SyncError as error:
                said = str(error)
            gc.collect()
            dist.barrier()
            groups = len(dist.distributed_c10d._world.pg_map)
            held.append((groups, len(os.listdir("/proc/self/task")), len(open_sockets())))
    finally:
        transport.RollCall = kept  # type: ignore[misc]
    return said, held


def attached_again(rank: int, world: int, built_in: bool) -> list[tuple[int, int, int]]:
    """Groups, threads and sockets after each of three vain attempts to attach to a model with a hook."""
    model, held = DDP(small_model()), []
    if built_in:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    else:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    for _ in range(3):
        with contextlib.suppress(ValueError):
            attach(model)
        gc.collect()
        dist.barrier()
        groups = len(dist.distributed_c10d._world.pg_map)
        held.append((groups, len(os.listdir("/proc/self/task")), len(open_sockets())))
    return held
