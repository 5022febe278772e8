"""The residual guard: figures as the law has them, silence in healthy training, a word when it diverges."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compressed_ddp import CompressionConfig, DistributedBackend, ErrorFeedbackBuffer
from compressed_ddp.communication import run_in_process
from compressed_ddp.communication.residuals import Growth, Waiting
from compressed_ddp.metrics import Ledger
from compressed_ddp.types import Transport

Step = Callable[[int, Tensor], Tensor]


def loop(
    net: Transport,
    config: CompressionConfig,
    steps: int,
    gradient: Step,
    numel: int = 2000,
    momentum: float = 0.0,
) -> tuple[Ledger, list[tuple[float, float] | None]]:
    """Synchronise ``gradient(step, weight)`` and go down it; the ledger, and the figures after each step.

    Beside it the figures are computed from the residuals themselves, by the law, and compared.
    """
    weight = torch.nn.Parameter(torch.ones(numel))
    buffer, velocity = ErrorFeedbackBuffer(), torch.zeros(numel)
    backend = DistributedBackend(None, buffer, config=config, transport=net)
    found: list[tuple[float, float] | None] = []
    for step in range(steps):
        mine = gradient(step, weight.detach())
        weight.grad = mine.clone()
        before = buffer.residual("w").clone() if "w" in buffer else torch.zeros(numel)
        backend.allreduce_gradients([("w", weight)])
        stats = backend.stats
        assert stats is not None
        if config.guard_every and step % config.guard_every == 0 and not stats.last.skipped_steps:
            after = buffer.residual("w") if "w" in buffer else None
            if after is None or stats.residual_norm is None:
                assert stats.residual_norm is stats.residual_age is None
            else:
                sent = (before.double() + mine - after).abs().sum()
                assert stats.residual_norm == pytest.approx(buffer.norm(), rel=1e-6)
                if stats.residual_age == math.inf:  # in float32, in which nothing is left to send
                    assert torch.equal(after, before + mine) and bool(after.any())
                else:
                    assert stats.residual_age == pytest.approx(float(after.abs().sum() / sent), rel=1e-4)
        with torch.no_grad():
            weight -= velocity.mul_(momentum).add_(weight.grad)
        known = stats.residual_norm, stats.residual_age
        found.append(None if known[0] is None or known[1] is None else (known[0], known[1]))
    assert backend.stats is not None
    return backend.stats, found


def noise(rank: int, numel: int = 2000) -> Step:
    def draw(step: int, weight: Tensor) -> Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank))

    return draw


@pytest.mark.parametrize("way", ["allgather", "sharded"])
@pytest.mark.parametrize("ratio", [0.01, 0.1, 1.0])
def test_norm_and_age(way: str, ratio: float) -> None:
    """As the law has them; an age is never above 1 / ratio - 1, and nothing waits where all is sent."""
    config = CompressionConfig(
        ratio=ratio, collective=way, values="fp32", guard_every=1, min_compress_numel=0
    )

    def work(net: Transport) -> list[tuple[float, float] | None]:
        stats, found = loop(net, config, 30, noise(net.rank))
        assert f"not sent yet   norm {found[-1][0]:.4g}" in str(stats) if found[-1] else False
        assert stats.as_dict()["residual_age"] == stats.residual_age
        return found

    for found in run_in_process(2, work):
        ages = [each[1] for each in found if each is not None]
        assert len(ages) == 30 and max(ages) <= (1 / ratio - 1) * 1.1  # shards have k / P entries, rounded
        assert ages[-1] == 0.0 if ratio == 1.0 else ages[-1] > ages[0] > 1.0


def test_it_is_looked_at_now_and_then() -> None:
    """And a step that does not count is not looked at: what was known stays."""

    def work(net: Transport) -> list[tuple[float, float] | None]:
        def gradient(step: int, weight: Tensor) -> Tensor:
            return noise(net.rank)(step, weight) * (math.nan if step == 6 and net.rank else 1.0)

        return loop(net, CompressionConfig(guard_every=3), 12, gradient)[1]

    for found in run_in_process(2, work):
        changes = [step for step in range(1, 12) if found[step] != found[step - 1]]
        assert changes == [3, 9] and found[0] is not None


@pytest.mark.parametrize(
    "settings", [{"guard_every": 0}, {"error_feedback": False}, {"memory": "ef21"}, {"compressor": "dense"}]
)
def test_where_nothing_is_owed_nothing_is_said(settings: dict[str, object]) -> None:
    config = CompressionConfig(**({"guard_every": 1} | settings))  # type: ignore[arg-type]

    def work(net: Transport) -> bool:
        stats, _ = loop(net, config, 3, noise(net.rank))
        return stats.residual_norm is None and "not sent yet" not in str(stats)

    assert all(run_in_process(2, work))


# --- growth ----------------------------------------------------------------------------------------


def owed(ratio: float, gradients: Callable[[int], Tensor], steps: int, every: int) -> list[tuple[int, float]]:
    """Norms of what plain Top-K with error feedback owes, after every so many steps."""
    residual = torch.zeros_like(gradients(0))
    k, found = max(1, round(ratio * residual.numel())), []
    for step in range(steps):
        residual += gradients(step)
        residual[residual.abs().topk(k).indices] = 0
        if step % every == 0:
            found.append((step, float(residual.norm())))
    return found


def told(norms: list[tuple[int, float]], ratio: float = 0.01) -> list[int]:
    growth = Growth()
    return [step for step, norm in norms if growth.look(step, norm, ratio) is not None]


def drawn(n: int, size: Callable[[int], float], drift: float = 0.0) -> Callable[[int], Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda step: size(step) * (torch.randn(n, generator=generator) + drift)


HEALTHY: dict[str, tuple[float, Callable[[int], Tensor], int]] = {
    "ratio 0.001 takes thousands of steps": (0.001, drawn(4000, lambda step: 1.0), 8000),
    "gradients that always say the same": (0.001, drawn(4000, lambda step: 1.0, drift=2.0), 4000),
    "smaller and smaller gradients": (0.01, drawn(1000, lambda step: 0.999**step), 4000),
    "a learning rate that warms up, before compression": (
        0.01,
        drawn(1000, lambda step: min(1, step / 500)),
        4000,
    ),
    "gradients five times as large from one step to the next": (
        0.01,
        drawn(1000, lambda s: 1 + 4 * (s > 2000)),
        4000,
    ),
    "a batch a hundred times as large now and then": (
        0.01,
        drawn(1000, lambda s: 1 + 99 * (s % 777 == 5)),
        4000,
    ),
}


@pytest.mark.parametrize("case", HEALTHY)
@pytest.mark.parametrize("every", [10, 100])
def test_healthy_residuals_are_left_alone(case: str, every: int) -> None:
    ratio, gradients, steps = HEALTHY[case]
    norms = owed(ratio, gradients, steps, every)
    assert norms[-1][1] > 0 and told(norms) == []


@pytest.mark.parametrize("rate", [1.002, 1.01, 1.1])
@pytest.mark.parametrize("every", [10, 100])
def test_what_grows_without_bound_is_told(rate: float, every: int) -> None:
    """Each time that it is ten times worse, and not at every look."""
    norms = owed(0.01, drawn(1000, lambda step: min(rate**step, 1e30)), 6000, every)
    found = told(norms)
    assert found
    assert len(found) <= 1 + math.log10(norms[-1][1] / norms[0][1])
    growth = rate ** found[0]
    assert growth <= max(1e5, rate ** (6 * every)), "it was told late"


def test_another_ratio_begins_anew() -> None:
    """A schedule that goes from 25 % to 0.1 %: a hundred times as much is owed, and that is right."""
    growth, residual = Growth(), torch.zeros(4000)
    gradients = drawn(4000, lambda step: 1.0)
    largest = 0.0
    for step in range(4000):
        ratio = 0.25 if step < 1000 else 0.001
        residual += gradients(step)
        residual[residual.abs().topk(int(ratio * 4000)).indices] = 0
        if step % 20 == 0:
            assert growth.look(step, float(residual.norm()), ratio) is None
        largest = max(largest, float(residual.norm()))
    assert largest > 10 * math.sqrt(4000)


def test_one_small_gradient_at_the_start_is_no_measure() -> None:
    growth = Growth()
    norms = {step: 1.0 if step == 0 else 12.0 * (step + 1) for step in range(0, 2000, 100)}
    assert all(growth.look(step, norm, 0.001) is None for step, norm in norms.items())


def test_an_earlier_state_begins_anew() -> None:
    growth = Growth()
    for step in (500, 600, 499, 0, 100, 200):
        assert growth.look(step, 1.0 + step, 0.01) is None


# --- what stays ------------------------------------------------------------------------------------


def found_stale(ages: list[float], ratio: float, every: int) -> list[int]:
    waiting = Waiting()
    return [at * every for at, age in enumerate(ages) if waiting.look(at * every, age, ratio)]


def test_an_age_is_judged_by_the_ratio() -> None:
    """At three looks in a row, 1 / ratio steps apart; then at six, twelve and so on; not in healthy runs."""
    never = [math.inf] * 14
    assert found_stale(never, 0.01, 100) == [200, 500, 1100]
    assert found_stale(never, 0.01, 10) == [100, 130], "a hundred steps are waited for"
    assert found_stale([1e5] * 4, 0.01, 100) == [200]
    assert found_stale([99.0, 9999.0] * 9, 0.01, 100) == []
    assert found_stale([math.inf, math.inf, 50.0] * 9, 0.01, 100) == []
    assert found_stale([900.0] * 9, 1.0, 100) == [], "a rank-1 factor says little about a large matrix"
    assert found_stale(never, 1.0, 100) == [200, 500, 1100]
    waiting = Waiting()
    assert not any(waiting.look(step, math.inf, 0.01) for step in (500, 600, 0, 100, 50))


@pytest.mark.parametrize(
    ("settings", "stays"),
    [
        ({"compressor": "threshold", "threshold": 1e6}, True),
        ({"compressor": "threshold", "threshold": 2.0}, False),
        ({"compressor": "topk"}, False),
        ({"compressor": "randomk", "error_feedback": True, "unbiased": False}, False),
        ({"compressor": "sign"}, False),
        ({"compressor": "powersgd", "rank": 1}, False),
    ],
    ids=str,
)
def test_what_is_never_sent_is_told(
    settings: dict[str, Any], stays: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A threshold above all gradients: the norm grows with the steps, which alone looks healthy."""
    config = CompressionConfig(ratio=0.05, guard_every=10, min_compress_numel=0, **settings)
    with caplog.at_level("WARNING", logger="compressed_ddp"):
        run_in_process(2, lambda net: loop(net, config, 80, noise(net.rank)) and None)
    words = [record.message for record in caplog.records if "nothing of it was sent" in record.message]
    assert bool(words) == stays
    if stays:
        assert words[0].startswith("what rank") and "Is a threshold above all gradients?" in words[0]


