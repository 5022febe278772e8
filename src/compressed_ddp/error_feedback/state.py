"""Saved state: what is in it, whether it fits, and how it moves to another number of workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layout import BucketLayout, Partition, fills_memory
from ..types import check_ratio

STATE_FORMAT = 2
ESTIMATE, AGREED = "estimate", "agreed"
"""What EF21 keeps: what the others believe of a worker's gradient, and the mean of it, alike on all ranks."""
OWNER, GUESS = "owner", "right factor of "
"""Names in a bucket's state: a debt, and what those of something begin with that is no debt."""
_FIELDS = ("format", "step", "taken", "rank", "world_size", "config", "residuals", "kept", "buckets")


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
            "state": {key: tensor.clone() for key, tensor in self.state.items()},
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> SavedBucket:
        names, shapes, way, state = (saved[key] for key in ("names", "shapes", "way", "state"))
        fits = _listed(names, str) and _listed(shapes, (list, tuple)) and len(names) == len(shapes) > 0
        fits = fits and isinstance(way, str) and isinstance(state, Mapping)
        if not fits or not all(_listed(shape, int) for shape in shapes):
            raise ValueError("damaged state: a bucket without names, shapes or a way to travel")
        return cls(BucketLayout(tuple(names), tuple(map(torch.Size, shapes))), way, dict(state))


def _listed(value: object, kind: type | tuple[type, ...]) -> bool:
    """Whether ``value`` is a list of such things: not, say, a tensor that would be read number by number."""
    return isinstance(value, (list, tuple)) and all(isinstance(each, kind) for each in value)


def check_state(
    state: Mapping[str, Any], rank: int, world_size: int, shapes: Mapping[str, torch.Size]
) -> list[SavedBucket]:
    """The buckets of ``state``; raises ValueError, with the way out, unless it fits this rank of this job."""
    with damage_told():
        _check_origin(state, rank, world_size)
        for what, tensors in [("residual", state["residuals"]), *state["kept"].items()]:
            for name, tensor in tensors.items():
                if name not in shapes:
                    raise ValueError(f"state has a {what} for {name!r}, which this model does not have")
                check_tensor(f"{what} of {name!r}", tensor, shapes[name])
        buckets = [SavedBucket.from_dict(bucket) for bucket in _buckets(state)]
        for bucket in buckets:
            _check_bucket(bucket, rank, world_size, shapes)
        _check_once([name for bucket in buckets for name in bucket.layout.names])
    return buckets


def _buckets(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if not _listed(state["buckets"], Mapping):
        raise ValueError("damaged state: its buckets are not a list of them")
    return list(state["buckets"])


@contextmanager
def damage_told() -> Iterator[None]:
    """What goes wrong inside because a state is not made like ours becomes a ValueError that says so."""
    try:
        yield
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError) as error:
        raise ValueError(f"damaged state: {type(error).__name__} {error}") from error


def check_count(what: str, number: object) -> None:
    """Raises ValueError, naming ``what``, unless ``number`` is one that can be counted to."""
    if not isinstance(number, int) or number < 0:
        raise ValueError(f"damaged state: {what} is {str(number)[:40]!r}, not a number that counts")


def _check_once(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"damaged state: {name!r} is in its buckets more than once")
        seen.add(name)


def check_local(
    state: Mapping[str, Any], shapes: Mapping[str, torch.Size], dtypes: Mapping[str, torch.dtype]
) -> Mapping[str, Any]:
    """What LocalSync keeps besides; raises ValueError unless it is there and fits the parameters' anchors."""
    local = state.get("local") if isinstance(state, Mapping) else None
    if not isinstance(local, Mapping):
        raise ValueError(
            "not a state of LocalSync: a run without local steps cannot go on with them from its state; load "
            "its weights and begin without one"
        )
    with damage_told():
        check_count("since", local["since"])
        for what in ("anchor", "momentum", *(["weights"] if local["since"] else [])):
            tensors = dict(local[what].items())
            for name in [*shapes, *tensors]:
                if name not in shapes or name not in tensors:
                    where = "state" if name in tensors else "model"
                    raise ValueError(
                        f"{what}: {name!r} is in the {where} alone; was it saved from another model?"
                    )
                check_tensor(f"{what} of {name!r}", tensors[name], shapes[name], dtypes[name])
    return local


