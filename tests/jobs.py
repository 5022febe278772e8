"""What the ranks of distributed tests run. Every function is ``job(rank, world, ...)``."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tcp import resent_by_this_process
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from compressed_ddp import CompressionConfig, LocalSync, attach
from compressed_ddp.communication import TorchTransport
from compressed_ddp.error_feedback.state import fold_owner_


def small_model(seed: int = 0) -> nn.Sequential:
    """Nine thousand parameters in tensors small and large."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(20, 96), nn.LayerNorm(96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 5)
    )


def batch(rank: int, step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, 20, generator=generator), torch.randn(size, 5, generator=generator)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).float() for p in module.parameters()])


def flat_grad(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1).float() for p in module.parameters() if p.grad is not None])


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.mse_loss(model(x).float(), y)


def owed(sync: Any, model: nn.Module) -> Tensor:
    """What this rank owes as a worker, and P times what it owes as an owner, in parameter order."""
    state = sync.state_dict()
    total = {name: state["residuals"].get(name, torch.zeros_like(p)) for name, p in model.named_parameters()}
    for bucket in state["buckets"]:
        if "owner" in bucket["state"]:
            shapes = [torch.Size(shape) for shape in bucket["shapes"]]
            residual = torch.zeros(sum(shape.numel() for shape in shapes))
            fold_owner_(residual, bucket["state"]["owner"], state["rank"], state["world_size"])
            parts = residual.split([shape.numel() for shape in shapes])
            for name, shape, part in zip(bucket["names"], shapes, parts, strict=True):
                total[name] = total[name] + part.view(shape)
    return torch.cat([debt.reshape(-1) for debt in total.values()])


def train(
    rank: int,
    world: int,
    config: dict[str, Any] | None,
    *,
    steps: int = 50,
    ddp: dict[str, Any] | None = None,
    save_to: str | None = None,
    resume_from: str | None = None,
    check_law: bool = False,
) -> dict[str, Any]:
    """Train with momentum SGD up to step ``steps``, from the start or from a folder of checkpoints."""
    model = DDP(small_model(), **({"bucket_cap_mb": 0.01} | (ddp or {})))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = attach(model, CompressionConfig(**config)) if config is not None else None
    true, applied = torch.zeros(2, flat(model).numel(), dtype=torch.float64)
    start, layouts = 0, set()
    if resume_from and sync is not None:
        saved = torch.load(Path(resume_from) / f"{rank}.pt", weights_only=True)
        start, true, applied = saved["step"], saved["true"], saved["applied"]
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sync.load_state_dict(saved["sync"])
    for step in range(start, steps):
        if check_law:
            twin = copy.deepcopy(model.module)
            loss_of(twin, rank, step).backward()
            true += flat_grad(twin)
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        applied += flat_grad(model)
        if sync is not None and check_law:
            layouts.add(tuple(tuple(bucket["names"]) for bucket in sync.state_dict()["buckets"]))
        optimizer.step()
    result = {"parameters": flat(model), "loss": loss.item(), "layouts": len(layouts)}
    if sync is not None:
        result["stats"] = sync.stats.as_dict()
        if save_to:
            state = {"step": steps, "true": true, "applied": applied, "model": model.module.state_dict()}
            state |= {"optimizer": optimizer.state_dict(), "sync": sync.state_dict()}
            torch.save(state, Path(save_to) / f"{rank}.pt")
        if check_law:
            sums, debt = true.clone(), owed(sync, model.module).double()
            dist.all_reduce(sums)
            dist.all_reduce(debt)
            result["law"] = (applied + debt / world - sums / world).abs().max().item()
            result["scale"] = (sums / world).abs().max().item()
        sync.close()
    result["threads"] = [t.name for t in threading.enumerate() if "compressed" in t.name]
    return result


def train_many(rank: int, world: int, configs: list[dict[str, Any]], *, steps: int) -> list[dict[str, Any]]:
    """One training after the other in one process and one process group."""
    two_buckets = {"bucket_cap_mb": 0.02}
    return [train(rank, world, config, steps=steps, ddp=two_buckets) for config in configs]


def gathered(rank: int, world: int, sizes: list[int]) -> list[bool]:
    """Whether everyone's row of so many bytes arrives, in rank order."""
    net, right = TorchTransport(), []
    for size in sizes:
        rows = [torch.arange(size).add(other).to(torch.uint8) for other in range(world)]
        out = torch.zeros(world, size, dtype=torch.uint8)
        net.all_gather(out, rows[rank])
        right.append(torch.equal(out, torch.stack(rows)))
    net.close()
    return right


