"""A small GPT over bytes. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal multi-head self-attention: position t sees positions 0 to t."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention, then a GELU network four times as wide; a norm before each, a residual around each."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        # The tanh approximation of GELU is GPT-2's.
        out: Tensor = x + self.drop(self.proj(F.gelu(self.fc(self.norm2(x)), approximate="tanh")))
        return out


class GPT(nn.Module):
    """A causal transformer over ``vocabulary`` tokens that sees at most ``block`` of them.

    Pre-norm, learned positions. The token embedding is also the output layer: one parameter, used
    at both ends, so nothing can untie it. Weights start as GPT-2's do: normal with deviation 0.02,
    divided by sqrt(2 * layers) for the projections that are added to the residual stream.
    842,496 parameters by default with a block of 128.
    """

    def __init__(
        self,
        block: int,
        vocabulary: int = 256,
        *,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {"block": block, "vocabulary": vocabulary, "layers": layers, "heads": heads, "width": width}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}; change either")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}; 0.0 turns it off")
        self.block = block
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith("proj")
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, vocabulary) for the token after each of ``tokens`` (batch, length)."""
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be (batch, length), got shape {tuple(tokens.shape)}")
        length = tokens.shape[1]
        if length > self.block:
            raise ValueError(
                f"{length} tokens are more than this model's block of {self.block}; "
                "give it the last ones only, or build it with a larger block"
            )
        x = self.drop(self.tokens(tokens) + self.positions.weight[:length])
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)
