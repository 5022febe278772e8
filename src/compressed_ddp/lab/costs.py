"""A cost model of a step: latency and bandwidth, CPU by element, entry and byte, cores that are shared.

A host's work in a step, by method (N elements, k = ratio * N entries, P hosts):

    method      bytes sent                messages        CPU besides moving bytes
    plain       2 (P-1)/P 4N              2 (P-1)
    fp16        2 (P-1)/P 2N              2 (P-1)         cast N
    write-up    (P-1) 12k, or as plain    (P-1), 2 (P-1)  topk N + scatter P k (k where it is dense) + task
    all-gather  (P-1) b k                 (P-1)           select N + entry (1 + P) k + task
    sharded     (w + 1) (P-1)/P b k       2 (P-1)         select N (1 + 1/P) + entry k (1 + 2w + 3/P) + 2 task

b is what an entry takes: Elias-Fano indices and a value. w is the share of its entries that a worker sends to
owners (``sent_share``). Each bucket is worked on in turn, once it is ready (timeline.py), for

    s cpu + norm(wire, s move bytes) + s round messages

where s is how many hosts share a core, norm(x, y) = (x^3 + y^3)^(1/3) because moving bytes and the wire
overlap, and messages are those that wait for one another (an exchange with all others at once counts as
P - 1). Backward itself takes as long as its emulated compute, or as its own work (begin, copy N) takes on
shared cores. And no step is shorter than the CPU time of all hosts on all cores. What is fitted is in
``PARAMETERS``; nothing else is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..communication.collectives import sent_share
from .measure import Plan
from .timeline import ELEMENT, Bucket, buckets_of, step_seconds

PARAMETERS: dict[str, tuple[float, str]] = {
    "begin": (5e-3, "s/step"),
    "copy": (1.2e-9, "s/element"),
    "move": (1.1e-9, "s/byte"),
    "round": (1e-4, "s/message"),
    "task": (1e-3, "s/bucket"),
    "cast": (3e-9, "s/element"),
    "topk": (2e-8, "s/element"),
    "scatter": (1e-8, "s/entry"),
    "select": (2e-9, "s/element"),
    "entry": (5e-9, "s/entry"),
}
"""Each with a value to begin the search with, and its unit."""

NORM = 3.0
FRAME = 1514 / 1448
"""Bytes on the wire for a byte of payload in full frames."""
MESSAGE = 56 + 2 * 66 + 66
"""Bytes around a message: our header, two frames' headers (gloo's words travel by themselves), a reply."""
VALUE_BITS = {"fp32": 32.0, "fp16": 16.0, "bf16": 16.0, "int8": 8.5, "int4": 4.5}
"""Of a value with its share of a block's scale."""

Parameters = Mapping[str, float]


@dataclass(frozen=True)
class Case:
    """What is to be predicted: a method on a network of hosts."""

    hosts: int
    rate: float
    method: str
    ratio: float = 0.01
    model: str = "resnet50"
    elements: int | None = None
    compute: float = 0.05
    bucket_mb: float = Plan.bucket_mb

    @property
    def buckets(self) -> list[Bucket]:
        return _buckets(self.model, self.elements, self.bucket_mb, self.compute)


@lru_cache(maxsize=64)
def _buckets(model: str, elements: int | None, bucket_mb: float, compute: float) -> list[Bucket]:
    return buckets_of(model, elements, bucket_mb, compute)


@dataclass(frozen=True)
class Work:
    """Of one host in one step."""

    payload: float
    """Bytes of all buckets together, as is ``cpu``; what follows is each bucket's."""
    cpu: dict[str, float]
    """How often each parameter counts."""
    messages: int = 0
    """That wait for one another."""
    tasks: int = 0
    """Exchanges that Python arranges on a thread of its own."""


def entry_bytes(ratio: float, values: str) -> float:
    """Bytes of a sparse entry: Elias-Fano indices, and its value."""
    low = math.floor(math.log2(1 / ratio))
    return (low + 1 + 1 / (ratio * (1 << low)) + VALUE_BITS[values]) / 8


def _ring(n: float, p: int) -> float:
    return 2 * (p - 1) / p * n


def _none(n: float, k: float, p: int, values: str) -> Work:
    return Work(0.0, {})


def _plain(n: float, k: float, p: int, values: str) -> Work:
    return Work(_ring(ELEMENT * n, p), {}, 2 * (p - 1))


def _fp16(n: float, k: float, p: int, values: str) -> Work:
    return Work(_ring(2 * n, p), {"cast": n}, 2 * (p - 1))


def _writeup_dense(n: float, k: float, p: int, values: str) -> Work:
    return Work(_ring(ELEMENT * n, p), {"topk": n, "scatter": k}, 2 * (p - 1), 1)


def _writeup_sparse(n: float, k: float, p: int, values: str) -> Work:
    return Work((p - 1) * 12 * k, {"topk": n, "scatter": p * k}, p - 1, 1)


def _allgather(n: float, k: float, p: int, values: str) -> Work:
    sent = (p - 1) * k * entry_bytes(k / n, values)
    return Work(sent, {"select": n, "entry": (1 + p) * k}, p - 1, 1)


def _sharded(n: float, k: float, p: int, values: str) -> Work:
    entry, share = entry_bytes(k / n, values), sent_share(p)
    sent = (share + 1) * (p - 1) / p * k * entry
    return Work(sent, {"select": (1 + 1 / p) * n, "entry": (1 + 2 * share + 3 / p) * k}, 2 * (p - 1), 2)


