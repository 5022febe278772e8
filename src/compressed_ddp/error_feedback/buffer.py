"""Residuals: what each worker still owes, kept by parameter name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..layout import BucketLayout
from ..types import Slot
from .state import check_tensor


class ErrorFeedbackBuffer:
    """Every parameter's residual, float32 whatever the gradient's dtype.

    Two faces. By name, as the original write-up has it: ``compensate`` and ``update``. By
    bucket: ``open`` lays the residuals of a bucket's parameters end to end, so that one kernel
    serves them all; when buckets change, the residuals are laid anew and nothing is lost.
    """

    def __init__(self) -> None:
        self._home: dict[str, tuple[BucketLayout, Slot]] = {}

    def __len__(self) -> int:
        return len(self._home)

    def __contains__(self, name: object) -> bool:
        return name in self._home

    def compensate(self, name: str, gradient: Tensor) -> Tensor:
        """A new float32 tensor: ``gradient`` plus what is still owed for ``name``."""
        layout = BucketLayout((name,), (gradient.shape,))
        if name not in self._home:
            self.open(layout, gradient.device)
        residual = self.residual(name)
        if residual.shape != gradient.shape:
            raise ValueError(
                f"residual of {name!r} has shape {tuple(residual.shape)}, its gradient "
                f"{tuple(gradient.shape)}; use another name or a new buffer"
            )
        return gradient.detach().to(torch.float32) + residual

    def update(self, name: str, compensated: Tensor, transmitted: Tensor) -> None:
        """Remember ``compensated - transmitted``; ``transmitted`` is what *this* worker sent.

        Not the average over workers: that would lose gradient, and invent some.
        """
        if name not in self._home:
            raise ValueError(f"no residual for {name!r} yet: call compensate({name!r}, gradient) first")
        self.residual(name).copy_(compensated - transmitted)

    def residual(self, name: str) -> Tensor:
        """What is owed for ``name``, sharing memory with the buffer."""
        layout, slot = self._home[name]
        return layout.view(slot.old, name)

    def open(self, layout: BucketLayout, device: torch.device) -> Slot:
        """The residuals of ``layout``'s parameters end to end, laid anew if they lie otherwise."""
        homes = [self._home[name] for name in layout.names if name in self._home]
        if len(homes) == len(layout.names) and all(known is layout or known == layout for known, _ in homes):
            slot = homes[0][1]
            if slot.old.device == device:
                return slot
        slot = Slot(torch.zeros(layout.numel, dtype=torch.float32, device=device))
        for name, view in layout.views(slot.old).items():
            if name in self._home:
                view.copy_(self._checked(name, self.residual(name), view.shape))
        self._home.update((name, (layout, slot)) for name in layout.names)
        return slot

    def norm(self) -> float:
        """The Euclidean norm of everything owed."""
        squares = [self.residual(name).double().square().sum() for name in self._home]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of every residual, by parameter name and in the parameter's shape."""
        return {name: self.residual(name).clone() for name in self._home}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace all residuals by copies of ``state``'s; on any error nothing is changed."""
        fresh = {}
        for name, residual in state.items():
            check_tensor(f"residual of {name!r}", residual)
            if name in self._home:
                self._checked(name, residual, self.residual(name).shape)
            flat = residual.detach().to(torch.float32).reshape(-1).clone()
            fresh[name] = (BucketLayout((name,), (residual.shape,)), Slot(flat))
        self._home = fresh

    @staticmethod
    def _checked(name: str, residual: Tensor, shape: torch.Size) -> Tensor:
        if residual.shape != shape:
            raise ValueError(
                f"residual of {name!r} has shape {tuple(residual.shape)}, the parameter "
                f"{tuple(shape)}; was this state saved from another model?"
            )
        return residual