def printed_stats(rank: int, world: int, config: dict[str, Any]) -> str:
    model = DDP(small_model())
    with attach(model, CompressionConfig(**config)) as sync:
        loss_of(model, rank, 0).backward()
        return str(sync.stats)


def train_digits(rank: int, world: int, config: dict[str, Any] | None, *, epochs: int) -> dict[str, Any]:
    """Real handwritten digits; accuracy and loss on the test part after each epoch."""
    from sklearn.datasets import load_digits

    images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    images = images.float().div(16)
    torch.manual_seed(0)
    order = torch.randperm(len(labels))
    train, test = order[rank:1400:world], order[1400:]
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DDP(net)
    sync = attach(model, CompressionConfig(**config)) if config is not None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    accuracy, losses = [], []
    for _ in range(epochs):
        for at in train.split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[at]), labels[at]).backward()
            optimizer.step()
        with torch.no_grad():
            scores = net(images[test])
        accuracy.append((scores.argmax(1) == labels[test]).float().mean().item())
        losses.append(nn.functional.cross_entropy(scores, labels[test]).item())
    result = {"accuracy": accuracy, "loss": losses, "parameters": flat(net)}
    if sync is not None:
        result["saved"] = sync.stats.total.saved()
        sync.close()
    return result


def loopback_bytes() -> int:
    """What the loopback interface of this process's network namespace has sent so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    fields = next(line for line in lines if line.strip().startswith("lo:")).split()
    return int(fields[9])


def wire_bytes(rank: int, world: int, config: dict[str, Any] | None, *, steps: int) -> dict[str, Any]:
    """What the loopback interface counted over ``steps`` steps, beside what the ledger says."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 2300), nn.ReLU(), nn.Linear(2300, 2250), nn.ReLU(), nn.Linear(2250, 5))
    model = DDP(net)
    sync = attach(model, CompressionConfig(**config)) if config is not None else None
    for warm_up in range(2):  # DDP rebuilds its buckets after the first step, with traffic of its own
        loss_of(model, rank, warm_up).backward()
    sent = sync.stats.total.bytes_sent if sync is not None else 0
    dense = sync.stats.total.dense_bytes if sync is not None else 0
    dist.barrier()
    before, again = loopback_bytes(), resent_by_this_process()
    dist.barrier()
    for step in range(steps):
        loss_of(model, rank, step).backward()
    dist.barrier()
    result = {"crossed": loopback_bytes() - before, "parameters": flat(model).numel()}
    result["resent"] = resent_by_this_process() - again
    if sync is not None:
        result["sent"] = sync.stats.total.bytes_sent - sent
        result["dense"] = sync.stats.total.dense_bytes - dense
        sync.close()
    return result


def train_local(
    rank: int, world: int, config: dict[str, Any], *, steps: int, save_to: str | None = None, at: int = 0
) -> dict[str, Any]:
    """AdamW by itself on every rank, a meeting every 4 steps; saved, or resumed, after step ``at``."""
    model = small_model(seed=rank)  # rank 0's become everyone's
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    with LocalSync(model, CompressionConfig(**config), steps=4, bucket_cap_mb=0.01) as local:
        if at and save_to:
            saved = torch.load(Path(save_to) / f"{rank}.pt", weights_only=True)
            optimizer.load_state_dict(saved["optimizer"])
            local.load_state_dict(saved["local"])
        losses = []
        for step in range(at, steps):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            optimizer.step()
            local.step()
            losses.append(loss.item())
        if save_to and not at:
            torch.save(
                {"optimizer": optimizer.state_dict(), "local": local.state_dict()},
                Path(save_to) / f"{rank}.pt",
            )
        before = flat(model)
        local.synchronize()
        return {"before": before, "parameters": flat(model), "losses": losses, "stats": local.stats.as_dict()}


def begun_alike(rank: int, world: int) -> list[tuple[str, Tensor]]:
    """Buffers of dtypes that a process group cannot add up, another on every rank, after LocalSync began."""
    model = small_model(seed=rank)
    kinds = (torch.bool, torch.int16, torch.int64, torch.float64, torch.bfloat16, torch.complex64)
    for kind in kinds:
        values = torch.tensor([-0.0, 1.0, rank, 2.0 + rank]).to(kind)
        model.register_buffer(str(kind).replace(".", " "), values)
    with LocalSync(model, steps=4):
        return [(name, buffer.view(torch.uint8)) for name, buffer in model.named_buffers()]


def local_of_ddp(rank: int, world: int) -> str:
    try:
        LocalSync(DDP(small_model()), steps=4)
    except TypeError as error:
        return str(error)
    return "nothing was said"
