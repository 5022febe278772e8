"""The half of an optimizer that works before compression, as a part of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..error_feedback.state import check_missed
from ..layout import BucketLayout
from ..types import Held, SenderHalf, Slot


class FirstHalf:
    """Calls a ``SenderHalf``, if there is one, and counts the steps that each parameter was there for.

    A parameter without a gradient wants nothing and forgets nothing, and the step is none of its own: what
    Adam makes of a first gradient must not depend on how many steps others took before. Nor are those of its
    own that were before it came.
    """

    def __init__(self, sender: SenderHalf | None) -> None:
        self._sender = sender
        self.works = sender is not None
        self.memories = sender.memories if sender is not None else ()
        self.masking = sender is not None and sender.masking
        self._missed: dict[str, int] = {}
        self._absent: list[str] = []
        """Parameters that miss the step under way."""

    def enrol(self, names: Iterable[str], taken: int) -> None:
        """These are here for the first time, after ``taken`` steps of others."""
        if taken:
            self._missed |= dict.fromkeys(names, taken)

    def steps(self, layout: BucketLayout, taken: int) -> list[int]:
        """How many steps each parameter was there for, of ``taken``."""
        return [taken - self._missed.get(name, 0) for name in layout.names]

    def before_(
        self, layout: BucketLayout, bucket: Tensor, slots: Mapping[str, Slot], held: Held, taken: int
    ) -> None:
        """Replace ``bucket`` by what this worker wants, after ``taken`` steps; nothing in ranges ``held``."""
        if self._sender is None:
            return
        self._sender.before_(layout, bucket, slots, self.steps(layout, taken))
        begins = list(zip(layout.names, layout.offsets, strict=False))
        for a, b in held:
            bucket[a:b] = 0
            self._absent += [name for name, begin in begins if a <= begin < b]

    def after_(self, slots: Mapping[str, Slot], sent: Sequence[Tensor] | None, held: Held) -> None:
        """The end of it; nothing is forgotten where there was no gradient."""
        if self._sender is not None and sent is not None:
            self._sender.after_(slots, sent)
        for slot in slots.values():
            for a, b in held:
                slot.new[a:b] = slot.old[a:b]

    def count(self) -> None:
        """The step counts."""
        for name in self._absent:
            self._missed[name] = self._missed.get(name, 0) + 1

    def forget(self) -> None:
        """A new step begins, or this one does not count."""
        self._absent = []

    def state_dict(self) -> dict[str, int]:
        """By name of a parameter, in how many steps that counted it had no gradient here."""
        return dict(self._missed)

    def checked(self, state: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> dict[str, int]:
        """What ``load`` takes from a saved state; raises ValueError unless it can be.

        A parameter of which nothing is kept, because it was frozen when the state was saved, begins now.
        """
        missed = check_missed(state)
        for name in missed:
            if name not in shapes:
                raise ValueError(f"damaged state: {name!r} missed steps, and this model does not have it")
        new = {name for what in self.memories for name in shapes if name not in state["kept"][what]}
        return {**missed, **dict.fromkeys(new, state["taken"])}

    def load(self, missed: dict[str, int]) -> None:
        self._missed = missed
