"""The conformance suite: every compressor in the factory must pass. Adding one means adding a row."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from compressed_ddp import CompressionConfig, get_compressor
from compressed_ddp.compression import COMPRESSORS
from compressed_ddp.compression.factory import from_config

ALL = pytest.mark.parametrize("name", sorted(COMPRESSORS))
SHAPES = [(1,), (7,), (64, 33), (5, 4, 3, 3), (3000,), ()]


@ALL
def test_documented(name: str) -> None:
    """A docstring says what it costs and cites its paper."""
    text = inspect.getdoc(COMPRESSORS[name]) or ""
    assert "Cost:" in text
    assert name == "dense" or any(str(year) in text for year in range(2014, 2027)), "no paper cited"


@ALL
@pytest.mark.parametrize("shape", SHAPES)
def test_payload(name: str, shape: tuple[int, ...]) -> None:
    """float32 values at strictly increasing int64 indices, shape kept, input only read."""
    compressor = get_compressor(0.1, name=name)
    tensor = torch.randn(shape)
    before = tensor.clone()
    values, indices, out_shape = compressor.compress(tensor)
    assert torch.equal(tensor, before)
    assert out_shape == tensor.shape
    assert values.dtype == torch.float32 and indices.dtype == torch.int64
    assert values.shape == indices.shape and values.dim() == 1
    assert 0 <= values.numel() <= compressor.quota(tensor.numel())
    assert bool((indices[1:] > indices[:-1]).all())
    back = compressor.decompress(values, indices, out_shape)
    assert back.shape == tensor.shape
    assert torch.equal(back.reshape(-1)[indices], values)


@ALL
@pytest.mark.parametrize("shape", SHAPES)
def test_law(name: str, shape: tuple[int, ...]) -> None:
    """residual_before + gradient == what is returned + residual_after, for every method."""
    compressor = get_compressor(0.1, name=name)
    residual, gradient = torch.randn(shape), torch.randn(shape)
    due = residual + gradient
    payload = compressor.take_(residual, gradient)
    torch.testing.assert_close(compressor.decompress(*payload) + residual, due, rtol=1e-6, atol=1e-6)


@ALL
def test_not_finite_leaves_the_residual(name: str) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        residual, gradient = torch.randn(100), torch.randn(100)
        before, gradient[17] = residual.clone(), bad
        with pytest.raises(ValueError, match="not finite"):
            get_compressor(0.1, name=name).take_(residual, gradient)
        assert torch.equal(residual, before)
        with pytest.raises(ValueError, match="NaN or infinite"):
            get_compressor(0.1, name=name).compress(gradient)


@ALL
def test_what_cannot_be_compressed(name: str) -> None:
    """Integer, complex and sparse gradients: an error that says what to do."""
    compressor = get_compressor(0.1, name=name)
    for tensor, advice in [
        (torch.ones(4, dtype=torch.int32), "int32"),
        (torch.ones(4, dtype=torch.complex64), "complex64.*as real"),
        (torch.ones(4, 4).to_sparse(), "sparse=False"),
    ]:
        with pytest.raises(TypeError, match=advice):
            compressor.compress(tensor)
        with pytest.raises(TypeError, match=advice):
            compressor.take_(torch.zeros(4), tensor)


@ALL
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """Residuals are float32 whatever the gradient's dtype, and the law holds for the widened gradient."""
    compressor = get_compressor(0.1, name=name)
    gradient, residual = torch.randn(500).to(dtype), torch.zeros(500)
    payload = compressor.take_(residual, gradient)
    assert payload.values.dtype == torch.float32
    torch.testing.assert_close(
        compressor.decompress(*payload) + residual, gradient.float(), rtol=1e-6, atol=1e-6
    )
    with pytest.raises(ValueError, match="expected float32"):
        compressor.take_(torch.zeros(500, dtype=torch.float64), gradient)


@ALL
def test_deterministic(name: str) -> None:
    """Two compressors with one seed do the same; randomness comes from nowhere else."""
    tensors = [torch.randn(2000) for _ in range(3)]
    runs = []
    for attempt in range(2):
        torch.manual_seed(attempt)
        compressor = get_compressor(0.05, name=name, seed=7)
        runs.append([compressor.compress(tensor) for tensor in tensors])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first.values, second.values) and torch.equal(first.indices, second.indices)


