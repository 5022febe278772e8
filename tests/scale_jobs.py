"""Jobs about loss scales: an overflow in one entry of one parameter, several optimizers, 16-bit models."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from comparing import same
from jobs import flat, loss_of, owed, small_model
from method_jobs import mean
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from compressed_ddp import CompressionConfig, DistributedBackend, ErrorFeedbackBuffer, attach, get_compressor


class OneEntry:
    """Makes one entry of ``parameter``'s gradient infinite, where it is told to."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.now = False
        parameter.register_hook(self._spoil)

    def _spoil(self, gradient: Tensor) -> Tensor | None:
        if not self.now:
            return None
        gradient = gradient.clone()
        gradient.view(-1)[7] = torch.inf
        return gradient


def finite(parameters: Iterable[nn.Parameter]) -> bool:
    return all(bool(p.grad.isfinite().all()) for p in parameters if p.grad is not None)


def two_optimizers(rank: int, world: int, way: str, *, obey: bool, manual: bool = False) -> dict[str, Any]:
    """One entry of the last bucket overflows on one rank; the other optimizer's means stay finite.

    ``obey``: nobody steps unless the step counted. The law over what was applied, in unscaled units.
    """
    net = small_model()
    model = net if manual else DDP(net, bucket_cap_mb=0.01)
    sync: Any
    if manual:
        memory = ErrorFeedbackBuffer()
        config = CompressionConfig(collective=way)
        sync = DistributedBackend(get_compressor(0.05), memory, config=config, bucket_cap_mb=0.01)
    else:
        sync = attach(model, CompressionConfig(ratio=0.05, collective=way))
    # DDP fills its buckets from the last layer to the first.
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (net[3:], net[:3])]
    spoilt, scaler = OneEntry(net[0].weight), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    true, applied = ({name: torch.zeros_like(p) for name, p in net.named_parameters()} for _ in "12")
    found: dict[str, Any] = {"counted": [], "halves": 0, "untouched": True}
    for step in range(12):
        hit = {3: 1, 6: 0, 7: 1}.get(step)
        twin = copy.deepcopy(net)
        for parameter in twin.parameters():
            parameter.grad = None
        loss_of(twin, rank, step).backward()
        for optimizer in optimizers:
            optimizer.zero_grad()
        before, remembered = flat(net), sync.state_dict()
        sync.loss_scale = scaler.get_scale()
        spoilt.now = rank == hit
        scaler.scale(loss_of(model, rank, step)).backward()
        if manual:
            sync.allreduce_gradients(net.named_parameters())
        found["counted"].append(sync.counted)
        found["halves"] += finite(net[3:].parameters()) and not finite(net[:3].parameters())
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if sync.counted or not obey:
            for optimizer in optimizers:
                scaler.step(optimizer)
        scaler.update()
        if hit is not None:
            found["untouched"] &= same(remembered["residuals"], sync.state_dict()["residuals"])
            found["untouched"] &= same(remembered["buckets"], sync.state_dict()["buckets"])
            found["untouched"] &= torch.equal(before, flat(net)) or not obey
        for (name, p), own in zip(net.named_parameters(), twin.parameters(), strict=True):
            assert p.grad is not None and own.grad is not None
            stepped = finite(net[3:].parameters() if int(name[0]) >= 3 else net[:3].parameters())
            applied[name] += p.grad if stepped and (sync.counted or not obey) else 0.0
            true[name] += own.grad if hit is None else 0.0
    wanted, arrived = (torch.cat([t.reshape(-1) for t in each.values()]) for each in (true, applied))
    wanted, debt = mean(wanted.double()), mean(owed(sync, net).double())
    found["law"] = float((arrived + debt - wanted).abs().max() / wanted.abs().max())
    found["scale"] = scaler.get_scale()
    sync.close()
    return found | {"parameters": flat(net)}


class Product(nn.Module):
    """Weights of 16 bits whose gradient is what is put in, and a second, smaller bucket of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(3000, dtype=dtype))
        self.second = nn.Parameter(torch.zeros(500, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat([self.first, self.second]).float() * x).sum()


def sixteen_bits(rank: int, world: int, way: str, dtype: torch.dtype, size: float) -> dict[str, Any]:
    """DDP's buckets are of 16 bits; gradients, all powers of two, have ``size`` under a scale of 2^16."""
    net = Product(dtype)
    model = DDP(net, bucket_cap_mb=0.001)
    sync = attach(model, CompressionConfig(ratio=0.1, values="fp32", collective=way, owner_factor=1.0))
    scale, generator = 2.0**16, torch.Generator().manual_seed(rank)
    true, applied, called_off = torch.zeros(3500).double(), torch.zeros(3500).double(), 0
    for _ in range(30):
        model.zero_grad()
        x = torch.randn(3500, generator=generator).sign() * (size / 2.0**16)
        before, sync.loss_scale = sync.state_dict(), scale
        (model(x) * scale).backward()
        grads = torch.cat([p.grad.double() for p in net.parameters() if p.grad is not None])
        assert sync.counted == bool(grads.isfinite().all())
        if sync.counted:
            true, applied = true + x, applied + grads / scale
        else:
            assert same(before["residuals"], sync.state_dict()["residuals"])
            called_off, scale = called_off + 1, scale / 2
    wanted, debt = mean(true), mean(owed(sync, net).double())
    sync.close()
    lost = float((applied + debt - wanted).abs().max() / wanted.abs().max())
    return {"lost": lost, "called off": called_off, "arrived": bool(applied.any())}
