"""The ratio as a function of how far a run has come; docs/methods.md has the equations.

A schedule is any function from progress (epochs, or steps: whatever you count) to a ratio. It has no
state, so a resumed run has the ratio that it would have had.

>>> ratio = warmup(0.001, 4.0)
>>> [round(ratio(epoch), 4) for epoch in range(6)]
[0.2512, 0.0631, 0.0158, 0.004, 0.001, 0.001]
>>> sync.set_ratio(ratio(epoch))  # doctest: +SKIP
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping

from .types import check_ratio

Schedule = Callable[[float], float]


def constant(ratio: float) -> Schedule:
    """Always ``ratio``."""
    check_ratio(ratio)
    return lambda progress: ratio


def warmup(ratio: float, length: float, stages: int = 4) -> Schedule:
    """From nearly everything down to ``ratio`` over ``length``, by the same factor at each of ``stages``.

    Stages and not a curve: each ratio is compared over all workers, and its messages are laid out
    anew. (Lin et al., "Deep Gradient Compression", 2018, over four epochs.)
    """
    check_ratio(ratio)
    if not 0.0 <= length < math.inf:
        raise ValueError(f"a warm-up takes 0 or more, got {length}")
    if stages < 1:
        raise ValueError(f"a warm-up has at least one stage, got {stages}")

    def at(progress: float) -> float:
        if progress >= length:
            return ratio
        stage = 1 + int(stages * max(progress, 0.0) / length)
        return float(ratio ** (stage / (stages + 1)))

    return at


def steps(first: float, later: Mapping[float, float]) -> Schedule:
    """``first``, and from each progress in ``later`` on the ratio that stands there."""
    for ratio in (first, *later.values()):
        check_ratio(ratio)
    edges = sorted(later)
    ratios = [first, *(later[edge] for edge in edges)]
    return lambda progress: ratios[bisect.bisect_right(edges, progress)]
