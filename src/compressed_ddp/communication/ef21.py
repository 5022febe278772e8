"""EF21: workers send how their gradient differs from what the others believe it is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..error_feedback.state import AGREED, ESTIMATE
from ..kernels.reference import all_finite
from ..types import Clock, Collective, CompressionConfig, Held, Slot, Stamp
from .packer import deliver_, room_for_sum

AVERAGE = "average"
_MOST = torch.finfo(torch.float32).max


class Ef21:
    """A memory that holds no debt. Worker i keeps g_i, all keep g; C is compressor, codec and rounding.

        c_i = C(gradient_i - g_i)
        g_i = g_i + c_i
        g   = g + mean of all c_i             what the optimizer gets

    With ``eta`` (EF21-SGDM) v_i = (1 - eta) v_i + eta gradient_i takes the gradient's place; v_i begins with
    the first gradient, parameter by parameter. By all-gather, g is the mean of all g_i. By the sharded
    collective it is that less what the owners of shards owe, and this is EF21-BC: an owner passes on C(mean
    of g_i - g).

    A worker's own c_i comes out of the law: with x = gradient_i - g_i as all that is owed and no gradient,
    what is left is x - c_i. So it holds for every collective. Where nothing was sent g_i keeps its bits.

    Richtarik et al., "EF21", 2021; Fatkhullin et al., "EF21 with Bells & Whistles", 2021, and "Momentum
    Provably Improves Error Feedback!", 2023.
    """

    def __init__(self, eta: float | None = None) -> None:
        self._eta = eta
        self.memories = (ESTIMATE, AGREED) if eta is None else (ESTIMATE, AGREED, AVERAGE)

    def mean_(
        self,
        collective: Collective,
        bucket: Tensor,
        slots: Mapping[str, Slot],
        stamp: Stamp,
        clock: Clock,
        first: Held,
    ) -> bool:
        """Overwrite ``bucket`` (the local gradient) with g; False: someone's gradient was not finite.

        Reads the slots' ``old`` and writes their ``new``. In the ranges ``first`` lie parameters whose first
        step this is. No gradient is a gradient of zero here: nothing is
        held back for parameters that were not used, and for workers that have run out of data.
        """
        estimate, agreed = slots[ESTIMATE], slots[AGREED]
        with clock.phase("select"):
            difference = self._target(bucket, slots, first) - estimate.old
            change = room_for_sum(bucket).zero_()
        finite = collective.mean_(change, Slot(difference, estimate.new), stamp, clock)
        with clock.phase("decode"):
            # This rank's own: too large, it must not end in an infinity that no other rank knows of.
            torch.sub(difference, estimate.new, out=estimate.new).add_(estimate.old).clamp_(-_MOST, _MOST)
            torch.add(agreed.old, change, out=agreed.new)
            if not finite or not all_finite(agreed.new):  # which all ranks have alike
                bucket.fill_(torch.nan)
                return False
            return deliver_(bucket, agreed.new)

    def alone_(self, bucket: Tensor, slots: Mapping[str, Slot], first: Held) -> None:
        """Nothing is sent, and so nothing compressed: everyone believes what is."""
        target = self._target(bucket, slots, first)
        slots[ESTIMATE].new.copy_(target)
        slots[AGREED].new.copy_(target)
        bucket.copy_(target)

    def _target(self, bucket: Tensor, slots: Mapping[str, Slot], first: Held) -> Tensor:
        """What is to be estimated: the gradient, or this worker's average of gradients."""
        gradient = bucket.to(torch.float32)
        if self._eta is None:
            return gradient
        average = slots[AVERAGE]
        torch.lerp(average.old, gradient, self._eta, out=average.new)
        for a, b in first:
            average.new[a:b] = gradient[a:b]
        return average.new


def make_memory(config: CompressionConfig) -> Ef21 | None:
    """What ``config.memory`` names; None for plain error feedback."""
    if config.memory == "ef":
        return None
    return Ef21(config.eta if config.memory == "ef21-sgdm" else None)