# --- training ---------------------------------------------------------------------------------------


def least_squares(rank: int, rate: float) -> Step:
    """Digits as a linear regression on real images: gradients grow with the error, without bound."""
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    inputs = torch.as_tensor(digits.data, dtype=torch.float32)[rank::2] / 16
    targets = torch.nn.functional.one_hot(torch.as_tensor(digits.target)[rank::2].long(), 10).float()

    def gradient(step: int, weight: Tensor) -> Tensor:
        at = (step * 32) % (len(inputs) - 32)
        x, y = inputs[at : at + 32], targets[at : at + 32]
        return rate * (x.T @ (x @ weight.view(64, 10) - y) / 32).flatten()

    return gradient


@pytest.mark.parametrize(
    ("rate", "ratio", "diverges"),
    [(0.02, 1.0, False), (0.002, 0.1, False), (0.002, 0.01, False), (0.02, 0.1, True)],
)
def test_training(rate: float, ratio: float, diverges: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A rate that is right for dense training with momentum is too high for a tenth of the entries."""
    config = CompressionConfig(ratio=ratio, guard_every=10, min_compress_numel=0)

    def work(net: Transport) -> float:
        gradient, largest = least_squares(net.rank, rate), 0.0

        def watched(step: int, weight: Tensor) -> Tensor:
            nonlocal largest
            largest = max(largest, float(weight.abs().max()))
            return gradient(step, weight)

        loop(net, config, 500, watched, 640, momentum=0.9)
        return largest

    with caplog.at_level("WARNING", logger="compressed_ddp"):
        largest = max(run_in_process(2, work))
    assert (largest > 1e6) == diverges and (largest < 100) == (not diverges)
    words = [record.message for record in caplog.records if "grows without bound" in record.message]
    assert bool(words) == diverges
    if diverges:
        assert "too high for ratio 0.1: lower it, warm up, clip gradients" in words[0]
        assert int(words[0].split()[-1].rstrip(")")) < 200, "told late"


@pytest.mark.parametrize(("bad", "words"), [(9, 0), (10, 1), (19, 1), (40, 3)])
def test_steps_in_a_row_that_do_not_count(bad: int, words: int, caplog: pytest.LogCaptureFixture) -> None:
    """Also without looks; a good step in between begins the count anew, and so does the end of a bad row."""

    def work(net: Transport) -> int:
        def gradient(step: int, weight: Tensor) -> Tensor:
            lost = net.rank == 1 and (step < 9 or 10 <= step < 10 + bad)
            return torch.full((2000,), math.nan if lost else 1.0)

        stats, _ = loop(net, CompressionConfig(guard_every=0), 12 + bad, gradient)
        return stats.total.skipped_steps

    with caplog.at_level("WARNING", logger="compressed_ddp"):
        assert run_in_process(2, work) == [9 + bad] * 2
    found = [record.message for record in caplog.records if "steps in a row had a NaN" in record.message]
    assert len(found) == words
    assert all(text.startswith(f"{10 * 2**n} steps") for n, text in enumerate(found))
