"""Saved state: what is in it, whether it fits, and how it moves to another number of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layout import BucketLayout, Partition

STATE_FORMAT = 1
_FIELDS = ("format", "step", "rank", "world_size", "config", "residuals", "buckets")


@dataclass
class SavedBucket:
    """A bucket as it was when the state was saved: its parameters, its way, what its way remembers."""

    layout: BucketLayout
    way: str
    state: dict[str, Tensor]

    def as_dict(self) -> dict[str, Any]:
        return {
            "names": list(self.layout.names),
            "shapes": [list(shape) for shape in self.layout.shapes],
            "way": self.way,
            "state": self.state,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> SavedBucket:
        shapes = tuple(torch.Size(shape) for shape in saved["shapes"])
        return cls(BucketLayout(tuple(saved["names"]), shapes), saved["way"], dict(saved["state"]))


def check_state(
    state: Mapping[str, Any], rank: int, world_size: int, shapes: Mapping[str, torch.Size]
) -> None:
    """Raises ValueError, with the way out, unless ``state`` fits this rank of this job."""
    missing = [field for field in _FIELDS if field not in state]
    if missing:
        raise ValueError(f"not a compressed-ddp state: it has no {missing[0]!r}")
    if state["format"] != STATE_FORMAT:
        raise ValueError(f"state has format {state['format']}, this release reads {STATE_FORMAT}")
    if state["world_size"] != world_size:
        raise ValueError(
            f"state was saved by {state['world_size']} workers, this job has {world_size}: pass all "
            f"ranks' states through compressed_ddp.reshard_states(states, {world_size}) first"
        )
    if state["rank"] != rank:
        raise ValueError(
            f"state was saved by rank {state['rank']}, this is rank {rank}: each rank loads its own"
        )
    for name, residual in state["residuals"].items():
        if name not in shapes:
            raise ValueError(f"state has a residual for {name!r}, which this model does not have")
        if residual.shape != shapes[name]:
            raise ValueError(
                f"residual of {name!r} has shape {tuple(residual.shape)}, the parameter {tuple(shapes[name])}"
            )
        if not bool(torch.isfinite(residual).all()):
            raise ValueError(f"residual of {name!r} has NaN or infinite entries: this state is damaged")


def fold_owner_(residual: Tensor, owner: Tensor, rank: int, world_size: int) -> None:
    """Add an owner's debt to its own worker's: what is owed to the mean is owed P times by one."""
    shards = Partition(residual.numel(), world_size, ())
    local = torch.arange(owner.numel(), device=residual.device)
    residual[shards.to_global(local, rank)] += owner * world_size


def reshard_states(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """All ranks' states of one job, in rank order, made to fit a job of ``world_size`` workers.

    What is still owed to the mean is conserved: a survivor's residual becomes
    ``(e + what the leavers owe / P') * P' / P``, a newcomer starts with nothing. Returns new
    states; with the same number of workers they are the old ones, bit for bit.
    """
    old = len(states)
    if [state["rank"] for state in states] != list(range(old)) or states[0]["world_size"] != old:
        raise ValueError("pass the states of all ranks of one job, in rank order")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if world_size == old:
        return [dict(state) for state in states]
    debts = [_folded(state) for state in states]
    names = sorted({name for debt in debts for name in debt})
    new: list[dict[str, Any]] = []
    for rank in range(world_size):
        residuals = {}
        for name in names:
            mine = debts[rank].get(name) if rank < old else None
            left = [debt[name] for debt in debts[world_size:] if name in debt]
            total = torch.zeros_like(next(debt[name] for debt in debts if name in debt))
            if mine is not None:
                total += mine
            for debt in left:
                total += debt / world_size
            residuals[name] = total * (world_size / old)
        new.append(
            dict(states[min(rank, old - 1)])
            | {"rank": rank, "world_size": world_size, "residuals": residuals, "buckets": []}
        )
    return new


def _folded(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A state's residuals, with what its rank owes as an owner added."""
    residuals = {name: residual.clone() for name, residual in state["residuals"].items()}
    for bucket in map(SavedBucket.from_dict, state["buckets"]):
        if "owner" in bucket.state:
            flat = torch.zeros(bucket.layout.numel)
            fold_owner_(flat, bucket.state["owner"].cpu(), state["rank"], state["world_size"])
            for name, view in bucket.layout.views(flat).items():
                residuals[name] = residuals[name] + view.to(residuals[name].device)
    return residuals
