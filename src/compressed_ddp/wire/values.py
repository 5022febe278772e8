"""How values travel. Each format knows its size in advance and says what its bytes decode to."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..kernels import kernels_for
from ..kernels.reference import float_decode, log_nbytes, pack_bits, pack_uints, unpack_bits, unpack_uints
from ..types import WireError, unknown_name

BLOCK = 512
"""Entries that share a scale in the 1-bit, ternary and QSGD formats."""


_MAX = torch.finfo(torch.float32).max


class ValueFormat(Protocol):
    """Values are finite float32. ``seed`` feeds the formats that round at random."""

    code: int

    def nbytes(self, count: int) -> int: ...

    def encode(self, values: Tensor, seed: int, out: Tensor) -> None:
        """Write ``nbytes`` bytes to ``out``."""
        ...

    def decode(self, data: Tensor, count: int) -> Tensor:
        """``count`` float32 values; raises WireError for bytes that ``encode`` cannot write."""
        ...


class Float:
    """An IEEE type. Values beyond its range become its largest: the rest stays in the residual."""

    def __init__(self, code: int, dtype: torch.dtype) -> None:
        self.code, self.dtype = code, dtype

    def nbytes(self, count: int) -> int:
        return count * self.dtype.itemsize

    def encode(self, values: Tensor, seed: int, out: Tensor) -> None:
        limit = torch.finfo(self.dtype).max
        out.copy_(values.clamp(-limit, limit).to(self.dtype).view(torch.uint8))

    def decode(self, data: Tensor, count: int) -> Tensor:
        return float_decode(data, self.dtype, count)


class Logarithmic:
    """A sign and a logarithmic code between the smallest and largest magnitude of 64 entries."""

    def __init__(self, code: int, bits: int) -> None:
        self.code, self.bits = code, bits

    def nbytes(self, count: int) -> int:
        return log_nbytes(self.bits, count)

    def encode(self, values: Tensor, seed: int, out: Tensor) -> None:
        kernels_for(values).log_encode(values, self.bits, out)

    def decode(self, data: Tensor, count: int) -> Tensor:
        return kernels_for(data).log_decode(data, self.bits, count)


class OneBit:
    """One bit an entry; each block of 512 has one magnitude, or one for each sign."""

    def __init__(self, code: int, *, split: bool) -> None:
        self.code, self.split = code, split

    def nbytes(self, count: int) -> int:
        return (8 if self.split else 4) * _n_blocks(count) + -(-count // 8)

    def encode(self, values: Tensor, seed: int, out: Tensor) -> None:
        negative = values < 0
        if self.split:
            means = [_block_mean(values, ~negative), _block_mean(-values, negative)]
        else:
            means = [_block_mean(values.abs(), torch.ones_like(negative))]
        scales = torch.stack(means, 1).view(-1)
        torch.cat([scales.view(torch.uint8), pack_bits(negative.to(torch.uint8))], out=out)

    def decode(self, data: Tensor, count: int) -> Tensor:
        columns = 2 if self.split else 1
        scales, bits = _split_scales(data, self.nbytes(count), count, columns)
        negative = unpack_bits(bits)[:count].bool()
        scales = scales.view(-1, columns)
        plus, minus = _per_entry(scales[:, 0], count), _per_entry(scales[:, -1], count)
        return torch.where(negative, -minus, plus)


class Stochastic:
    """A sign and one of ``s`` levels of the block's norm, rounded up or down at random.

    The chance of rounding up is the distance from the level below, so the expectation is the
    value itself.
    """

    def __init__(self, code: int, levels: int, *, euclidean: bool) -> None:
        self.code, self.levels, self.euclidean = code, levels, euclidean
        self.bits = levels.bit_length() + 1

    def nbytes(self, count: int) -> int:
        return 4 * _n_blocks(count) + -(-count * self.bits // 8)

    def encode(self, values: Tensor, seed: int, out: Tensor) -> None:
        blocks = _blocks(values)
        scale = blocks.abs().amax(1)
        if self.euclidean:
            # Relative to the largest, so that squares neither overflow nor vanish.
            shares = blocks / torch.where(scale > 0, scale, 1.0).view(-1, 1)
            scale = (scale * torch.linalg.vector_norm(shares, dim=1)).clamp(max=_MAX)
        norm = _per_entry(scale, values.numel())
        share = torch.where(norm > 0, values.abs() / norm, 0.0)
        generator = torch.Generator().manual_seed(seed)
        draw = torch.rand(values.numel(), generator=generator, dtype=torch.float32, device="cpu")
        levels = (share * self.levels + draw.to(values.device)).floor().clamp(0, self.levels)
        codes = levels.to(torch.int64) | ((values < 0).to(torch.int64) << (self.bits - 1))
        torch.cat([scale.view(torch.uint8), pack_uints(codes, self.bits)], out=out)

    def decode(self, data: Tensor, count: int) -> Tensor:
        scales, packed = _split_scales(data, self.nbytes(count), count, 1)
        codes = unpack_uints(packed, self.bits, count)
        # By a tensor: some devices divide by a number through its reciprocal, a bit off.
        top = torch.tensor(float(self.levels), dtype=torch.float32, device=data.device)
        levels = (codes & self.levels).to(torch.float32) / top
        signed = torch.where(codes > self.levels, -levels, levels)
        return signed * _per_entry(scales, count)


def _n_blocks(count: int) -> int:
    return -(-count // BLOCK)


def _blocks(values: Tensor) -> Tensor:
    """``values`` as rows of 512, the last one filled up with zeros."""
    padded = values.new_zeros(_n_blocks(values.numel()) * BLOCK)
    padded[: values.numel()] = values
    return padded.view(-1, BLOCK)


def _block_mean(values: Tensor, chosen: Tensor) -> Tensor:
    """The mean of each block's chosen entries; 0 where none is chosen. Never overflows."""
    counts = _blocks(chosen.to(torch.float32)).sum(1).clamp(min=1)
    return _blocks(torch.where(chosen, values, 0.0)).div(counts.view(-1, 1)).sum(1).clamp(max=_MAX)


