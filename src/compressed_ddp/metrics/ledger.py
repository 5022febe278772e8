"""The ledger: payload bytes and seconds, for each step and in total. Always on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields

PHASES = ("select", "encode", "wait", "decode")
TIMES = (*PHASES, "exposed")
"""All seconds of a step."""


@dataclass
class StepRecord:
    """One step, or the sum of many. Bytes are payload: what this rank handed to the network."""

    steps: int = 0
    skipped_steps: int = 0
    """Steps in which some worker's gradient was not finite."""
    bytes_sent: int = 0
    bytes_received: int = 0
    dense_bytes: int = 0
    """What a ring all-reduce of the same gradients would have sent (and received)."""
    select: float = 0.0
    encode: float = 0.0
    wait: float = 0.0
    """Seconds in collectives: the network, and waiting for slower workers."""
    decode: float = 0.0
    exposed: float = 0.0
    """Seconds from the last gradient's arrival to the last bucket's result: backward stood still."""

    def saved(self) -> float:
        """Percent of the dense ring's bytes that were not sent; negative where more were."""
        return 100.0 * (1.0 - self.bytes_sent / self.dense_bytes) if self.dense_bytes else 0.0

    def add(self, other: StepRecord) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Ledger:
    """Written by the thread that synchronises, read by anyone: ``print(sync.stats)``."""

    def __init__(self, method: str, kernels: str, error_feedback: bool, unbiased: bool = False) -> None:
        self.method = method
        self.kernels = kernels
        self.error_feedback = error_feedback
        self.unbiased = unbiased
        self.ratio = 1.0
        """Share of the entries that is sent now."""
        self.collectives: dict[str, int] = {}
        """How many buckets of the current layout go which way."""
        self.waits: list[float] = []
        """Seconds of a step that each rank waited, as the guard last saw it: the least is waited for."""
        self.residual_norm: float | None = None
        """The Euclidean norm of what this rank had not sent, when the guard last looked."""
        self.residual_age: float | None = None
        """How many steps that waits on average: what is owed by what a step sends, in sums of magnitudes."""
        self.total = StepRecord()
        self.last = StepRecord()
        self._open = StepRecord()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the block to phase ``name`` of the open step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            setattr(self._open, name, getattr(self._open, name) + spent)

    def traffic(self, sent: int, received: int) -> None:
        self._open.bytes_sent += sent
        self._open.bytes_received += received

    def bucket(self, nbytes: int, world_size: int) -> None:
        """A bucket of ``nbytes`` was synchronised: note what a dense ring would have moved."""
        self._open.dense_bytes += 2 * (world_size - 1) * nbytes // world_size

    def close_step(self, *, finite: bool) -> None:
        self._open.steps = 1
        self._open.skipped_steps = 0 if finite else 1
        self.total.add(self._open)
        self.last, self._open = self._open, StepRecord()

    def exposed(self, seconds: float) -> None:
        """Backward waited ``seconds`` for the step that was just closed."""
        self.last.exposed += seconds
        self.total.exposed += seconds

    def as_dict(self) -> dict[str, object]:
        return {
            "method": self.method,
            "ratio": self.ratio,
            "kernels": self.kernels,
            "error_feedback": self.error_feedback,
            "collectives": dict(self.collectives),
            "waits": list(self.waits),
            "residual_norm": self.residual_norm,
            "residual_age": self.residual_age,
            "saved_percent": self.total.saved(),
            **asdict(self.total),
        }

    def __str__(self) -> str:
        total, last = self.total, self.last
        without = "off (not needed: unbiased)" if self.unbiased else "off (what is not sent is lost)"
        feedback = "on" if self.error_feedback else without
        ways = ", ".join(f"{name} x{n}" for name, n in self.collectives.items()) or "none yet"
        lines = [
            f"{self.method}; error feedback {feedback}",
            f"buckets: {ways}; kernels: {self.kernels}",
            f"steps: {total.steps}, of which {total.skipped_steps} not finite",
            f"{'':<12}{'last step':>14}{'total':>14}",
        ]
        for label, name in (
            ("sent", "bytes_sent"),
            ("received", "bytes_received"),
            ("dense ring", "dense_bytes"),
        ):
            lines.append(f"{label:<12}{amount(getattr(last, name)):>14}{amount(getattr(total, name)):>14}")
        lines.append(f"{'saved':<12}{last.saved():>13.2f}%{total.saved():>13.2f}%")
        for name in TIMES:
            lines.append(f"{name:<12}{getattr(last, name) * 1e3:>11.1f} ms{getattr(total, name):>12.2f} s")
        if self.residual_norm is not None and self.residual_age is not None:
            lines.append(f"not sent yet   norm {self.residual_norm:.4g}, {self.residual_age:.1f} steps old")
        if any(self.waits):
            waits = ", ".join(f"{rank}: {wait * 1e3:.1f} ms" for rank, wait in enumerate(self.waits))
            lines.append(f"waits by rank  {waits}")
        return "\n".join(lines)


def amount(nbytes: int | None) -> str:
    """Bytes for people: ``"1.95 MB"``; None is something that could not be measured."""
    if nbytes is None:
        return "not measured"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"
