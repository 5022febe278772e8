"""Buckets in, means out: one transaction a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..compression import BaseCompressor
from ..error_feedback import ErrorFeedbackBuffer
from ..error_feedback.state import (
    AGREED,
    ESTIMATE,
    STATE_FORMAT,
    check_kept,
    check_state,
    saved_ratio,
)
from ..kernels import describe
from ..kernels.reference import all_finite
from ..layout import BucketLayout
from ..metrics import Ledger
from ..types import CompressionConfig, Held, SenderHalf, Slot, Stamp, Transport
from .adaptive import Allotment, check_factors
from .choices import check_new_ratio, in_words, resolve
from .ef21 import make_memory
from .guard import Guard
from .half import FirstHalf
from .handshake import agree, digest
from .lanes import Lanes, split_by_size
from .packer import deliver_, unscaled_
from .rollcall import in_bucket


class Reducer:
    """Owns the residuals and everything else that a rank remembers between steps.

    A step is a transaction: buckets are reduced one by one, and only when the last one is
    through, and nobody's gradient was NaN or infinite, do the new residuals replace the old.
    Not thread-safe: one thread reduces, and state is read and loaded between steps.
    """

    def __init__(
        self,
        compressor: BaseCompressor,
        config: CompressionConfig,
        transport: Transport,
        memory: ErrorFeedbackBuffer | None = None,
        device: torch.device | None = None,
        sender: SenderHalf | None = None,
        note: str = "",
    ) -> None:
        """``device`` is where start-up messages travel from; gradients say their own. ``sender`` works on
        them before they are compressed. ``note`` ends the method's name in the ledger."""
        self.compressor = compressor
        self._device = device or torch.device("cpu")
        self.config = resolve(config, compressor)
        self.transport = transport
        self.memory = memory if memory is not None else ErrorFeedbackBuffer()
        feedback = bool(self.config.error_feedback)
        self._note = f", {type(sender).__name__}{note}" if sender is not None else note
        self.stats = Ledger("", describe(self._device), feedback, compressor.unbiased)
        smallest = config.min_compress_numel if compressor.small_tensors_apart else 0
        self._allotment = Allotment(config.adapt_every, smallest)
        self.take_ratio(self.ratio)
        self.step = 0
        self.taken = 0
        """Steps that counted: nobody's gradient was NaN or infinite."""
        self.counted = True
        """Whether the last step did."""
        self._half = FirstHalf(sender)
        self._ef21 = make_memory(self.config)
        if self._ef21 is not None and self._half.masking:
            raise ValueError(
                f"memory={config.memory!r} with momentum masking: masked is what was sent of a debt, and "
                "EF21 has none. Use masking=False, or memory='ef'"
            )
        kept = (*self._half.memories, *(self._ef21.memories if self._ef21 else ()))
        self.kept = {name: ErrorFeedbackBuffer() for name in kept}
        """What the sender's half remembers, and EF21."""
        self._guard = Guard(config.guard_every, transport, self._device, self.stats)
        self._lanes = Lanes(compressor, self.config, transport, self._take_back_)
        self._seen: list[BucketLayout] = []
        self._touched: list[Slot] = []
        self._finite = True

    @property
    def ratio(self) -> float:
        """Share of the entries that is sent now; ``config.ratio`` is what it began with."""
        return self.compressor.ratio

    def set_ratio(self, ratio: float) -> None:
        """Send this share of the entries from the next step on. All ranks call it together, between steps.

        What is owed stays owed, by workers and by owners. Messages of different sizes would end
        the process group, so the ranks compare first: if any rank has another ratio or an
        impossible one, every rank raises and nothing is changed anywhere.
        """

        def prepare() -> tuple[None, dict[str, Any]]:
            check_new_ratio(self.compressor, ratio)
            return None, {"ratio": float(ratio)}

        agree(self.transport, self._device, prepare)
        self.take_ratio(ratio)

    def take_ratio(self, ratio: float) -> None:
        """A ratio that all ranks have agreed on; buckets notice by themselves (``Lanes.open``)."""
        self.compressor.ratio = self.stats.ratio = float(ratio)
        self.compressor.factors = self._allotment.at(self.ratio)  # not those of an earlier run
        self.stats.method = in_words(self.compressor, self.config) + self._note

    def reduce_(
        self,
        layout: BucketLayout,
        bucket: Tensor,
        *,
        last: bool,
        joined: bool = False,
        scale: float = 1.0,
    ) -> None:
        """Overwrite ``bucket`` with the mean over all workers; ``last`` ends the step.

        A ``joined`` rank has run out of data: it brings zeros, keeps what it owes, and keeps its
        place in the exchange.

        The gradient comes multiplied by ``scale``, alike on all ranks, and so goes the mean. In between
        it is not, and a mean that only this makes infinite calls the step off as any other.

        A bucket that a loaded state knows as several is reduced as several, so that a resumed
        run chooses what the uninterrupted run would have chosen.
        """
        if layout.numel > 0:
            local = unscaled_(bucket, scale, changes=self._half.works)
            self._mean_(layout, local, joined)
            if local is not bucket or scale != 1.0:
                self._finite &= deliver_(bucket, local, scale)
            if self.transport.world_size > 1:
                self.stats.bucket(bucket.numel() * bucket.element_size(), self.transport.world_size)
        if last:
            self._end_step()

    def _mean_(self, layout: BucketLayout, bucket: Tensor, joined: bool) -> None:
        if self.transport.world_size > 1:
            parts = self._lanes.planned(layout) or split_by_size(layout)
            if parts == [layout]:
                self._reduce_part_(layout, bucket, joined)
            else:
                self._reduce_parts_(layout, parts, bucket, joined)
        else:
            held = self._unused(layout, bucket)
            self._half.after_(self._before_(layout, bucket, held), None, held)
            self._pay_(layout, bucket, held)
            self._finite &= all_finite(bucket)

    def begin_step(self, parameters: Mapping[str, Tensor], *, joined: bool = False) -> None:
        """Before the first bucket: what an unfinished step left is forgotten, and the guard looks."""
        self.abandon_step()
        self._guard.look(parameters, self.step, joined=joined)

    def abandon_step(self) -> None:
        """Forget a step that was begun and not ended: residuals are as before it."""
        self._touched, self._finite, self._seen = [], True, []
        self._lanes.undo()
        self._allotment.forget()
        self._half.forget()

    def _reduce_part_(self, layout: BucketLayout, bucket: Tensor, joined: bool) -> None:
        collective = self._lanes.open(layout, bucket.device)
        stamp = Stamp(self.config.seed, self.step, len(self._seen), sender=self.transport.rank)
        self._seen.append(layout)
        held = [(0, layout.numel)] if joined else self._unused(layout, bucket)
        with self.stats.phase("select"):
            kept = self._before_(layout, bucket, held)
        sent: list[Tensor] | None = [] if self._half.masking else None
        if self._ef21 is not None:
            slots = self._open(layout, bucket.device, self._ef21.memories)
            first = self._first(layout)
            with in_bucket(layout, stamp, self.transport.ranks):
                finite = self._ef21.mean_(collective, bucket, slots, stamp, self.stats, first)
        else:
            memory = self.memory.open(layout, bucket.device) if self.config.error_feedback else None
            if memory is not None and self._allotment.due(self.taken):
                with self.stats.phase("select"):
                    self._allotment.look(layout, memory.old, bucket)
            with in_bucket(layout, stamp, self.transport.ranks):
                finite = self._guard.mean_(collective, bucket, memory, stamp, held, sent)
            self._touched += [memory] if memory is not None else []
        self._finite &= finite
        with self.stats.phase("select"):
            self._half.after_(kept, sent, held)
        self._touched += collective.slots

    def _reduce_parts_(
        self, layout: BucketLayout, parts: Sequence[BucketLayout], bucket: Tensor, joined: bool
    ) -> None:
        views = layout.views(bucket)
        for part in parts:
            flat = torch.cat([views[name].reshape(-1) for name in part.names])
            self._reduce_part_(part, flat, joined)
            for name, view in part.views(flat).items():
                views[name].copy_(view)

    def _unused(self, layout: BucketLayout, bucket: Tensor) -> list[tuple[int, int]]:
        """Where parameters lie that got no gradient in this step, if that matters."""
        if not self.config.hold_unused:
            return []
        return [(a, b) for a, b in pairwise(layout.offsets) if not bool(bucket[a:b].any())]

    def _before_(self, layout: BucketLayout, bucket: Tensor, held: Held) -> dict[str, Slot]:
        """The sender's half of the optimizer, and what it remembers; it wants nothing in ranges ``held``."""
        slots = self._open(layout, bucket.device, self._half.memories)
        self._half.before_(layout, bucket, slots, held, self.taken)
        return slots

    def _open(self, layout: BucketLayout, device: torch.device, names: Sequence[str]) -> dict[str, Slot]:
        """The slots of what is kept under ``names``; what is written there counts if the step does."""
        new = [name for name in layout.names if any(name not in self.kept[what] for what in names)]
        self._half.enrol(new, self.taken)
        slots = {name: self.kept[name].open(layout, device) for name in names}
        self._touched += slots.values()
        return slots

    def _first(self, layout: BucketLayout) -> list[tuple[int, int]]:
        """Where parameters lie whose first step this is."""
        steps = self._half.steps(layout, self.taken)
        return [where for where, before in zip(pairwise(layout.offsets), steps, strict=True) if not before]

    def _pay_(self, layout: BucketLayout, bucket: Tensor, held: Held) -> None:
        """Alone there is nothing to send: what an earlier, larger job still owed is applied now.

        Not in the ranges ``held``, where DDP would throw it away.
        """
        if self._ef21 is not None:
            slots = self._open(layout, bucket.device, self._ef21.memories)
            self._ef21.alone_(bucket, slots, self._first(layout))
        elif any(name in self.memory for name in layout.names):
            slot = self.memory.open(layout, bucket.device)
            due = slot.old.clone()
            slot.new.zero_()
            for a, b in held:
                slot.new[a:b], due[a:b] = due[a:b], 0
            bucket += due
            self._touched.append(slot)

    def _end_step(self) -> None:
        self.counted = self._finite
        if self._finite:
            if self._allotment.due(self.taken) and self.transport.world_size > 1:
                # Before anything counts: a peer may be gone.
                self._allotment.settle(self.ratio, self.transport, self._device, self.stats)
                self.compressor.factors = self._allotment.at(self.ratio)
            for slot in self._touched:
                slot.commit()
            self._lanes.commit()
            self._half.count()
            self.taken += 1
        self.stats.collectives = self._lanes.count(self._seen)
        self._guard.end_step(self.step, finite=self._finite)
        self.step += 1
        self.abandon_step()

    def _take_back_(self, layout: BucketLayout, owed: Tensor) -> Callable[[], None]:
        """This rank owes, as a worker, what it owed as an owner: the others have not heard of it yet.

        Returns what brings the bits of before back, should the step not count.
        """
        if self._ef21 is None and not self.config.error_feedback:
            return lambda: None
        memory = self.memory if self._ef21 is None else self.kept[ESTIMATE]
        mine = memory.open(layout, owed.device).old
        before = mine.clone()
        mine.add_(owed, alpha=1 if self._ef21 is None else -1)

        def bring_back() -> None:
            memory.open(layout, before.device).old.copy_(before)

        return bring_back

    # --- state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything that the next step depends on: tensors and plain values only."""
        return {
            "format": STATE_FORMAT,
            "step": self.step,
            "taken": self.taken,
            "missed": self._half.state_dict(),
            "rank": self.transport.rank,
            "world_size": self.transport.world_size,
            "config": self.config.as_dict(),
            "ratio": self.ratio,
            "factors": dict(self._allotment.factors),
            "residuals": self.memory.state_dict(),
            "kept": {name: kept.state_dict() for name, kept in self.kept.items()},
            "buckets": self._lanes.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> None:
        """Go on where ``state`` was saved; ``shapes`` are the model's parameters, to check against.

        All ranks call it together. If any rank's state does not fit, or they are of different
        steps, every rank raises and nothing is changed anywhere. The ratio that was in force comes
        back, unless this run was configured with another one than that of the state.
        """

        def prepare() -> tuple[tuple[Any, ...], dict[str, Any]]:
            plan = check_state(state, self.transport.rank, self.transport.world_size, shapes)
            check_kept(state, self.kept)
            self._lanes.check(plan, self._device)
            if not self.config.error_feedback and any(bool(r.any()) for r in state["residuals"].values()):
                raise ValueError(
                    "state holds residuals, but error_feedback is off: they would never be sent. Turn it "
                    "on, or empty state['residuals'] if they are to be dropped"
                )
            ratio = saved_ratio(state, self.config.ratio) or self.ratio
            names = [list(saved.layout.names) for saved in plan]
            factors = check_factors(state, shapes) if self.config.adapt_every else {}
            told = {
                "step": state["step"],
                "taken": state["taken"],
                "ratio": ratio,
                "factors": factors,
                "buckets": names,
            }
            told["agreed"] = digest(state["kept"].get(AGREED, {}))
            return (plan, ratio, factors, self._half.checked(state, shapes)), {"state": told}

        plan, ratio, factors, missed = agree(self.transport, self._device, prepare)
        self._allotment.load(factors, shapes)
        self.take_ratio(ratio)
        self.memory.load_state_dict(state["residuals"])
        for name, kept in self.kept.items():
            kept.load_state_dict(state["kept"][name])
        self._half.load(missed)
        self.step, self.taken = int(state["step"]), int(state["taken"])
        self._lanes.load(plan)
        self._guard.restart()
        self.abandon_step()