def _per_entry(per_block: Tensor, count: int) -> Tensor:
    return per_block.repeat_interleave(BLOCK)[:count]


def _split_scales(data: Tensor, size: int, count: int, columns: int) -> tuple[Tensor, Tensor]:
    """A value part's scales and what follows them; raises WireError unless all of it can be."""
    if data.numel() != size:
        raise WireError(f"value part has {data.numel()} bytes, not {size}")
    end = 4 * columns * _n_blocks(count)
    scales = data[:end].clone().view(torch.float32)
    if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
        raise WireError("value part has a scale that is negative or not finite")
    return scales, data[end:]


_FORMATS: dict[str, ValueFormat] = {
    "fp32": Float(0, torch.float32),
    "fp16": Float(1, torch.float16),
    "bf16": Float(2, torch.bfloat16),
    "int8": Logarithmic(3, 8),
    "int4": Logarithmic(4, 4),
    "sign": OneBit(5, split=False),
    "onebit": OneBit(6, split=True),
    "ternary": Stochastic(7, 1, euclidean=False),
    "qsgd1": Stochastic(17, 1, euclidean=True),
    "qsgd3": Stochastic(18, 3, euclidean=True),
    "qsgd7": Stochastic(19, 7, euclidean=True),
    "qsgd15": Stochastic(20, 15, euclidean=True),
    "qsgd31": Stochastic(21, 31, euclidean=True),
    "qsgd63": Stochastic(22, 63, euclidean=True),
    "qsgd127": Stochastic(23, 127, euclidean=True),
}

SPARSE_VALUES = ("fp32", "fp16", "bf16", "int8", "int4")
"""What ``CompressionConfig.values`` may be; the others belong to one compressor each."""


def value_format(name: str) -> ValueFormat:
    """The format called ``name``; an unknown name is an error that offers the nearest."""
    if name not in _FORMATS:
        raise unknown_name("value format", name, SPARSE_VALUES)
    return _FORMATS[name]
