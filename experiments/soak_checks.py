"""What must hold after a soak, and the arithmetic of it."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from soak_worker import Sample, network

from compressed_ddp import reshard_states
from compressed_ddp.training.checkpoint import SHARED, rank_file, read

SLOPE = 1024.0
"""Kilobytes an hour that resident memory may grow."""
LONG = 600.0
"""Seconds, after warm-up, from which on a slope says something."""
GAP = 0.01
"""Of the typical gradient of one step: more than that is not rounding."""


class Books(NamedTuple):
    """A checkpoint's sums, compared."""

    step: int
    skipped: int
    replicas: int
    """How many different ones there are."""
    gap: float
    """The largest difference between applied + owed and the true sum, over the root mean square of one
    step's mean gradient."""


def books(checkpoint: Path, workers: int) -> Books:
    """Whether all replicas are one, and nothing was lost: sum of applied updates + mean of what is owed, by
    workers and by owners of shards == sum of the true mean gradients."""
    shared = read(checkpoint, SHARED)
    ranks = [read(checkpoint, rank_file(rank)) for rank in range(workers)]
    # Made to fit a job of one worker, the states have all that is owed in that worker's residuals.
    residuals = reshard_states([mine["sync"] for mine in ranks], 1)[0]["residuals"]
    owed = torch.cat([residuals[name].reshape(-1).double() for name, _ in network().named_parameters()])
    true = torch.stack([mine["true"] for mine in ranks]).mean(0)
    counted = shared["step"] - shared["skipped"]
    typical = true.square().mean().sqrt() / max(counted, 1) ** 0.5
    gap = (shared["applied"] + owed - true).abs().max() / typical
    replicas = {(mine["weights"], mine["applied"]) for mine in ranks}
    return Books(shared["step"], shared["skipped"], len(replicas), float(gap))


@dataclass
class Life:
    """One start of all workers, and how it ended."""

    number: int
    seconds: float
    victim: int = -1
    killed: float = math.inf
    """When, by the clock; later samples of the survivors show sockets that the dead one left."""
    ending: float = 0.0
    """Seconds from the kill to the end of the last survivor."""
    told: list[dict[str, Any]] = field(default_factory=list)
    """What survivors said."""
    faults: list[str] = field(default_factory=list)
    books: Books | None = None

    def __str__(self) -> str:
        how = (
            "stopped" if self.victim < 0 else f"rank {self.victim} killed, others gone in {self.ending:.1f} s"
        )
        return (
            f"life {self.number}: {self.seconds:.0f} s, {how}; {self.books}; faults: {self.faults or 'none'}"
        )


class Verdict(NamedTuple):
    check: str
    verdict: str
    found: str
    limit: str


def slope(points: Sequence[tuple[float, float]]) -> float:
    """By least squares, in units an hour; times are seconds."""
    times, values = zip(*points, strict=True)
    return 3600 * statistics.linear_regression(times, values).slope


def by_process(samples: Iterable[Sample], warm_up: float) -> dict[tuple[int, int], list[Sample]]:
    """Samples after warm-up of each (life, rank); of a life that was shorter, its last half."""
    found: dict[tuple[int, int], list[Sample]] = defaultdict(list)
    for each in samples:
        found[each.life, each.rank].append(each)
    for key, mine in found.items():
        start, end = mine[0].time, mine[-1].time
        warm = min(warm_up, (end - start) / 2)
        found[key] = [each for each in mine if each.time >= start + warm]
    return dict(found)


def verdicts(lives: Sequence[Life], samples: Sequence[Sample], warm_up: float) -> list[Verdict]:
    """Everything that must hold, each with what was found."""
    seen = [life.books for life in lives if life.books is not None]
    told = [each for life in lives for each in life.told]
    killed = [life for life in lives if life.victim >= 0]
    faults = [fault for life in lives for fault in life.faults]
    left = [name for each in told for name in each["threads"]]
    steps, skipped = (seen[-1].step, seen[-1].skipped) if seen else (0, 0)
    gap = max((each.gap for each in seen), default=math.inf)
    heard = Counter(f"{each['kind']} in {each['doing']}" for each in told)
    slowest = max((life.ending for life in killed), default=0.0)
    how = f"{len(lives)} lives, {len(killed)} kills, the others gone within {slowest:.1f} s"
    unexplained = [each for each in told if each["doing"] == "a step" and not each["sync"]]
    ends = f"{len(told)} of {3 * len(killed)}: {', '.join(f'{n} {kind}' for kind, n in heard.items())}"
    rows = [
        _verdict("lives", not faults, f"{how}; {faults or 'no fault'}", "no fault"),
        _verdict("training", skipped > 0, f"{steps:,} steps, {skipped:,} with an overflow", "some of both"),
        _verdict(
            "replicas",
            bool(seen) and all(each.replicas == 1 for each in seen),
            f"{sum(each.replicas == 1 for each in seen)} of {len(seen)} checkpoints",
            "bit-identical",
        ),
        _verdict("conservation", gap < GAP, f"{gap:.2g} of one step's gradient", f"below {GAP:g}"),
        _verdict("survivors", len(told) == 3 * len(killed), ends, "all say why they end"),
        _verdict(
            "errors in a step",
            not unexplained,
            f"{[each['kind'] for each in unexplained] or 'none'} without a SyncError",
            "a SyncError each",
        ),
        _verdict("threads left", not left, f"{left or 'none'}", "none after close"),
    ]
    killed_at = {life.number: life.killed for life in lives}
    processes = by_process((each for each in samples if each.time < killed_at[each.life]), warm_up)
    for what in ("threads", "fds"):
        changing = {
            key: found
            for key, mine in processes.items()
            if len(found := {getattr(e, what) for e in mine}) > 1
        }
        values = sorted({getattr(each, what) for mine in processes.values() for each in mine})
        rows.append(
            _verdict(
                what, not changing, f"{values}, changing in (life, rank): {changing or 'none'}", "constant"
            )
        )
    return [*rows, *memory(processes)]


def memory(processes: dict[tuple[int, int], list[Sample]]) -> list[Verdict]:
    """The slope of resident memory in every worker that lived long enough.

    Judged is what the process itself wrote (RssAnon). The rest of RSS are pages of mapped files, torch's
    libraries, which the kernel loads when they are first used and drops when it wants room for others.
    """
    rows = []
    for (life, rank), mine in processes.items():
        if mine[-1].time - mine[0].time >= LONG:
            found, whole = (
                slope([(e.time, getattr(e, what)) for e in mine]) for what in ("anonymous", "rss")
            )
            minutes = (mine[-1].time - mine[0].time) / 60
            text = (
                f"{found:+.0f} kB/h of {mine[-1].anonymous:,} kB in {minutes:.0f} min; rss {whole:+.0f} kB/h"
            )
            rows.append(
                _verdict(
                    f"memory of rank {rank} in life {life}", found < SLOPE, text, f"below {SLOPE:g} kB/h"
                )
            )
    return rows or [Verdict("memory", "not judged", "no life was long enough", f"{LONG:g} s after warm-up")]


def _verdict(check: str, good: bool, found: str, limit: str) -> Verdict:
    return Verdict(check, "PASS" if good else "FAIL", found, limit)
