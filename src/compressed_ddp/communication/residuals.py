"""What is owed: how much, how long it waits, and whether it grows without bound."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FASTER = 10.0
"""By what a norm must outgrow a debt that grows with every step, since that was slowest."""
_LOOKS = 3
"""At so many looks in a row: a few batches may be odd."""


_OLDER = 100.0
"""By what an age must exceed 1 / ratio."""


class Owed:
    """Sums over the buckets of one step: what is left owed after it, and what this rank sent in it."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def add(self, left: Tensor, sent: Tensor) -> None:
        """A bucket's new residual and what its messages decode to; both are only read."""
        wide = torch.float32 if left.device.type == "mps" else torch.float64  # which MPS does not have
        norm = torch.linalg.vector_norm
        sums = norm(left, dtype=wide).square(), norm(left, 1, dtype=wide), norm(sent, 1, dtype=wide)
        self._sums.append(torch.stack(sums))

    def figures(self) -> tuple[float, float] | None:
        """The norm of what is owed, and its age; None if nothing was added.

        By Little's law, what waits divided by what leaves in a step is how long it waits on average. Both are
        sums of magnitudes, so that large entries count as much as they matter. Top-K sends at least its ratio
        of the whole, so its age is never more than 1 / ratio - 1.
        """
        if not self._sums:
            return None
        squares, owed, sent = torch.stack([each.cpu() for each in self._sums]).sum(0).tolist()
        age = owed / sent if sent > 0 else math.inf if owed > 0 else 0.0
        return math.sqrt(squares), age


class Growth:
    """Judges a sequence of norms, one a look.

    Error feedback owes more and more at first, and settles when what waits is large enough to be chosen:
    after a few times 1 / ratio steps. All that time the norm grows no faster than the number of steps,
    because gradients of one size can add up to no more. So what is judged is the norm divided by the steps
    since the ratio changed last: it stays or falls, unless gradients themselves grow, or their units change.
    If it is ten times its least at three looks in a row, and the norm rose at each of them, it diverges.
    """

    def __init__(self) -> None:
        self._begin(math.nan, 0)

    def _begin(self, ratio: float, step: int) -> None:
        self._ratio, self._began = ratio, step
        self._least, self._last, self._looks = math.inf, math.inf, 0

    def look(self, step: int, norm: float, ratio: float) -> float | None:
        """By what ``norm``, that of ``step``, has outgrown the steps; None while all is well."""
        if ratio != self._ratio or step < self._began:  # a state of an earlier step was loaded
            self._begin(ratio, step)
        pace = norm / (step - self._began + 1)
        times = pace / self._least if self._least else 1.0
        self._looks = self._looks + 1 if times >= _FASTER and norm > self._last else 0
        if step > self._began:  # one step alone says little: its gradient may be a small one
            self._least = min(self._least, pace)
        self._last = norm
        if self._looks < _LOOKS:
            return None
        self._least, self._looks = pace, 0  # the next word when it is ten times worse
        return times


class Waiting:
    """Judges a sequence of ages, one a look.

    A debt that grows by the same every step looks healthy to ``Growth``: so does one of which nothing is ever
    sent. But Top-K's age is below 1 / ratio, and that of other sparse methods near it. An age a hundred times
    as large, or infinite, is told at the third look in a row, after 1 / ratio steps at least: time enough to
    have sent everything once.
    """

    def __init__(self) -> None:
        self._since, self._looks = 0, 0

    def look(self, step: int, age: float, ratio: float) -> bool:
        """Whether to say that what waits after ``step`` waits too long; then at 6, 12, ... looks again."""
        if age <= oldest(ratio) or step < self._since:  # a state of an earlier step was loaded
            self._looks = 0
            return False
        if not self._looks:
            self._since = step
        self._looks += 1
        if step - self._since < 1 / ratio:
            self._looks = min(self._looks, _LOOKS - 1)
            return False
        times, rest = divmod(self._looks, _LOOKS)
        return not rest and times.bit_count() == 1


def oldest(ratio: float) -> float:
    """The age above which something is wrong. What is not sparse may wait longer: a rank-1 factor says little
    about a large matrix."""
    return _OLDER / ratio if ratio < 1.0 else _OLDER**3


def stale(norm: float, rank: int, age: float, ratio: float) -> str:
    """What to say about a residual that waits too long."""
    how = "nothing of it was sent" if age == math.inf else f"so little is sent that it waits {age:.3g} steps"
    usual = f"; ratio {ratio:g} means {1 / ratio:.0f} or fewer" if ratio < 1.0 else ""
    return (
        f"what rank {rank} has not sent yet, with a norm of {norm:.3g}, stays: at {_LOOKS} looks in a row or "
        f"more {how}{usual}. Is a threshold above all gradients? Lower it, or leave it out and set ratio. "
        "Otherwise send more"
    )


def advice(norm: float, rank: int, times: float, ratio: float) -> str:
    """What to say about a residual that diverges."""
    return (
        f"what rank {rank} has not sent yet grows without bound: its norm is {norm:.3g}, and it has grown "
        f"{times:.0f} times faster than gradients of one size could add up. The learning rate is likely too "
        f"high for ratio {ratio:g}: lower it, warm up, clip gradients, or send more. If the loss is scaled, "
        "set sync.loss_scale"
    )
