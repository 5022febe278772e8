"""Gradients of a scaled loss in 16 bits: unscaled in 32; an overflow on the way back calls the step off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import same
from torch import Tensor, nn

from compressed_ddp import (
    CompressionConfig,
    DistributedBackend,
    ErrorFeedbackBuffer,
    SplitAdam,
    SplitOptimizer,
    SplitSGD,
)
from compressed_ddp.communication import run_in_process
from compressed_ddp.types import Transport

SHAPES = {"weight": torch.Size([30, 20]), "bias": torch.Size([30]), "late": torch.Size([7, 50])}
SCALE = 2.0**16
NARROW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
METHODS: dict[str, dict[str, Any]] = {
    "topk": {"collective": "allgather"},
    "sharded": {"collective": "sharded"},
    "powersgd": {"compressor": "powersgd"},
    "EF21": {"memory": "ef21"},
    "EF21-SGDM": {"memory": "ef21-sgdm", "eta": 0.3},
    "unused ones held": {"hold_unused": True},
    "DGC": {},
    "split Adam": {},
}


def gradient(name: str, rank: int, step: int) -> Tensor:
    """Of the scaled loss; divided by its scale in 16 bits most of it would be zero."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + len(name))
    return torch.randn(SHAPES[name], generator=generator).mul(0.003).half()


