"""What the ranks of distributed tests run. Every function is ``job(rank, world, ...)``."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from compressed_ddp import CompressionConfig, attach
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
    save_at: int | None = None,
    check_law: bool = False,
) -> dict[str, Any]:
    """Train with momentum SGD; optionally stop, rebuild everything from saved state, and go on."""
    model = DDP(small_model(), **({"bucket_cap_mb": 0.01} | (ddp or {})))
    sync = attach(model, CompressionConfig(**config)) if config is not None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    true, applied = torch.zeros(2, flat(model).numel(), dtype=torch.float64)
    buckets = set()
    for step in range(steps):
        if step == save_at and sync is not None:
            saved = copy.deepcopy((model.module.state_dict(), optimizer.state_dict(), sync.state_dict()))
            sync.close()
            model = DDP(small_model(seed=99), **({"bucket_cap_mb": 0.01} | (ddp or {})))
            sync = attach(model, CompressionConfig(**config))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            model.module.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            sync.load_state_dict(saved[2])
        if check_law:
            twin = copy.deepcopy(model.module)
            loss_of(twin, rank, step).backward()
            true += flat_grad(twin)
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        applied += flat_grad(model)
        if sync is not None:
            buckets.add(tuple(tuple(b["names"]) for b in sync.state_dict()["buckets"]))
        optimizer.step()
    result = {"parameters": flat(model), "loss": loss.item(), "layouts": len(buckets)}
    if sync is not None:
        result["stats"] = sync.stats.as_dict()
        if check_law:
            for sums in (true, debt := owed(sync, model.module).double()):
                dist.all_reduce(sums)
            result["law"] = (applied + debt / world - true / world).abs().max().item()
            result["scale"] = (true / world).abs().max().item()
        sync.close()
    result["threads"] = [t.name for t in threading.enumerate() if "compressed" in t.name]
    return result