@ALL
def test_quality(name: str) -> None:
    """Conservation cannot see a method that sends garbage: what is sent must resemble the tensor."""
    compressor = get_compressor(0.1, name=name, **({"rank": 4} if name == "powersgd" else {}))
    tensor = torch.randn(64, 6) @ torch.randn(6, 128) + 0.1 * torch.randn(64, 128)
    sent = compressor.decompress(*compressor.compress(tensor))
    cosine = torch.nn.functional.cosine_similarity(sent.reshape(1, -1), tensor.reshape(1, -1)).item()
    floor = {"topk": 0.5, "threshold": 0.45, "sign": 0.7, "onebit": 0.7, "powersgd": 0.8}
    floor |= {"dense": 0.999999, "fp16": 0.99999, "bf16": 0.999, "qsgd": 0.95}
    assert cosine > floor.get(name, 0.25)


def test_unbiased_methods_do_without_a_residual() -> None:
    unbiased = {name for name in COMPRESSORS if get_compressor(name=name).unbiased}
    assert unbiased == {"dense", "qsgd", "terngrad"}
    assert get_compressor(name="randomk", unbiased=True).unbiased


def test_threshold_fixed_and_sampled() -> None:
    tensor = torch.tensor([0.1, -0.9, 0.5, 2.0, -0.5, 0.0])
    fixed = get_compressor(1.0, name="threshold", threshold=0.5)
    assert fixed.compress(tensor).indices.tolist() == [1, 2, 3, 4]
    capped = get_compressor(0.3, name="threshold", threshold=0.5)
    assert capped.compress(tensor).indices.tolist() == [1, 3], "above the cap, the largest"
    big = torch.randn(200_000)
    sampled = get_compressor(0.01, name="threshold").compress(big)
    assert 1000 < sampled.values.numel() <= 2000
    top = set(big.abs().topk(2000).indices.tolist())
    assert set(sampled.indices.tolist()) <= top


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown compressor 'topkk'; did you mean 'topk'"):
        get_compressor(name="topkk")
    with pytest.raises(ValueError, match=r"unknown value format.*'int9'; did you mean 'int"):
        get_compressor(values="int9")
    with pytest.raises(ValueError, match="'treshold'; did you mean 'threshold'"):
        get_compressor(name="threshold", treshold=1.0)
    with pytest.raises(ValueError, match=r"unknown option.*'levels'"):
        get_compressor(name="topk", levels=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.0}, r"ratio must be in \(0, 1\], got 0.0"),
        ({"ratio": 1.01}, r"got 1.01"),
        ({"scope": "tenor"}, "unknown scope 'tenor'; did you mean 'tensor'"),
        ({"min_compress_numel": -1}, "min_compress_numel must be 0 or more"),
        ({"owner_factor": 0.5}, "owner_factor must be at least 1"),
        ({"sync_timeout": 0}, "sync_timeout must be positive"),
        ({"threshold": -1.0}, "threshold must be a positive magnitude"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"rank": 1.5}, "rank must be a whole number, got 1.5"),
        ({"rank": "2"}, "rank must be a whole number, got '2'"),
        ({"levels": True}, "levels must be a whole number, got True"),
        ({"ratio": True}, r"ratio must be in \(0, 1\], got True"),
        ({"eta": "x"}, "eta must be a finite number, got 'x'"),
        ({"sync_timeout": float("inf")}, "sync_timeout must be a finite number, got inf"),
        ({"owner_factor": float("nan")}, "owner_factor must be a finite number, got nan"),
        ({"threshold": "x"}, "threshold must be a finite number or None, got 'x'"),
        ({"error_feedback": "no"}, "error_feedback must be True or False or None, got 'no'"),
        ({"exact": 1}, "exact must be True or False, got 1"),
        ({"compressor": None}, "compressor must be a name, got None"),
    ],
)
def test_config_says_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompressionConfig(**options)


def test_from_config_passes_on_what_a_compressor_takes() -> None:
    config = CompressionConfig(compressor="qsgd", levels=7, seed=3)
    compressor = from_config(config)
    assert compressor.seed == 3 and compressor.codec.values.nbytes(512) == 4 + 256
    with pytest.raises(ValueError, match="levels must be one less than a power of two"):
        from_config(CompressionConfig(compressor="qsgd", levels=8))


def test_decompress_checks_its_input() -> None:
    compressor = get_compressor()
    with pytest.raises(ValueError, match="outside a tensor of 4"):
        compressor.decompress(torch.ones(1), torch.tensor([4]), torch.Size([4]))
    with pytest.raises(ValueError, match="2 values for 1 indices"):
        compressor.decompress(torch.ones(2), torch.tensor([0]), torch.Size([4]))
