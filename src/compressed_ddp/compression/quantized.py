"""Every element in a few bits: sign, 1-bit SGD, TernGrad, QSGD. The rounding is wire/values.py's."""

from __future__ import annotations

from typing import Any

from .base import BaseCompressor
from .dense import FullCompressor


class SignCompressor(FullCompressor):
    """Send signs, times the mean magnitude of their block of 512.

    Cost: 1.06 bits an element. The scale makes it a contraction, so error feedback converges
    where plain signSGD need not. Karimireddy et al., "Error Feedback Fixes SignSGD and other
    Gradient Compression Schemes", 2019.
    """

    name = "sign"
    says_zero = False
    value_formats = ("sign",)


class OneBitCompressor(FullCompressor):
    """Send signs, with one mean for a column's positive entries and one for its negative ones.

    Cost: 1.125 bits an element. A column is a run of 512 elements of the flat bucket (the paper:
    a column of the weight matrix), so that messages have a fixed size and shards may cut them.
    Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs", 2014.
    """

    name = "onebit"
    says_zero = False
    value_formats = ("onebit",)


class TernGradCompressor(FullCompressor):
    """Send -1, 0 or 1 times the largest magnitude of the block of 512, at random, unbiased.

    Cost: 2.06 bits an element and a random draw for each. Works without a residual. Wen et al.,
    "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", 2017.
    """

    name = "terngrad"
    value_formats = ("ternary",)
    unbiased = True
    contraction = False


class QSGDCompressor(FullCompressor):
    """Send one of s levels of the block's Euclidean norm and a sign, at random, unbiased.

    Cost: log2(s + 1) + 1 bits an element (8.06 for s = 127) and a random draw for each. Works
    without a residual; with s = 31 or more its error is small enough for error feedback too.
    Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
    2017.
    """

    name = "qsgd"
    value_formats = ("qsgd127", "qsgd63", "qsgd31", "qsgd15", "qsgd7", "qsgd3", "qsgd1")
    unbiased = True

    def __init__(self, levels: int = 127, *, seed: int = 0) -> None:
        if f"qsgd{levels}" not in self.value_formats:
            raise ValueError(
                f"levels must be one less than a power of two, 1 to 127, got {levels!r}; "
                "127 takes 8 bits an element, 7 takes 4, 1 takes 2"
            )
        BaseCompressor.__init__(self, 1.0, values=f"qsgd{levels}", seed=seed)
        self.levels = levels
        # The variance is at most min(d / s^2, sqrt(d) / s) of the signal's energy, d = 512.
        self.contraction = min(512 / levels**2, 512**0.5 / levels) < 1.0

    def options(self) -> dict[str, Any]:
        return super().options() | {"levels": self.levels}
