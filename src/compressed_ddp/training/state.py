"""What a checkpoint has of a run, and how a run takes it back: with as many workers or with others."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..communication import LocalSync
from ..error_feedback import reshard_states
from ..metrics import StepRecord
from . import checkpoint
from .fitting import check_rank, check_shared
from .place import Place

if TYPE_CHECKING:
    from .loop import Trainer

logger = logging.getLogger("compressed_ddp")


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
    """What this worker has for itself; with local steps also its weights, in ``sync``, and its optimizer."""
    own = {"optimizer": trainer.optimizer.state_dict(), "scaler": trainer.scaler.state_dict()}
    return {
        "own": own if trainer.config.local else {},
        "sync": trainer.sync.state_dict(),
        "ledger": dataclasses.asdict(trainer.sync.stats.total),
        "moved": list(trainer.moved() or (0, 0)),
        "sums": trainer.sums.values(),
        "logged": trainer.logged,
        "buffers": {name: buffer.clone() for name, buffer in trainer.model.named_buffers()},
        "random": _random_state(trainer.place.device),
    }


def first_whole(paths: Sequence[Path], place: Place) -> Path:
    """The first of ``paths`` that is as it was written, or the last if none is; all workers together.

    Each worker looks at what it would read, so it takes no longer than to read it.
    """
    for path, older in pairwise(paths):
        damage = ""
        try:
            world = int(checkpoint.manifest_of(path)["world_size"])
            ranks = [place.rank] if world == place.world_size else range(world)
            for file in (checkpoint.SHARED, *map(checkpoint.rank_file, ranks)):
                checkpoint.checked_bytes(path, file)
        except checkpoint.DamagedError as error:
            damage = str(error)
        except checkpoint.CheckpointError:
            pass  # nothing is wrong with it but that this release cannot read it: whoever does will say so
        found = place.gather(bytes([bool(damage)]), f"looking at checkpoint {path}")
        if not any(row[0] for row in found):
            return path
        if [row[0] for row in found].index(1) == place.rank:
            logger.warning("%s; going on from %s", damage.partition("; --resume")[0], older)
    return paths[-1]


def restore(trainer: Trainer, path: Path) -> None:
    """Make ``trainer`` go on where checkpoint ``path`` was written. All workers together.

    With as many workers, what follows is bit-identical to the run that was interrupted. With
    others, what all of them owe is dealt anew and conserved; a newcomer draws its own dropout.
    """
    place = trainer.place

    def load() -> tuple[dict[str, Any], dict[int, dict[str, Any]], bool]:
        shared = checkpoint.read(path, checkpoint.SHARED)
        check_shared(shared, trainer, path)
        old = int(checkpoint.manifest_of(path)["world_size"])
        as_many = old == place.world_size
        wanted = [place.rank] if as_many else range(old)
        states = {rank: checkpoint.read(path, checkpoint.rank_file(rank)) for rank in wanted}
        for state in states.values():
            check_rank(state, trainer, path)
        return shared, states, as_many

    shared, states, as_many = place.together(f"reading checkpoint {path}", load)
    mine = states.get(place.rank)
    syncs = [state["sync"] for state in states.values()]
    sync = syncs[0] if as_many else _resharded(syncs, place.world_size, place.rank)

    def apply() -> None:
        own = shared | (mine.get("own", {}) if mine is not None else {})
        trainer.model.load_state_dict(shared["model"])
        groups = trainer.optimizer.param_groups
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        trainer.optimizer.load_state_dict(own["optimizer"])
        # Momentum and the like are what this run was asked for, not what the saved one had.
        for group, values in zip(trainer.optimizer.param_groups, settings, strict=True):
            group.update(values)
        if own["scaler"] and trainer.scaler.is_enabled():
            trainer.scaler.load_state_dict(own["scaler"])

    place.together(f"taking checkpoint {path} back", apply)
    trainer.at = type(trainer.at)(**shared["position"])
    if sync:
        trainer.sync.load_state_dict(sync)
    elif isinstance(trainer.sync, LocalSync):
        trainer.sync.begin()  # a run without local steps goes on with them
    before = [mine] if mine is not None else list(states.values())
    # A newcomer has sent what all had on average.
    trainer.sync.stats.total = _mean([state["ledger"] for state in before])
    sent, received = (sum(state["moved"][i] for state in before) // len(before) for i in (0, 1))
    trainer.moved_before = (sent, received)
    if mine is not None:
        trainer.sums = type(trainer.sums)(place.device, mine["sums"])
        trainer.logged = mine["logged"]
        for name, buffer in trainer.model.named_buffers():
            buffer.copy_(mine["buffers"][name])
        _set_random_state(mine["random"], place.device)


def _mean(ledgers: list[dict[str, Any]]) -> StepRecord:
    mean = {name: sum(ledger[name] for ledger in ledgers) / len(ledgers) for name in ledgers[0]}
    counts = {name for name, value in ledgers[0].items() if isinstance(value, int)}
    return StepRecord(**{name: int(value) if name in counts else value for name, value in mean.items()})


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