def check_kept(state: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises ValueError unless ``state`` was saved with the optimizer and the memory that this run has."""
    saved, here = sorted(state["kept"]), sorted(names)
    if saved != here:
        raise ValueError(
            f"state was saved by a run that keeps {', '.join(saved) or 'nothing'} before compression, this "
            f"one keeps {', '.join(here) or 'nothing'}: use the same optimizer and memory, or start without "
            "a state"
        )


def saved_ratio(state: Mapping[str, Any], configured: float) -> float | None:
    """The ratio in force when ``state`` was saved; None if that run was not ``configured`` like this one."""
    with damage_told():
        began = state["config"]["ratio"]
        ratio = state.get("ratio", began)  # states of older versions have one ratio throughout
        check_ratio(began)
        check_ratio(ratio)
        return float(ratio) if began == configured else None


def _check_bucket(bucket: SavedBucket, rank: int, world_size: int, shapes: Mapping[str, torch.Size]) -> None:
    for name, shape in zip(bucket.layout.names, bucket.layout.shapes, strict=True):
        if shapes.get(name) != shape:
            raise ValueError(f"state has a bucket with {name!r} of shape {tuple(shape)}, the model has not")
    for key, tensor in bucket.state.items():
        check_tensor(f"{key} of the bucket with {bucket.layout.names[0]!r}", tensor)
    owner = bucket.state.get("owner")
    mine = Partition(bucket.layout.numel, world_size, ()).local_numel(rank)
    if owner is not None and owner.shape != (mine,):
        raise ValueError(
            f"owner residual has shape {tuple(owner.shape)}, this rank's shard has {mine} elements"
        )


def check_tensor(
    what: str, tensor: object, shape: torch.Size | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Raises ValueError, naming ``what``, unless ``tensor`` is one of finite floats, and of ``shape``.

    Finite in ``dtype``, as which it will be kept.
    """
    if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point:
        raise ValueError(f"{what} is not a floating point tensor: this state is damaged")
    if shape is not None and tensor.shape != shape:
        raise ValueError(f"{what} has shape {tuple(tensor.shape)}, the parameter {tuple(shape)}")
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise ValueError(f"{what} is a tensor without entries of its own: this state is damaged")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        # Looking at it would take as much memory as it claims to have.
        raise ValueError(f"{what} repeats a few entries {tensor.numel():,} times: this state is damaged")
    if not bool(torch.isfinite(tensor.to(dtype)).all()):
        raise ValueError(f"{what} has NaN or infinite entries: this state is damaged")


def _check_origin(state: Mapping[str, Any], rank: int, world_size: int) -> None:
    """The outside of a state: is it one, and of this rank of as many workers?"""
    if not isinstance(state, Mapping):
        raise ValueError(f"not a compressed-ddp state: {type(state).__name__}")
    missing = [field for field in _FIELDS if field not in state]
    if missing:
        raise ValueError(f"not a compressed-ddp state: it has no {missing[0]!r}")
    if "local" in state:
        raise ValueError(
            "state was saved by LocalSync: what it owes are changes of weights, not gradients. Go on with "
            "local steps, or load its weights and begin without a state"
        )
    for field in ("format", "step", "taken", "rank", "world_size"):
        check_count(field, state[field])
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


def owed_by_owner(bucket: SavedBucket) -> Tensor | None:
    """What this rank owes as an owner of a saved ``bucket``; None where nothing is owed.

    Raises ValueError if the bucket remembers what only its own way can read: it may be a debt.
    """
    for key in bucket.state:
        if key != OWNER and not str(key).startswith(GUESS):
            raise ValueError(
                f"{key!r} of the bucket with {bucket.layout.names[0]!r}, which {bucket.way!r} saved, cannot "
                "be handed over: only what is kept as 'owner' can. Go on with the same collective, buckets "
                "and number of workers, or empty the bucket's state if it is to be dropped"
            )
    return bucket.state.get(OWNER)


def fold_owner_(residual: Tensor, owner: Tensor, rank: int, world_size: int) -> None:
    """Add an owner's debt to its own worker's: what is owed to the mean is owed P times by one."""
    shards = Partition(residual.numel(), world_size, ())
    local = torch.arange(owner.numel(), device=residual.device)
    residual[shards.to_global(local, rank)] += owner * world_size


def reshard_states(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """All ranks' states of one job, in rank order, made to fit a job of ``world_size`` workers.

    What is still owed to the mean is conserved: a survivor's residual becomes
    ``(e + what the leavers owe / P') * P' / P``, a newcomer owes nothing. What an optimizer keeps
    before compression stays with its worker; a newcomer has the mean of all. LocalSync's workers begin at the
    anchor: what they have done since joins what they owe. What EF21's workers agree on becomes the mean of
    what is believed of those who are there now. Returns new states; with the same number of workers they
    are the old ones, bit for bit.
    """
    old = len(states)
    with damage_told():
        ranks = [state.get("rank") for state in states]
        worlds = [state.get("world_size") for state in states]
        if not _listed(ranks + worlds, int) or ranks != list(range(old)) or not worlds or {*worlds} != {old}:
            raise ValueError(f"pass the states of all ranks of one job, in rank order; got ranks {ranks}")
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        return [dict(state) for state in states] if world_size == old else _resharded(states, world_size)


def check_missed(state: Mapping[str, Any]) -> dict[str, int]:
    """How many steps each parameter was not there for; ValueError unless they are numbers by name."""
    missed, taken = state.get("missed", {}), state["taken"]
    check_count("taken", taken)
    if not isinstance(missed, Mapping):
        raise ValueError(f"damaged state: missed steps are {type(missed).__name__}")
    for name, steps in missed.items():
        check_count(f"steps missed by {str(name)[:40]!r}", steps)
        if steps > taken:
            raise ValueError(f"damaged state: {name!r} missed {steps} of {taken} steps")
    return dict(missed)


def _resharded(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    for state in states:
        for what, tensors in [("residual", state["residuals"]), *state["kept"].items()]:
            for name, tensor in tensors.items():
                check_tensor(f"{what} of {name!r}", tensor)
    old, states = len(states), [_at_anchor(state) for state in states]
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
        kept = states[rank]["kept"] if rank < old else _mean([state["kept"] for state in states])
        missed = [check_missed(state) for state in states]
        new.append(
            dict(states[min(rank, old - 1)])
            | {"rank": rank, "world_size": world_size, "residuals": residuals, "kept": kept, "buckets": []}
            | {"missed": missed[rank] if rank < old else _mean_counts(missed)}
        )
    if ESTIMATE in new[0]["kept"]:
        agreed = _mean([{AGREED: state["kept"][ESTIMATE]} for state in new])
        for state in new:
            state["kept"] = {**state["kept"], **agreed}
    return new


def moved(anchor: Tensor, weight: Tensor) -> Tensor:
    """How far a worker went from where it began: at the anchor, rounded to the weights' own dtype."""
    begun = anchor.to(weight.dtype).to(anchor.dtype)
    return (begun - weight.to(anchor.dtype)).to(torch.float32)


def _at_anchor(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state of LocalSync between two meetings, as if its worker had stood still and owed what it did.

    Without residuals (no error feedback, or EF21) there is nowhere to owe it, and it is lost.
    """
    local = state.get("local")
    if not local or not local["since"]:
        return state
    residuals = dict(state["residuals"])
    if state["config"]["error_feedback"] and ESTIMATE not in state["kept"]:
        for name, weight in local["weights"].items():
            owed = moved(local["anchor"][name], weight)
            residuals[name] = residuals[name] + owed if name in residuals else owed
    return {**state, "residuals": residuals, "local": {**local, "since": 0, "weights": {}}}


def _mean(kept: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    """Every tensor's mean over all that have it."""
    names = {what: sorted({name for each in kept for name in each[what]}) for what in kept[0]}
    return {
        what: {
            name: torch.stack([each[what][name] for each in kept if name in each[what]]).mean(0)
            for name in every
        }
        for what, every in names.items()
    }


def _mean_counts(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Every name's mean; one that is not there counts as zero."""
    names = sorted({name for each in counts for name in each})
    return {name: round(sum(each.get(name, 0) for each in counts) / len(counts)) for name in names}


def _folded(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A state's residuals, with what its rank owes as an owner added. With EF21 nobody owes."""
    residuals = {name: residual.clone() for name, residual in state["residuals"].items()}
    for saved in _buckets(state):
        bucket = SavedBucket.from_dict(saved)
        owner = owed_by_owner(bucket)
        if owner is not None and ESTIMATE not in state["kept"]:
            check_tensor(f"owner of the bucket with {bucket.layout.names[0]!r}", owner)
            if any(
                residuals[n].shape != s
                for n, s in zip(bucket.layout.names, bucket.layout.shapes, strict=True)
            ):
                raise ValueError("damaged state: a bucket's shapes are not those of what is owed")
            flat = torch.zeros(bucket.layout.numel, dtype=torch.float32, device="cpu")
            fold_owner_(flat, owner.cpu(), state["rank"], state["world_size"])
            for at, (name, view) in enumerate(bucket.layout.views(flat).items()):
                if "strides" in saved:  # residuals are in the parameter's own order, this in memory's
                    strides = saved["strides"][at]
                    fits = _listed(strides, int) and len(strides) == view.dim()
                    if not fits or not fills_memory(view.shape, strides):
                        raise ValueError(f"damaged state: {name!r} cannot lie in memory by {strides}")
                    view = view.reshape(-1).clone().as_strided(view.shape, strides)
                residuals[name] = residuals[name] + view.to(residuals[name].device)
    return residuals