_WORK: dict[str, Callable[[float, float, int, str], Work]] = {
    "none": _none,
    "plain": _plain,
    "fp16": _fp16,
    "writeup-dense": _writeup_dense,
    "writeup-sparse": _writeup_sparse,
    **{f"ours-allgather-{values}": _allgather for values in VALUE_BITS},
    **{f"ours-sharded-{values}": _sharded for values in VALUE_BITS},
}
MODELLED = tuple(_WORK)
"""Low-rank methods are not: their cost depends on every matrix's shape."""


def work_of(case: Case) -> Work:
    """What a host has to do."""
    if case.method not in _WORK:
        raise ValueError(f"method {case.method!r} is not modelled; these are: {', '.join(MODELLED)}")
    elements = sum(bucket.elements for bucket in case.buckets)
    return _WORK[case.method](elements, case.ratio * elements, case.hosts, case.method.rpartition("-")[2])


def wire_bytes(case: Case) -> float:
    """Bytes a host sends in a step, headers included."""
    work = work_of(case)
    return FRAME * work.payload + MESSAGE * work.messages * len(case.buckets)


def cpu_seconds(case: Case, fitted: Parameters) -> float:
    """CPU seconds of a host in a step, the copying of gradients included."""
    work, elements = work_of(case), sum(bucket.elements for bucket in case.buckets)
    codec = sum(fitted[name] * count for name, count in work.cpu.items())
    tasks = fitted["task"] * work.tasks * len(case.buckets)
    return codec + tasks + _emulation(elements, fitted) + fitted["move"] * wire_bytes(case)


def _emulation(elements: int, fitted: Parameters) -> float:
    """CPU of the emulated backward pass itself: its layers, and copying gradients."""
    return fitted["begin"] + fitted["copy"] * elements


def predict(case: Case, fitted: Parameters, cores: int | None = None) -> float:
    """Seconds of a step: all hosts on ``cores`` cores, or (None) each with two of its own."""
    work, buckets = work_of(case), case.buckets
    elements = sum(bucket.elements for bucket in buckets)
    shared = 1.0 if cores is None else max(1.0, case.hosts / cores)
    codec = sum(fitted[name] * count for name, count in work.cpu.items())
    sent = wire_bytes(case)
    exchange = _norm(8 * sent / case.rate, shared * fitted["move"] * sent)
    each = shared * (fitted["round"] * work.messages + fitted["task"] * work.tasks)
    late = 1.0  # on hosts of their own, compute is what makes gradients
    if cores is not None and case.compute:
        late = max(1.0, shared * _emulation(elements, fitted) / case.compute)
    ready = [bucket._replace(ready=late * bucket.ready) for bucket in buckets]
    parts = [each + bucket.elements / elements * (shared * codec + exchange) for bucket in buckets]
    step = step_seconds(ready, parts)
    return step if cores is None else max(step, case.hosts / cores * cpu_seconds(case, fitted))


def _norm(x: float, y: float) -> float:
    """The larger of two things that go on at once, and a little more if they are alike."""
    return float((x**NORM + y**NORM) ** (1 / NORM))


# --- fitting -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A case that was measured: seconds of a step, and CPU seconds of a host in it."""

    case: Case
    step: float
    cpu: float


CPU_WEIGHT = 0.3
"""CPU is measured well, but it is the step that is to be predicted."""
USUAL = 0.1
"""Errors well beyond this share count by their size, not by its square: a machine is disturbed at times."""
HOLD = 0.1
"""How much a parameter costs that is e times what the search began with: as a step that is 10 % off. Rows of
one size cannot tell a cost by bucket from one by element, and noise would then drive either to nothing."""


def fit(samples: Sequence[Sample], cores: int | None = None, rounds: int = 60) -> dict[str, float]:
    """Parameters with the least squares of relative errors (of logarithms) of step and CPU time.

    Levenberg and Marquardt's method on the logarithms of the parameters, so that all stay positive. One
    that no sample depends on keeps the value that the search began with.
    """
    cores = cores or os.cpu_count() or 1
    if not samples:
        raise ValueError("nothing to fit: no sample of a method that is modelled")
    names = list(PARAMETERS)
    start = torch.tensor([PARAMETERS[name][0] for name in names], dtype=torch.float64).log()
    unit = torch.eye(len(names), dtype=torch.float64)

    def errors(at: Tensor) -> Tensor:
        fitted = dict(zip(names, at.exp().tolist(), strict=True))
        steps = [math.log(predict(each.case, fitted, cores) / each.step) for each in samples]
        cpus = [CPU_WEIGHT * math.log(cpu_seconds(each.case, fitted) / each.cpu) for each in samples]
        found = torch.tensor([*steps, *cpus], dtype=torch.float64)
        mild = found.sign() * USUAL * (2 * ((1 + (found / USUAL).square()).sqrt() - 1)).sqrt()
        return torch.cat([mild, HOLD * (at - start)])

    at, now, damping = start, errors(start), 1.0
    for _ in range(rounds):
        slope = torch.stack([(errors(at + 1e-4 * along) - now) / 1e-4 for along in unit], 1)
        change = torch.linalg.solve(slope.T @ slope + damping * unit, slope.T @ now).clamp(-1.0, 1.0)
        then = errors(at - change)
        if float(then.square().sum()) < float(now.square().sum()):
            at, now, damping = at - change, then, max(1e-6, damping / 3)
        else:
            damping *= 4
        if float(change.abs().max()) < 1e-5:
            break
    return dict(zip(names, at.exp().tolist(), strict=True))
