"""PowerSGD's arithmetic: a basis and a product with the same bits on every processor, autocast or not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from compressed_ddp import CompressionConfig, DistributedBackend, ErrorFeedbackBuffer, get_compressor
from compressed_ddp.communication import run_in_process
from compressed_ddp.compression.powersgd import ordered_sum, orthogonal, write_product_
from compressed_ddp.types import Transport

LARGE = torch.finfo(torch.float32).max / 4


def columns(*given: Tensor) -> Tensor:
    return torch.stack(given, 1)


def draw(n: int = 300) -> Tensor:
    return torch.randn(n)


def spike(n: int = 300, place: int = 0) -> Tensor:
    return torch.zeros(n).index_fill_(0, torch.tensor([place]), 3.0)


CASES = {
    "one": lambda: draw().view(-1, 1),
    "four": lambda: torch.randn(301, 4),
    "barely higher than wide": lambda: torch.randn(9, 8),
    "large": lambda: torch.randn(300, 3).clamp(-1, 1) * LARGE,
    "tiny": lambda: torch.randn(300, 3) * 1e-36,
    "of unlike sizes": lambda: torch.randn(300, 3) * torch.tensor([1e30, 1.0, 1e-30]),
    "nearly parallel": lambda: (base := draw()).view(-1, 1) + 1e-6 * torch.randn(300, 4) * base.abs().max(),
    "parallel": lambda: draw().view(-1, 1) * torch.tensor([1.0, 3.0, -0.7, 1e-4]),
    "equal": lambda: draw().view(-1, 1).expand(-1, 4).contiguous(),
    "zeros": lambda: torch.zeros(300, 4),
    "a zero column": lambda: columns(draw(), torch.zeros(300), draw()),
    "one row": lambda: columns(spike(), -spike(), 2 * spike()),
    "the unit vectors": lambda: columns(spike(place=1), spike(place=0), spike(place=0), spike(place=1)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_basis_is_orthonormal_and_holds_the_columns(case: str) -> None:
    """Dependent columns too: what is left out would be zero in this step, and in all that follow."""
    matrix = CASES[case]()
    basis = orthogonal(matrix)
    assert basis.shape == matrix.shape and basis.dtype == torch.float32
    wide = basis.double()
    torch.testing.assert_close(wide.T @ wide, torch.eye(matrix.shape[1]).double(), atol=3e-6, rtol=0)
    given = matrix.double()
    beside = given - wide @ (wide.T @ given)
    assert bool((beside.norm(dim=0) <= 1e-5 * given.norm(dim=0)).all())


def test_matrices_together_give_what_each_gives_alone() -> None:
    matrices = torch.stack([case() for name, case in CASES.items() if case().shape == (300, 4)])
    assert len(matrices) > 3
    assert all(torch.equal(basis, orthogonal(matrices[at])) for at, basis in enumerate(orthogonal(matrices)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """Or a step that nobody may use would look like one that everybody can."""
    matrix = torch.randn(50, 2)
    matrix[7, 1] = bad
    assert not torch.isfinite(orthogonal(matrix)).all()


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1000, 4097])
def test_sums_and_products(n: int) -> None:
    numbers = torch.randn(3, n)
    torch.testing.assert_close(ordered_sum(numbers).double(), numbers.double().sum(1), atol=1e-4, rtol=1e-5)
    left, right = torch.randn(n, 3), torch.randn(70, 3)
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        out = torch.empty(n, 70, dtype=dtype)
        write_product_(out, left, right)
        torch.testing.assert_close(out.float(), left @ right.T, atol=near, rtol=near)


STEPS = """
import torch
from compressed_ddp import CompressionConfig
from compressed_ddp.communication.guard import fingerprint
from compressed_ddp.communication.lowrank import LowRank
from compressed_ddp.communication.sameness import CHECK_FLOATS
from compressed_ddp.communication.transport import alone
from compressed_ddp.compression.factory import from_config
from compressed_ddp.layout import BucketLayout
from compressed_ddp.metrics import Ledger
from compressed_ddp.types import Slot, Stamp

torch.set_num_threads(1)
net, sums = alone(), torch.Generator().manual_seed(0)

def all_reduce(carried):
    "What everyone receives is the same, whatever this one put into it."
    carried[:-CHECK_FLOATS] = torch.rand(carried.numel() - CHECK_FLOATS, generator=sums) - 0.5

net.all_reduce = all_reduce
shapes = tuple(map(torch.Size, ([300, 400], [300, 77], [64, 3, 9], [300])))
layout = BucketLayout(("a", "b", "c", "bias"), shapes)
config = CompressionConfig("powersgd", rank=3)
lowrank = LowRank(layout, from_config(config), config, net, torch.device("cpu"))
for step in range(3):
    bucket = torch.randn(layout.numel, generator=torch.Generator().manual_seed(step))
    memory = Slot(torch.zeros(layout.numel))
    assert lowrank.mean_(bucket, memory, Stamp(step=step), Ledger("powersgd", "torch", True))
    print(fingerprint(bucket))
"""


def test_unlike_processors_make_the_same_of_the_same_sums() -> None:
    """MKL and torch told to use other instructions: each would round another way."""

    def run(**variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", STEPS],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    usual = run()
    assert len(set(usual.split())) == 3
    assert run(MKL_CBWR="COMPATIBLE", ATEN_CPU_CAPABILITY="default") == usual


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
