"""The write-up's seven error-feedback tests, under its names."""

from __future__ import annotations

import io

import pytest
import torch

from compressed_ddp.compression import get_compressor
from compressed_ddp.error_feedback import ErrorFeedbackBuffer


def _send(buffer: ErrorFeedbackBuffer, name: str, gradient: torch.Tensor, ratio: float) -> torch.Tensor:
    """One step as the write-up has it; returns what was sent."""
    compressor = get_compressor(ratio=ratio)
    compensated = buffer.compensate(name, gradient)
    sent = compressor.decompress(*compressor.compress(compensated))
    buffer.update(name, compensated, sent)
    return sent


def test_buffer_initialization() -> None:
    """A new buffer owes nothing, and the first compensation changes nothing."""
    buffer = ErrorFeedbackBuffer()
    assert len(buffer) == 0 and buffer.state_dict() == {} and buffer.norm() == 0.0
    gradient = torch.randn(3, 4)
    assert torch.equal(buffer.compensate("w", gradient), gradient)
    assert "w" in buffer and torch.equal(buffer.residual("w"), torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"call compensate\('other'"):
        ErrorFeedbackBuffer().update("other", gradient, gradient)


def test_compensate_adds_error() -> None:
    buffer = ErrorFeedbackBuffer()
    buffer.load_state_dict({"w": torch.tensor([1.0, -2.0, 0.5])})
    gradient = torch.tensor([0.25, 0.25, 0.25])
    assert buffer.compensate("w", gradient).tolist() == [1.25, -1.75, 0.75]
    assert gradient.tolist() == [0.25] * 3, "compensate must only read"
    half = buffer.compensate("w", gradient.half())
    assert half.dtype == torch.float32, "residuals are float32 whatever the gradient's dtype"
    with pytest.raises(ValueError, match="shape"):
        buffer.compensate("w", torch.ones(4))


def test_update_stores_residual() -> None:
    """What stays is what this worker did not send."""
    buffer = ErrorFeedbackBuffer()
    compensated = buffer.compensate("w", torch.tensor([3.0, -1.0, 2.0, 0.5]))
    buffer.update("w", compensated, torch.tensor([3.0, 0.0, 2.0, 0.0]))
    assert buffer.residual("w").tolist() == [0.0, -1.0, 0.0, 0.5]
    assert buffer.norm() == pytest.approx(1.25**0.5)


def test_convergence_with_feedback() -> None:
    """On a quadratic, 1 entry in 20 a step: with feedback it converges, without it does not."""
    target = torch.randn(200)
    scales = torch.logspace(0, -2, 200)

    def descend(feedback: bool) -> float:
        x, buffer, compressor = torch.zeros(200), ErrorFeedbackBuffer(), get_compressor(ratio=0.05)
        for _ in range(1500):
            gradient = scales * (x - target) + 0.05 * torch.randn(200)
            if feedback:
                x = x - 0.1 * _send(buffer, "x", gradient, 0.05)
            else:
                x = x - 0.1 * compressor.decompress(*compressor.compress(gradient))
        return float((scales * (x - target).square()).sum())

    with_feedback, without = descend(True), descend(False)
    assert with_feedback < 0.1 * float((scales * target.square()).sum())
    assert with_feedback < 0.5 * without


def test_multiple_parameters() -> None:
    """Names do not mix, also when their residuals are laid end to end in a bucket."""
    from compressed_ddp.layout import BucketLayout

    buffer = ErrorFeedbackBuffer()
    gradients = {"a": torch.randn(10), "b": torch.randn(4, 5), "c": torch.randn(3)}
    owed = {}
    for name, gradient in gradients.items():
        owed[name] = gradient - _send(buffer, name, gradient, 0.3)
    for names in [("c", "a"), ("b", "a", "c"), ("a",), ("b", "c")]:
        layout = BucketLayout(names, tuple(gradients[name].shape for name in names))
        slot = buffer.open(layout, torch.device("cpu"))
        assert torch.equal(slot.old, torch.cat([owed[name].reshape(-1) for name in names]))
        for name, debt in owed.items():
            assert torch.equal(buffer.residual(name), debt)


def test_state_dict_serialization() -> None:
    """Through a file and back, readable without unpickling code; a copy, not a view; checked."""
    buffer = ErrorFeedbackBuffer()
    _send(buffer, "w", torch.randn(6, 7), 0.1)
    _send(buffer, "b", torch.randn(7), 0.1)
    state = buffer.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = ErrorFeedbackBuffer()
    other.load_state_dict(torch.load(file, weights_only=True))
    before = {name: residual.clone() for name, residual in state.items()}
    _send(buffer, "w", torch.randn(6, 7), 0.1)
    for name in ("w", "b"):
        assert torch.equal(other.residual(name), before[name])
        assert torch.equal(state[name], before[name])
    for bad in (torch.ones(3), torch.full((6, 7), torch.nan), torch.ones(6, 7, dtype=torch.int64)):
        with pytest.raises(ValueError, match="'w'"):
            other.load_state_dict({"w": bad})
        assert torch.equal(other.residual("w"), before["w"]), "a refused state must change nothing"


def test_unbiased_expectation() -> None:
    """Sum of what was sent + what is owed == sum of the gradients, entry by entry."""
    buffer = ErrorFeedbackBuffer()
    true, sent = torch.zeros(2, 10_000, dtype=torch.float64)
    for _ in range(200):
        gradient = torch.randn(10_000)
        true += gradient
        sent += _send(buffer, "w", gradient, 0.01)
    torch.testing.assert_close(sent + buffer.residual("w").double(), true, rtol=0, atol=1e-4)
    assert float((sent - true).norm() / true.norm()) < 1.0
