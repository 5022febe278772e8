"""What an optimizer needs that works on both sides of the compression."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.reference import all_finite
from ..layout import BucketLayout, bucket_strides, index_strides
from ..types import Slot

_DOWN = 2.0**-80
"""Scales any float32 so far down that the squares of a whole bucket can be added up."""


class Memory(NamedTuple):
    """A part of what is remembered about a run of parameters: read ``old``, write ``new``."""

    old: Tensor
    new: Tensor


class SplitOptimizer(torch.optim.Optimizer):
    """An optimizer in two halves; hand it to ``attach(model, config, optimizer=...)``.

    ``local_`` turns a worker's own gradient into what that worker would do; this is what is
    compressed, and what the residual holds. ``step`` finds the mean in ``grad`` and applies it. What
    ``local_`` remembers lies with the residuals: it is part of a step's transaction and of
    ``GradientSync.state_dict``.
    """

    memories: tuple[str, ...] = ()
    """Names of what ``local_`` remembers, each as large as the model; zeros at first."""

    masking: bool = False
    """Whether ``after_`` wants to know what was sent."""

    def __init__(self, params: Any, defaults: dict[str, Any], max_norm: float | None = None) -> None:
        """``max_norm``: a worker scales its own gradient down to this norm where it is larger.

        Buckets come one by one, so each is held to its share of the norm, by its share of elements.
        """
        for name in ("lr", "weight_decay"):
            if not 0.0 <= defaults[name] < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {defaults[name]}")
        if max_norm is not None and not 0.0 < max_norm < math.inf:
            raise ValueError(f"max_norm must be positive, got {max_norm}; leave it out for none")
        super().__init__(params, defaults)
        self.max_norm = max_norm
        self.world_size = 1
        self._group_of: dict[str, int] = {}
        self._numel = 0
        self._laid: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        self._halfway = False
        """The first half ran, and the second did not yet."""

    def join(
        self, parameters: Mapping[str, Tensor], world_size: int = 1, *, memory_order: bool = False
    ) -> None:
        """Learn the parameters' names and the number of workers; ``attach`` calls it, and
        ``DistributedBackend`` whenever others are trained than before.

        ``memory_order``: in buckets a gradient lies as its parameter does in memory (DDP's do), which
        differs from the order of its indices with channels last.
        """
        groups = {id(p): at for at, group in enumerate(self.param_groups) for p in group["params"]}
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        missing = [name for name, p in trained.items() if id(p) not in groups]
        if missing:
            raise ValueError(
                f"the optimizer does not have parameter {missing[0]!r}: build it on the parameters of the "
                "model that attach gets, or freeze those it shall not train (requires_grad_(False))"
            )
        known = {id(p) for p in trained.values()}
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad and id(p) not in known:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(p.shape)} whose gradient nobody "
                        "synchronises (another model's, or one that DDP was told to ignore): give it an "
                        "optimizer of its own"
                    )
        self._group_of = {name: groups[id(p)] for name, p in trained.items()}
        self._numel = sum(p.numel() for p in trained.values())
        self.world_size = world_size
        self._laid = {
            name: (p, bucket_strides(p) if memory_order else index_strides(p.shape))
            for name, p in trained.items()
        }

    def describe(self) -> dict[str, Any]:
        """What must be equal on all workers."""
        groups = [{k: _plain(v) for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {"kind": type(self).__name__, "max_norm": self.max_norm, "groups": groups}

    def before_(
        self, layout: BucketLayout, bucket: Tensor, slots: Mapping[str, Slot], taken: Sequence[int]
    ) -> None:
        """Replace a bucket of gradients by what this worker would do.

        ``taken``: how many steps each parameter was there for before; not all need have been in all steps.
        What comes out is not finite wherever the gradient, or what would be remembered of it, is not.
        """
        self._halfway = True
        gradient = bucket.to(torch.float32)
        if self.max_norm is not None:
            limit = self.max_norm * self.slack() * math.sqrt(layout.numel / self._numel)
            gradient *= _shrinking(gradient, limit)
        self._penalise_(layout, gradient)
        for start, stop, options, before in self._runs(layout, taken):
            mine = {name: Memory(slot.old[start:stop], slot.new[start:stop]) for name, slot in slots.items()}
            self.local_(gradient[start:stop], mine, options, before)
        if not all(all_finite(slot.new) for slot in slots.values()):
            gradient.fill_(torch.nan)
        if gradient is not bucket:
            bucket.copy_(gradient)

    def slack(self) -> float:
        """How much larger than ``max_norm`` one worker's gradient may be."""
        return 1.0

    def penalty(self, options: Mapping[str, Any]) -> float:
        """How much of its weights a worker adds to its clipped gradient, for parameters of such a group."""
        return 0.0

    def local_(
        self, gradient: Tensor, memory: Mapping[str, Memory], options: Mapping[str, Any], taken: int
    ) -> None:
        """Overwrite ``gradient`` (flat, float32) with what this worker wants, to be subtracted.

        These parameters were there for ``taken`` steps before.
        """
        raise NotImplementedError

    def after_(self, slots: Mapping[str, Slot], sent: Sequence[Tensor]) -> None:
        """May change what is remembered, knowing which entries this worker chose and ``sent``.

        Called where ``masking`` is.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Apply what the workers agreed on, as ``apply_`` does it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moves = any(p.grad is not None for group in self.param_groups for p in group["params"])
        if not self._group_of or (moves and not self._halfway):
            raise RuntimeError(
                f"{type(self).__name__} works in two halves and the first one did not run for these "
                "gradients: pass it to attach(model, config, optimizer=...) or to "
                "DistributedBackend(optimizer=...), and step once after gradients were synchronised"
            )
        self._halfway = False
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            if moved:
                self.apply_(moved, [p.grad for p in moved], group)
        return loss

    def apply_(self, parameters: list[Tensor], means: list[Tensor], options: Mapping[str, Any]) -> None:
        """Subtract the means; weight decay is decoupled, as in AdamW."""
        if options["weight_decay"]:
            torch._foreach_mul_(parameters, 1.0 - options["lr"] * options["weight_decay"])
        torch._foreach_sub_(parameters, means)

    def _penalise_(self, layout: BucketLayout, gradient: Tensor) -> None:
        for name, (start, stop) in zip(layout.names, pairwise(layout.offsets), strict=True):
            share = self.penalty(self.param_groups[self._group_of[name]])
            if share:
                weights, strides = self._laid[name]
                part = gradient[start:stop].as_strided(weights.shape, strides)
                part.add_(weights.detach(), alpha=share)

    def _runs(
        self, layout: BucketLayout, taken: Sequence[int]
    ) -> Iterator[tuple[int, int, Mapping[str, Any], int]]:
        """Stretches of parameters of one group and as many steps: start, stop, the group's options, steps."""
        kinds = [(self._group_of[name], steps) for name, steps in zip(layout.names, taken, strict=True)]
        start = 0
        for at, (group, steps) in enumerate(kinds):
            if at + 1 == len(kinds) or kinds[at + 1] != (group, steps):
                yield layout.offsets[start], layout.offsets[at + 1], self.param_groups[group], steps
                start = at + 1


def _shrinking(gradient: Tensor, limit: float) -> Tensor:
    """The factor that brings ``gradient`` down to the norm ``limit``; 1 where it is no larger.

    Without a look at the norm from here: that would wait for the device.
    """
    norm = gradient.norm()
    # Squares of large finite entries are infinite, and so would be the norm: a factor of 0, for a step
    # that counts. A power of two changes nothing else.
    scaled = (gradient * _DOWN).norm()
    return torch.where(norm.isfinite(), limit / norm, limit * _DOWN / scaled).clamp(max=1.0)


def _plain(option: Any) -> Any:
    """An option as it is compared: a learning rate may be a tensor."""
    return option.tolist() if isinstance(option, Tensor) else option


def checked_split(optimizer: object) -> SplitOptimizer:
    """``optimizer`` itself; raises TypeError, with the way out, if it is not one in two halves."""
    if isinstance(optimizer, SplitOptimizer):
        return optimizer
    kind = type(optimizer).__name__
    momenta = [group.get("momentum", 0.0) for group in getattr(optimizer, "param_groups", [])]
    if any(momenta):
        raise TypeError(
            f"{kind} has momentum {max(momenta)} and adds it after compression; SplitSGD adds it before, and "
            "there it must not come twice: use SplitSGD instead, or leave optimizer= out"
        )
    raise TypeError(
        f"{kind} does nothing before compression: leave optimizer= out, or use one of compressed_ddp.optim"
    )
