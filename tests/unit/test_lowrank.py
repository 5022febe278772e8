"""PowerSGD's arithmetic, autocast or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressed_ddp import CompressionConfig, DistributedBackend, ErrorFeedbackBuffer, get_compressor
from compressed_ddp.communication import run_in_process
from compressed_ddp.types import Transport


def law_error(auto: bool) -> float:
    """The largest entry by which what was applied and is owed misses the true gradients' mean."""

    def rank(net: Transport) -> tuple[Tensor, Tensor, Tensor]:
        weight = torch.nn.Parameter(torch.zeros(100, 100))
        memory = ErrorFeedbackBuffer()
        backend = DistributedBackend(config=CompressionConfig("powersgd"), error_buffer=memory, transport=net)
        true, applied = torch.zeros(2, 100, 100)
        for step in range(10):
            weight.grad = torch.randn(100, 100, generator=torch.Generator().manual_seed(9 * step + net.rank))
            true += weight.grad
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=auto):
                backend.allreduce_gradients([("weight", weight)])
            applied += weight.grad
        return true, applied, memory.residual("weight").clone()

    (true, applied, owed), (other, same, debt) = run_in_process(2, rank)
    assert torch.equal(applied, same)
    return ((true + other) / 2 - applied - (owed + debt) / 2).abs().max().item()


@pytest.mark.parametrize("auto", [False, True], ids=["plain", "autocast"])
def test_the_law_holds_within_autocast(auto: bool) -> None:
    assert law_error(auto) < 1e-4


def test_autocast_changes_nothing_of_what_is_sent() -> None:
    gradient = torch.randn(60, 80)
    plain = get_compressor(name="powersgd").compress(gradient).values
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(get_compressor(name="powersgd").compress(gradient).values, plain)
