"""The write-up's twelve compression tests, under its names."""

from __future__ import annotations

import math

import pytest
import torch

from compressed_ddp.compression import (
    BaseCompressor,
    CompressStats,
    TopKCompressorCPU,
    TopKCompressorGPU,
    get_compressor,
)

BOTH = pytest.mark.parametrize("cls", [TopKCompressorGPU, TopKCompressorCPU])


def _check_basic(compressor: BaseCompressor) -> None:
    tensor = torch.randn(40, 25)
    before = tensor.clone()
    values, indices, shape = compressor.compress(tensor)
    assert values.numel() == indices.numel() == 100
    assert values.dtype == torch.float32 and indices.dtype == torch.int64
    assert shape == tensor.shape
    assert torch.equal(values, tensor.reshape(-1)[indices])
    assert bool((indices[1:] > indices[:-1]).all())
    assert torch.equal(tensor, before), "compress must only read"


def test_topk_gpu_basic() -> None:
    """Device-generic, so its tensors may as well lie on the CPU."""
    _check_basic(TopKCompressorGPU(ratio=0.1))


def test_topk_cpu_basic() -> None:
    _check_basic(TopKCompressorCPU(ratio=0.1))


@BOTH
def test_compression_ratio(cls: type[BaseCompressor]) -> None:
    """k is ceil(ratio * n), at least 1; and impossible ratios are refused."""
    for n, ratio in [(1000, 0.01), (999, 0.01), (10, 0.001), (64, 0.5), (7, 1.0)]:
        values, _, _ = cls(ratio=ratio).compress(torch.randn(n))
        assert values.numel() == max(1, math.ceil(ratio * n))
    for ratio in (0.0, -0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="ratio must be in"):
            cls(ratio=ratio)


@BOTH
def test_compression_decompression_roundtrip(cls: type[BaseCompressor]) -> None:
    """Everything sent comes back in place; at ratio 1 that is everything."""
    compressor = cls(ratio=0.25)
    tensor = torch.randn(8, 16)
    values, indices, shape = compressor.compress(tensor)
    back = compressor.decompress(values, indices, shape)
    kept = torch.zeros(128, dtype=torch.bool)
    kept[indices] = True
    assert torch.equal(back.reshape(-1)[kept], tensor.reshape(-1)[kept])
    assert not back.reshape(-1)[~kept].any()
    everything = cls(ratio=1.0)
    assert torch.equal(everything.decompress(*everything.compress(tensor)), tensor)


@BOTH
def test_topk_selects_largest_magnitude(cls: type[BaseCompressor]) -> None:
    values, indices, _ = cls(ratio=0.5).compress(torch.tensor([1.0, -5.0, 3.0, -2.0]))
    assert values.tolist() == [-5.0, 3.0]
    assert indices.tolist() == [1, 2]
    tensor = torch.randn(10_000)
    _, indices, _ = cls(ratio=0.01).compress(tensor)
    assert set(indices.tolist()) == set(tensor.abs().topk(100).indices.tolist())


@BOTH
def test_zero_tensor(cls: type[BaseCompressor]) -> None:
    compressor = cls(ratio=0.5)
    values, indices, shape = compressor.compress(torch.zeros(100))
    assert indices.tolist() == list(range(50)), "ties go to the lower index"
    assert torch.equal(compressor.decompress(values, indices, shape), torch.zeros(100))


@BOTH
def test_negative_values(cls: type[BaseCompressor]) -> None:
    """Magnitude decides; the sign travels."""
    tensor = -torch.arange(1.0, 101.0)
    values, indices, _ = cls(ratio=0.1).compress(tensor)
    assert values.tolist() == [-float(v) for v in range(91, 101)]
    assert indices.tolist() == list(range(90, 100))


@BOTH
def test_all_equal_values(cls: type[BaseCompressor]) -> None:
    """Deterministic: of equals, the first k."""
    tensor = torch.full((50,), 2.5)
    tensor[1::2] *= -1
    values, indices, _ = cls(ratio=0.2).compress(tensor)
    assert indices.tolist() == list(range(10))
    assert torch.equal(values, tensor[:10])


@BOTH
def test_single_element(cls: type[BaseCompressor]) -> None:
    compressor = cls(ratio=0.01)
    for tensor in (torch.tensor([3.5]), torch.tensor(-1.25)):
        values, indices, shape = compressor.compress(tensor)
        assert values.tolist() == [tensor.item()] and indices.tolist() == [0]
        assert torch.equal(compressor.decompress(values, indices, shape), tensor)


@BOTH
def test_stats_tracking(cls: type[BaseCompressor]) -> None:
    """Bytes are what the codec would send, not an estimate."""
    compressor = cls(ratio=0.01)
    assert compressor.stats == CompressStats()
    assert compressor.stats.compression_ratio() == 0.0
    for _ in range(3):
        compressor.compress(torch.randn(100_000))
    stats = compressor.stats
    assert stats.total_calls == 3
    assert stats.total_bytes_original == 3 * 400_000
    assert stats.total_bytes_compressed == 3 * compressor.codec.nbytes(100_000, 1000)
    assert stats.total_time_ms > 0
    assert stats.compression_ratio() == pytest.approx(
        100 * (1 - stats.total_bytes_compressed / stats.total_bytes_original)
    )
    assert 99.4 < stats.compression_ratio() < 99.6


def test_device_consistency() -> None:
    """The factory picks by device; results stay on the tensor's device and do not depend on the class."""
    assert isinstance(get_compressor(0.01, "cpu"), TopKCompressorCPU)
    for device in ("cuda", "cuda:1", "mps", torch.device("cuda", 0)):
        assert isinstance(get_compressor(0.01, device), TopKCompressorGPU)
    tensor = torch.randn(1000)
    mine, theirs = (get_compressor(0.1, device).compress(tensor) for device in ("cpu", "cuda"))
    assert torch.equal(mine.values, theirs.values) and torch.equal(mine.indices, theirs.indices)
    assert mine.values.device == mine.indices.device == tensor.device
    # A device without memory shows that nothing is moved to the host behind the user's back.
    with pytest.raises((NotImplementedError, RuntimeError)):
        get_compressor(0.1, "cuda").compress(torch.empty(1000, device="meta"))


@BOTH
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (4, 3, 3, 3), (1, 1), (0,), (5, 0), ()])
def test_shape_preservation(cls: type[BaseCompressor], shape: tuple[int, ...]) -> None:
    compressor = cls(ratio=0.3)
    payload = compressor.compress(torch.randn(shape))
    assert payload.shape == torch.Size(shape)
    assert compressor.decompress(*payload).shape == torch.Size(shape)