class Loop:
    """A loop of one's own: parameters of one dtype, and their backend."""

    def __init__(self, net: Transport, method: str, dtype: torch.dtype, **options: Any) -> None:
        self.named = {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}
        halves: SplitOptimizer | None = None
        if method == "DGC":
            halves = SplitSGD(self.named.values(), lr=0.1, max_norm=1e-6)
        elif method == "split Adam":
            halves = SplitAdam(self.named.values(), lr=1e-9)
        config = CompressionConfig(**{"ratio": 0.1, "min_compress_numel": 64} | METHODS[method] | options)
        memory = ErrorFeedbackBuffer() if config.memory == "ef" else None
        self.backend = DistributedBackend(None, memory, config=config, transport=net, optimizer=halves)

    def reduce(self, gradients: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        self.backend.loss_scale = scale
        for name, parameter in self.named.items():
            parameter.grad = gradients[name].to(parameter.dtype, copy=True)
        self.backend.allreduce_gradients(self.named.items())
        return {name: p.grad.clone() for name, p in self.named.items() if p.grad is not None}

    def remembered(self) -> dict[str, Any]:
        state = self.backend.state_dict()
        return {part: state[part] for part in ("residuals", "kept", "buckets", "missed", "taken")}


@NARROW
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_sixteen_bits_owe_what_thirty_two_do(method: str, world: int, dtype: torch.dtype) -> None:
    """The same gradients, once scaled in 16 bits and once as they are in 32: what is sent, kept and owed."""

    def work(net: Transport) -> None:
        narrow, wide = Loop(net, method, dtype), Loop(net, method, torch.float32)
        for step in range(4):
            scale = SCALE / 2**step
            mine = {name: gradient(name, net.rank, step).to(dtype) for name in SHAPES}
            if step == 2 and net.rank == 0:
                mine["late"].zero_()
            found = narrow.reduce(mine, scale)
            wanted = wide.reduce({name: grad.float() / scale for name, grad in mine.items()}, 1.0)
            assert same(found, {name: (mean * scale).to(dtype) for name, mean in wanted.items()})
            assert same(narrow.remembered(), wide.remembered())
            assert narrow.backend.counted and any(bool(grad.any()) for grad in found.values())
        if net.world_size > 1:  # and the ledger knows that two bytes would have travelled, not four
            assert narrow.backend.stats is not None and wide.backend.stats is not None
            dense = narrow.backend.stats.total.dense_bytes
            assert dense == wide.backend.stats.total.dense_bytes // 2

    run_in_process(world, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_buckets_are_scaled_where_they_are(dtype: torch.dtype) -> None:
    def work(net: Transport) -> None:
        scaled, plain = Loop(net, "topk", dtype), Loop(net, "topk", dtype)
        for step in range(3):
            mine = {name: gradient(name, net.rank, step).to(dtype) for name in SHAPES}
            found = scaled.reduce({name: grad * SCALE for name, grad in mine.items()}, SCALE)
            assert same(found, {name: mean * SCALE for name, mean in plain.reduce(mine, 1.0).items()})
            assert same(scaled.remembered(), plain.remembered())

    run_in_process(2, work)


LARGE = {torch.float16: 2.0**14, torch.bfloat16: 2.0**126, torch.float32: 2.0**126}
"""A gradient of the scaled loss of which a few together are too large for the dtype."""


@pytest.mark.parametrize("dtype", LARGE)
@pytest.mark.parametrize("method", ["topk", "sharded"])
def test_what_waited_may_not_fit_any_more(method: str, dtype: torch.dtype) -> None:
    """Each gradient fits, and what waited for many steps does not: nobody's residual changes, all are told.

    Powers of two, so that no rounding hides a loss.
    """

    def work(net: Transport) -> None:
        loop = Loop(net, method, dtype, values="fp32", owner_factor=1.0)
        scale, called_off = SCALE, 0
        true, applied = ({name: torch.zeros(shape).double() for name, shape in SHAPES.items()} for _ in "12")
        signs = {name: gradient(name, 0, 0).float().sign() for name in SHAPES}
        for _ in range(40):
            mine = {name: sign * (LARGE[dtype] / SCALE) for name, sign in signs.items()}
            before = loop.remembered() if loop.backend.stats else None
            found = loop.reduce({name: grad * scale for name, grad in mine.items()}, scale)
            fits = all(bool(mean.isfinite().all()) for mean in found.values())
            assert loop.backend.counted == fits
            if not fits:
                assert same(before, loop.remembered())
                called_off, scale = called_off + 1, scale / 2
                continue
            for name in SHAPES:
                true[name] += mine[name].double()
                applied[name] += found[name].double() / scale
        assert called_off and loop.backend.stats is not None
        assert loop.backend.stats.total.skipped_steps == called_off
        debt = debts(loop, net)
        for name, total in true.items():
            assert torch.equal(applied[name] + debt[name], total), name

    run_in_process(2, work)


def debts(loop: Loop, net: Transport) -> dict[str, Tensor]:
    """What is owed to the mean, of workers and owners, by name."""
    from compressed_ddp.error_feedback.state import fold_owner_
    from compressed_ddp.layout import BucketLayout

    state = loop.backend.state_dict()
    total = {name: residual.double() for name, residual in state["residuals"].items()}
    for bucket in state["buckets"]:
        if "owner" in bucket["state"]:
            layout = BucketLayout(tuple(bucket["names"]), tuple(map(torch.Size, bucket["shapes"])))
            flat = torch.zeros(layout.numel)
            fold_owner_(flat, bucket["state"]["owner"], net.rank, net.world_size)
            for name, view in layout.views(flat).items():
                total[name] = total[name] + view
    for debt in total.values():
        net.all_reduce(debt)
        debt /= net.world_size
    return total


def test_alone_what_a_larger_job_owed_may_not_fit() -> None:
    def work(net: Transport) -> None:
        loop = Loop(net, "topk", torch.float16)
        small = {name: gradient(name, 0, 0) for name in SHAPES}
        loop.reduce(small, SCALE)
        memory = loop.backend.error_buffer
        assert memory is not None
        owed = torch.full(SHAPES["late"], 2.0)  # times the scale, too large for fp16
        memory.update("late", memory.compensate("late", owed), torch.zeros(SHAPES["late"]))
        found = loop.reduce(small, SCALE)
        assert not loop.backend.counted and found["late"].isinf().all()
        assert torch.equal(memory.residual("late"), owed)
        found = loop.reduce(small, 2.0)
        assert loop.backend.counted and not memory.residual("late").any()
        torch.testing.assert_close(found["late"], (owed * 2.0).half() + small["late"])

    run_in_process(1, work)


@pytest.mark.parametrize("scale", [0, -2.0, float("nan"), float("inf"), "a", True, None])
def test_no_loss_was_multiplied_by_that(scale: Any) -> None:
    backend = DistributedBackend()
    with pytest.raises(ValueError, match="loss_scale must be a positive number, got"):
        backend.loss_scale = scale
    assert backend.loss_scale == 1.0
    backend.loss_scale = 2
    assert backend.loss_scale == 2.0
