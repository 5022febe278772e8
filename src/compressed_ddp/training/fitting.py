"""Does what a checkpoint holds fit this run? Asked before anything of the run is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..metrics import StepRecord
from .checkpoint import CheckpointError

if TYPE_CHECKING:
    from .loop import Trainer


def check_shared(shared: Mapping[str, Any], trainer: Trainer, path: Path) -> None:
    """Raises CheckpointError unless ``shared`` is of the same task, and of this model and optimizer."""
    with _told(path):
        config, now = shared["config"], trainer.config.flat()
        for name in ("model", "dataset", "block", "optimizer"):
            here = now[name]
            if config[name] != here:
                raise CheckpointError(
                    f"checkpoint {path} is of {name} {config[name]!r}, this run has {here!r}; leave --{name} "
                    "out, or start a new run"
                )
        _check_tensors("model", shared["model"], trainer.model.state_dict())
        _check_optimizer(shared["optimizer"], trainer)
        _check_mapping("scaler", shared["scaler"])
        _check_position(shared["position"], {field.name for field in dataclasses.fields(trainer.at)})


def check_rank(state: Mapping[str, Any], trainer: Trainer, path: Path) -> None:
    """Raises CheckpointError unless ``state`` is what a worker of such a run has for itself.

    ``sync`` is checked by whoever takes it back.
    """
    with _told(path):
        for name in ("own", "sync"):
            _check_mapping(name, state[name])
        if "optimizer" in state["own"]:
            _check_optimizer(state["own"]["optimizer"], trainer)
            _check_mapping("scaler", state["own"]["scaler"])
        _check_tensors("buffers", state["buffers"], dict(trainer.model.named_buffers()))
        for name, length in (("moved", 2), ("sums", 3), ("logged", 3)):
            _check_numbers(name, state[name], length)
        _check_mapping("ledger", state["ledger"])
        _check_names("ledger", state["ledger"], {field.name for field in dataclasses.fields(StepRecord)})
        _check_numbers("ledger", list(state["ledger"].values()), len(state["ledger"]))
        for name, random in state["random"].items():
            if not isinstance(random, Tensor) or random.dtype != torch.uint8:
                raise ValueError(f"random state {name!r} is not a tensor of bytes")
        if state["random"]["cpu"].shape != torch.get_rng_state().shape:
            raise ValueError("random state 'cpu' has another length than torch's own")
        _check_random(state["random"], trainer.place.device)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f"checkpoint {path} does not fit: {reason}. Is it of another version, or was it changed?"
        ) from error


def _check_names(what: str, found: Mapping[str, object], wanted: set[str]) -> None:
    if set(found) != wanted:
        raise ValueError(
            f"{what}: {', '.join(map(repr, sorted(set(found) ^ wanted, key=str)))} on one side alone"
        )


def _check_mapping(what: str, found: object) -> None:
    if not isinstance(found, Mapping):
        raise ValueError(f"{what} is a {type(found).__name__}")


def _check_tensors(what: str, found: Mapping[str, object], wanted: Mapping[str, Tensor]) -> None:
    """The same names, and under each a tensor of the same dtype and shape."""
    _check_mapping(what, found)
    _check_names(what, found, set(wanted))
    for name, tensor in wanted.items():
        other = found[name]
        if not isinstance(other, Tensor) or (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            raise ValueError(f"{what}: {name!r} is {_kind(other)} there and {_kind(tensor)} in this run")


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _check_optimizer(found: Mapping[str, Any], trainer: Trainer) -> None:
    """Groups as this run has them, and for each parameter tensors of its shape, or single numbers."""
    _check_mapping("optimizer", found)
    groups = trainer.optimizer.param_groups
    sizes = [len(group["params"]) for group in found["param_groups"]]
    if sizes != [len(group["params"]) for group in groups]:
        raise ValueError(f"optimizer: groups of {sizes} parameters, not as this run has them")
    parameters = [parameter for group in groups for parameter in group["params"]]
    for at, values in found["state"].items():
        if at not in range(len(parameters)):
            raise ValueError(f"optimizer: state for parameter {at!r}, there are {len(parameters)}")
        for name, value in values.items():
            if isinstance(value, Tensor) and value.numel() != 1 and value.shape != parameters[at].shape:
                raise ValueError(
                    f"optimizer: {name!r} of parameter {at} is {_kind(value)}, the parameter "
                    f"{_kind(parameters[at])}"
                )
            if isinstance(value, Tensor) and not value.is_floating_point():
                raise ValueError(f"optimizer: {name!r} of parameter {at} is {_kind(value)}")


def _check_random(found: Mapping[str, Tensor], device: torch.device) -> None:
    """Whether a generator like those of this worker takes them; tried on one of its own."""
    for name, where in (("cpu", torch.device("cpu")), (device.type, device)):
        try:
            if name in found:
                torch.Generator(where).set_state(found[name])
        except RuntimeError as error:
            raise ValueError(f"random state {name!r} is none of torch's: {error}") from error


def _check_position(found: Mapping[str, Any], names: set[str]) -> None:
    _check_mapping("position", found)
    _check_names("position", found, names)
    for name in ("epoch", "seen", "step", "stale"):
        if type(found[name]) is not int or found[name] < 0:
            raise ValueError(f"position: {name} is {found[name]!r}")
    best = found["best_score"]
    _check_numbers("position", [found["seconds"], 0 if best is None else best], 2)
    if not isinstance(found["history"], list):
        raise ValueError(f"position: history is a {type(found['history']).__name__}")
    for epoch in found["history"]:
        _check_numbers("history", list(epoch.values()), len(epoch))


def _check_numbers(what: str, found: object, length: int) -> None:
    if (
        not isinstance(found, list)
        or len(found) != length
        or not all(type(value) in (int, float) for value in found)
    ):
        raise ValueError(f"{what} is not a list of {length} numbers: {str(found)[:60]}")
