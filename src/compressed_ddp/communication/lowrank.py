"""PowerSGD's two rounds. (Vogels et al., 2019; why not torch's own hook: docs/adr/0005.)"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..compression import PowerSGDCompressor
from ..compression.powersgd import (
    first_factor,
    matrix_shape,
    no_autocast,
    orthogonal,
    worthwhile,
    write_product_,
)
from ..error_feedback.state import GUESS
from ..kernels.reference import all_finite
from ..layout import BucketLayout
from ..types import Clock, CompressionConfig, Held, Slot, Stamp, SyncError, Transport
from .guard import fingerprint
from .sameness import CHECK_FLOATS, as_floats


class LowRank:
    """Each matrix M of the bucket as left @ right.T, both averaged over the workers.

    1. left = orthogonal(mean of M_i @ right of the last step); vectors and small matrices are
       averaged whole in the same all-reduce.
    2. right = mean of M_i.T @ left.

    Worker i sent left @ (M_i.T @ left).T, whose mean is the result: that, and not the mean, is
    subtracted from its residual. So the law holds here too. Nothing is ``sent`` by positions.

    What goes into an all-reduce may differ in its rounding from worker to worker. What is made of its
    result may not, and has the same bits on every processor.
    """

    def __init__(
        self,
        layout: BucketLayout,
        compressor: PowerSGDCompressor,
        config: CompressionConfig,
        transport: Transport,
        device: torch.device,
    ) -> None:
        self._net, self._layout = transport, layout
        self._matrices: dict[str, tuple[int, int]] = {}
        self._right: dict[str, Slot] = {}
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            rows, columns = matrix_shape(shape)
            if worthwhile(rows, columns, compressor.rank):
                self._matrices[name] = (rows, columns)
                start = first_factor(columns, compressor.rank, Stamp(compressor.seed), device)
                self._right[name] = Slot(start)
        self.slots = list(self._right.values())
        whole = layout.numel - sum(rows * columns for rows, columns in self._matrices.values())
        floats = whole + sum((r + c) * compressor.rank for r, c in self._matrices.values())
        floats += CHECK_FLOATS * (2 if self._matrices else 1)
        self._received = 0
        """The hash of what the last all-reduce gave; the next one compares it."""
        self.traffic = 2 * (transport.world_size - 1) * floats * 4 // transport.world_size

    def mean_(
        self,
        bucket: Tensor,
        memory: Slot | None,
        stamp: Stamp,
        clock: Clock,
        held: Held = (),
        sent: list[Tensor] | None = None,
    ) -> bool:
        with no_autocast(bucket.device):
            return self._mean_(bucket, memory, clock, held)

    def _mean_(self, bucket: Tensor, memory: Slot | None, clock: Clock, held: Held) -> bool:
        with clock.phase("select"):
            due = torch.empty_like(bucket, dtype=torch.float32) if memory is None else memory.new
            torch.add(bucket, 0.0 if memory is None else memory.old, out=due)
            for a, b in held:
                due[a:b] = 0
            views = self._layout.views(due)
            matrices = {name: views[name].reshape(shape) for name, shape in self._matrices.items()}
            whole = {name: view.reshape(-1) for name, view in views.items() if name not in matrices}
            lefts = {name: matrix @ self._right[name].old for name, matrix in matrices.items()}
        lefts, means = self._average([lefts, whole], clock)
        with clock.phase("encode"):
            lefts = _orthogonal(lefts)
            rights = {name: matrices[name].T @ left for name, left in lefts.items()}
            for name, matrix in matrices.items():
                matrix.addmm_(lefts[name], rights[name].T, alpha=-1.0)
            for view in whole.values():
                view.zero_()
            if memory is not None:
                for a, b in held:
                    due[a:b] = memory.old[a:b]
                if not all_finite(due):  # means may be finite all the same: so all ranks are told
                    rights = {name: right.fill_(torch.nan) for name, right in rights.items()}
        (rights,) = self._average([rights], clock)
        clock.traffic(self.traffic, self.traffic)
        with clock.phase("decode"):
            out = self._layout.views(bucket)
            for name, right in rights.items():
                self._right[name].new.copy_(right)
                write_product_(out[name].view(self._matrices[name]), lefts[name], right)
            for name, mean in means.items():
                out[name].copy_(mean.view_as(out[name]))
            # A NaN on one rank is in every rank's sums by now, so all ranks decide alike.
            if not all_finite(bucket):
                bucket.fill_(torch.nan)
                return False
        return True

    def _average(self, groups: list[dict[str, Tensor]], clock: Clock) -> list[dict[str, Tensor]]:
        """Every tensor's mean over the workers, all in one all-reduce.

        It has no header and no checksum, so with it travels a hash of what the one before it gave.
        """
        tensors = [tensor for group in groups for tensor in group.values()]
        if not tensors:
            return groups
        with clock.phase("wait"):
            check = as_floats(self._received).to(tensors[0].device)
            carried = torch.cat([*(tensor.reshape(-1) for tensor in tensors), check])
            self._net.all_reduce(carried)
            flat, sums = carried[:-CHECK_FLOATS], carried[-CHECK_FLOATS:]
            if not torch.equal(sums, check * self._net.world_size):
                raise SyncError(
                    "the ranks have not received the same in the all-reduce before this one: it was damaged "
                    "on its way, or in memory. Go back to a checkpoint",
                    phase="all-reduce",
                )
            self._received = fingerprint(flat) if all_finite(flat) else 0
            flat /= self._net.world_size
        parts = iter(torch.split(flat, [tensor.numel() for tensor in tensors]))
        return [{name: next(parts).view(tensor.shape) for name, tensor in group.items()} for group in groups]

    def fold_(self, residual: Tensor) -> None:
        """The right factors are a guess to start from: nothing is owed for them."""

    def state_dict(self) -> dict[str, Tensor]:
        return {_key(name): slot.old.clone() for name, slot in self._right.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, slot in self._right.items():
            saved = state.get(_key(name))
            if saved is None or saved.shape != slot.old.shape:
                raise ValueError(
                    f"state has no right factor of shape {tuple(slot.old.shape)} for {name!r}: was it saved "
                    "with another rank? Use that one, or start without a state"
                )
            slot.old.copy_(saved)


def _orthogonal(lefts: dict[str, Tensor]) -> dict[str, Tensor]:
    """A basis of each, those of one height together: the operations are small and many."""
    alike: dict[int, list[str]] = {}
    for name, left in lefts.items():
        alike.setdefault(left.shape[0], []).append(name)
    bases: dict[str, Tensor] = {}
    for names in alike.values():
        found = orthogonal(torch.stack([lefts[name] for name in names]))
        bases |= dict(zip(names, found.unbind(), strict=True))
    return bases


def _key(name: str) -> str:
    """Of a parameter's right factor in a saved state, where other words mean something too."""
    return GUESS + name
