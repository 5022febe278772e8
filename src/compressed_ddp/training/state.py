"""What a checkpoint has of a run, and how a run takes it back: with as many workers or with others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..error_feedback import reshard_states
from ..metrics import StepRecord
from . import checkpoint
from .checkpoint import CheckpointError

if TYPE_CHECKING:
    from .loop import Trainer


def shared_state(trainer: Trainer) -> dict[str, Any]:
    """What all workers have alike."""
    return {
        "config": trainer.config.flat(),
        "position": dataclasses.asdict(trainer.at),
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.scaler.state_dict(),
    }


def rank_state(trainer: Trainer) -> dict[str, Any]:
    """What this worker has for itself."""
    return {
        "sync": trainer.sync.state_dict(),
        "ledger": dataclasses.asdict(trainer.sync.stats.total),
        "moved": list(trainer.moved() or (0, 0)),
        "sums": dataclasses.asdict(trainer.sums),
        "buffers": {name: buffer.clone() for name, buffer in trainer.model.named_buffers()},
        "random": _random_state(trainer.place.device),
    }


def restore(trainer: Trainer, path: Path) -> None:
    """Make ``trainer`` go on where checkpoint ``path`` was written. All workers together.

    With as many workers, what follows is bit-identical to the run that was interrupted. With
    others, what all of them owe is dealt anew and conserved; a newcomer draws its own dropout.
    """
    place = trainer.place

    def load() -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
        shared = checkpoint.read(path, checkpoint.SHARED)
        _check(shared, trainer, path)
        old = int(checkpoint.manifest_of(path)["world_size"])
        wanted = [place.rank] if old == place.world_size else range(old)
        return shared, {rank: checkpoint.read(path, checkpoint.rank_file(rank)) for rank in wanted}

    shared, states = place.together(f"reading checkpoint {path}", load)
    mine = states.get(place.rank)
    if mine is not None and len(states) == 1:
        sync = mine["sync"]
    else:
        sync = _resharded([state["sync"] for state in states.values()], place.world_size, place.rank)

    def apply() -> None:
        trainer.model.load_state_dict(shared["model"])
        trainer.optimizer.load_state_dict(shared["optimizer"])
        if shared["scaler"] and trainer.scaler.is_enabled():
            trainer.scaler.load_state_dict(shared["scaler"])

    place.together(f"taking checkpoint {path} back", apply)
    trainer.at = type(trainer.at)(**shared["position"])
    if sync:
        trainer.sync.load_state_dict(sync)
    if mine is not None:
        trainer.sync.stats.total = StepRecord(**mine["ledger"])
        trainer.moved_before = (mine["moved"][0], mine["moved"][1])
        trainer.sums = type(trainer.sums)(**mine["sums"])
        for name, buffer in trainer.model.named_buffers():
            buffer.copy_(mine["buffers"][name])
        _set_random_state(mine["random"], place.device)


def _check(shared: Mapping[str, Any], trainer: Trainer, path: Path) -> None:
    """Is this a checkpoint of the same task?"""
    try:
        config = shared["config"]
        for name in ("model", "dataset", "block"):
            here = getattr(trainer.config.task, name)
            if config[name] != here:
                raise CheckpointError(
                    f"checkpoint {path} is of {name} {config[name]!r}, this run has {here!r}; leave --{name} "
                    "out, or start a new run"
                )
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} has no configuration: {error!r}") from error


def _resharded(states: list[dict[str, Any]], world_size: int, rank: int) -> dict[str, Any]:
    if not all(states):  # a plain run owes nothing
        return {}
    return reshard_states(states, world_size)[rank]


def _random_state(device: torch.device) -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])
