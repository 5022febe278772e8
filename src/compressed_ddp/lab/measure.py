"""Methods side by side in one run: same shapes, same gradients, same buckets, by turns.

Every rank runs the same sequence. What can fail is done together: a rank that fails says so, all of
them give the method up and go on with the next. (A process that gloo aborts is beyond that.)
"""

from __future__ import annotations

import gc
import math
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..metrics import TIMES
from ..types import check_ratio
from .emulate import EmulatedModel, GradientPool, model_shapes, scaled_shapes
from .methods import METHODS, Settings, pick
from .run import ONE_BUCKET_MB, Figures, MethodRun

COLUMNS = (
    *("method", "hosts", "elements", "ratio", "compute_ms", "repeat", "steps", "buckets"),
    *("step_ms", "cpu_ms"),
    *(f"{phase}_ms" for phase in TIMES),
    *("socket_sent", "socket_received", "kernels", "note", "failed"),
)
_TEXT = 400

LONGEST = 1_000_000
"""Seconds that anything may take; clocks and time-outs of torch's end somewhere above."""
SEEDS = 1 << 53
"""Each rank's is made of it, and torch's have 64 bits."""

Row = dict[str, Any]
Announce = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Plan:
    """What is measured; the same on all ranks."""

    methods: tuple[str, ...] = tuple(METHODS)
    model: str = "resnet50"
    elements: int | None = None
    """Scale the model down (or up) to so many; buckets and ``min_compress_numel`` are scaled alike."""
    ratio: float = 0.01
    compute: float = 0.05
    """Seconds of emulated compute, spread over the backward pass."""
    steps: int = 3
    warm_up: int = 3
    """Steps before those that count: DDP lays its buckets out in the first two, PowerSGD begins in the
    third."""
    repeats: int = 5
    bucket_mb: float = 25.0
    seed: int = 0
    timeout: float = 60.0
    """Seconds after which a silent peer is a failure of the method."""
    block_seconds: float | None = None
    """About so long the steps that count may take in a block: fewer than ``steps`` then, but one at least."""

    def __post_init__(self) -> None:
        pick(self.methods)
        check_ratio(self.ratio)
        if not 0 <= self.compute <= LONGEST:
            raise ValueError(f"compute must be 0 to {LONGEST:,} seconds, got {self.compute}")
        for name, least in (("elements", 1), ("steps", 1), ("warm_up", 3), ("repeats", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for name, most in (("bucket_mb", ONE_BUCKET_MB), ("timeout", LONGEST), ("block_seconds", LONGEST)):
            value = getattr(self, name)
            if value is not None and not 0 < value <= most:
                raise ValueError(f"{name} must be positive and at most {most:,}, got {value}")
        if abs(self.seed) >= SEEDS:
            raise ValueError(f"seed must be less than 2**53 either way, got {self.seed}")

    def order(self, repeat: int) -> list[str]:
        """The methods of ``repeat``, counted from 1: there and back, so that a drift hits all alike."""
        names = pick(self.methods)
        return names if repeat % 2 else names[::-1]


class Bench:
    """Measures a plan on all ranks of the process group, which must be up; gloo.

    The group itself carries only what the ranks have to agree about; its timeout should be well above
    the plan's. Methods share another one until one of them fails, and with it the group.
    """

    def __init__(self, plan: Plan, announce: Announce | None = None) -> None:
        """``announce`` is called on rank 0 before and after the steps that count."""
        self.plan = plan
        self._announce = announce
        full = model_shapes(plan.model)
        self.shapes = full if plan.elements is None else scaled_shapes(full, plan.elements)
        self.elements = sum(shape.numel() for shape in self.shapes)
        scale = self.elements / sum(shape.numel() for shape in full)
        self.scaled = plan.elements is not None
        self._bucket_mb = plan.bucket_mb * scale
        self._settings = Settings(plan.ratio, round(256 * scale), plan.seed, plan.timeout)
        self._group: Any = None
        self._pool = GradientPool(self.elements, seed=1000 * plan.seed + dist.get_rank())

    def rows(self) -> Iterator[Row]:
        """A row for each method and repeat, the same on all ranks; a method that fails gets one alone."""
        failed: set[str] = set()
        gc.freeze()  # or every block would end with a search through all of torch
        try:
            for repeat in range(1, self.plan.repeats + 1):
                for name in self.plan.order(repeat):
                    if name not in failed:
                        row = self._block(name, repeat)
                        if row["failed"]:
                            failed.add(name)
                        yield row
        finally:
            self._leave()
            gc.unfreeze()

    def _block(self, name: str, repeat: int) -> Row:
        """Build, warm up, measure, take down."""
        plan, method = self.plan, METHODS[name]
        row: Row = dict.fromkeys(COLUMNS)
        row |= {"method": name, "hosts": dist.get_world_size(), "elements": self.elements}
        row |= {"ratio": plan.ratio if method.sparse else None, "compute_ms": 1e3 * plan.compute}
        row |= {"repeat": repeat, "note": method.note(scaled=self.scaled)}
        if self._group is None:
            self._group = dist.new_group(timeout=timedelta(seconds=plan.timeout))
        run = MethodRun(method, self._settings, self._bucket_mb, self._group)
        about: dict[str, Any] = {"method": name, "repeat": repeat}
        try:
            self._together(lambda: run.attach(EmulatedModel(self.shapes, self._pool, plan.compute)), run)
            self._steps(run, plan.warm_up)
            row["steps"] = about["steps"] = steps = self._affordable(run.figures.seconds[-1])
            self._say({"event": "begin", **about})
            try:
                self._together(run.begin, run)
                self._steps(run, steps)
                self._together(run.end, run)
            except _Failed as failure:
                self._say({"event": "end", **about, "failed": str(failure)})
                raise
            self._say({"event": "end", **about})
            row |= run.facts() | self._combine(run.figures, steps)
        except _Failed as failure:
            row["failed"] = str(failure)
        finally:
            run.close()
            if row["failed"]:
                self._leave()
        return row

    def _leave(self) -> None:
        """Give the methods' group up. It goes with its connections, so peers that wait for us hear of it.

        Not after every method: PowerSGD's callbacks hold the group, and if the last of them goes on a
        thread of gloo's, the process aborts.
        """
        if self._group is not None:
            group, self._group = self._group, None
            dist.destroy_process_group(group)

    def _steps(self, run: MethodRun, steps: int) -> None:
        for _ in range(steps):
            self._together(run.prepare, run)
            self._together(run.step, run)

    def _together(self, work: Callable[[], None], run: MethodRun) -> None:
        """Call ``work`` on every rank; if it raises on one, all of them raise ``_Failed`` with its words."""
        reason = ""
        try:
            work()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1].name
            reason = f"{type(error).__name__}: {str(error) or f'in {where}'}"
        if reason:  # after the handler: a traceback would keep the connections open
            run.close()
            self._leave()
        flag = torch.tensor([dist.get_rank() + 1 if reason else 0])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if int(flag) == 0:
            return
        reasons = _everybodys(reason)
        raise _Failed(next(text for text in sorted(reasons, key=_is_consequence) if text))

    def _say(self, event: Mapping[str, Any]) -> None:
        """Announce on rank 0 while nothing moves: the others wait until it has been heard."""
        if self._announce is not None and dist.get_rank() == 0:
            self._announce(event)
        dist.all_reduce(torch.zeros(1))

    def _affordable(self, seconds: float) -> int:
        """How many steps count if one takes ``seconds``; the slowest rank decides."""
        if self.plan.block_seconds is None:
            return self.plan.steps
        slowest = torch.tensor([seconds])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return max(1, min(self.plan.steps, int(self.plan.block_seconds / float(slowest))))

    def _combine(self, figures: Figures, steps: int) -> Row:
        """All ranks' figures in one: times of a step are those of its slowest rank, the rest are means."""
        mine = figures.as_tensor()
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        table = torch.stack(every)
        cpu, *totals = table[:, steps:].mean(0).tolist()
        sent, received, *phases = (None if math.isnan(total) else total / steps for total in totals)
        return {
            "step_ms": 1e3 * statistics.median(table[:, :steps].amax(0).tolist()),
            "cpu_ms": 1e3 * cpu,
            **{f"{p}_ms": v if v is None else 1e3 * v for p, v in zip(TIMES, phases, strict=True)},
            "socket_sent": sent,
            "socket_received": received,
        }


class _Failed(Exception):
    """A method cannot go on, on any rank."""


def _is_consequence(reason: str) -> bool:
    """Whether a rank only felt that another one was gone: the other's words say more."""
    signs = ("Connection", "peer is gone", "gloo/transport", "timed out", "Timed out")
    return any(sign in reason for sign in signs)


def _everybodys(reason: str) -> list[str]:
    mine = torch.zeros(_TEXT, dtype=torch.uint8)
    data = " ".join(reason.split()).encode()[:_TEXT]
    mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [bytes(text.tolist()).rstrip(b"\0").decode(errors="replace") for text in every]
