"""The self-test: does every link hold its rate while all of them are busy?"""

from __future__ import annotations

import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .hosts import Network
from .shaping import rate_text
from .tools import LabError

LEAST, MOST = 0.90, 1.0
"""The share of the rate that a flow's own bytes must reach, and never exceed. Headers are left out: a perfect
link gives 0.956, and what gives more than 1 is not shaped."""

WARM = 0.25
"""Seconds until TCP has found the rate and the buckets are no longer full."""

FLOW = Path(__file__).with_name("flow.py")


@dataclass(frozen=True)
class Figure:
    """What one host sent and received at once, in bits a second of TCP payload."""

    host: int
    address: str
    sent: float
    received: float

    def holds(self, rate: float) -> bool:
        return all(LEAST * rate <= measured <= MOST * rate for measured in (self.sent, self.received))


def table(figures: Sequence[Figure], rate: float | None) -> str:
    """Figures for people, with the share of the rate."""

    def cell(measured: float) -> str:
        share = "" if rate is None else f"{100 * measured / rate:6.1f} %"
        return f"{rate_text(measured):>16}{share}"

    width = 16 if rate is None else 24
    lines = [f"{'host':<6}{'address':<16}{'sends':>{width}}{'receives':>{width}}"]
    for figure in figures:
        verdict = "" if rate is None or figure.holds(rate) else "   does not hold"
        lines.append(
            f"{figure.host:<6}{figure.address:<16}{cell(figure.sent)}{cell(figure.received)}{verdict}"
        )
    return "\n".join(lines)


def measure_flows(network: Network, flows: Sequence[tuple[int, int]], *, seconds: float = 1.0) -> list[float]:
    """Keep TCP flows between pairs of hosts (from, to) busy at once; bits a second that each one carried."""
    start = time.monotonic()
    first = 20_000  # one port a flow, below those that the kernel gives away itself
    python = [sys.executable, "-I", "-S", str(FLOW)]
    timing = [str(WARM), str(seconds)]
    ends: list[subprocess.Popen[bytes]] = []
    try:
        for number, pair in enumerate(flows):
            there = [network.address(pair[1]), str(first + number), *timing]
            for role, host in (("receive", pair[1]), ("send", pair[0])):
                pipe = subprocess.PIPE
                ends.append(network.run(host, [*python, role, *there], stdin=pipe, stdout=pipe, stderr=pipe))
        deadline = start + 20
        for end in ends:
            if _line(end, deadline) != "ready":
                raise LabError("the self-test's flows cannot connect: " + _complaint(end))
        for end in ends:
            assert end.stdin is not None
            end.stdin.write(b"go\n")
            end.stdin.flush()
        deadline = time.monotonic() + WARM + seconds + 10
        answers = [_line(end, deadline) for end in ends[::2]]
        if not all(answers):
            raise LabError("a flow of the self-test broke off: " + _complaint(ends[2 * answers.index("")]))
        return [8 * float(answer) for answer in answers]
    except BrokenPipeError:
        raise LabError("a flow of the self-test ended early") from None
    finally:
        for end in ends:
            end.kill()
            end.communicate()


def _line(process: subprocess.Popen[bytes], deadline: float) -> str:
    """The next line that a process prints; empty if it ended, or printed nothing until ``deadline``."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            return ""
    # A line is written in one piece, so that nothing of it can be missing now.
    return process.stdout.readline().decode().strip()


def _complaint(process: subprocess.Popen[bytes]) -> str:
    """The last thing that a process wrote to its errors."""
    process.kill()
    errors = process.communicate()[1].decode(errors="replace").strip().splitlines()
    return errors[-1] if errors else "it did not answer in time"


def measure_links(network: Network, *, seconds: float = 1.0) -> list[Figure]:
    """Every host sends to the next one at once, so that every link is busy in both directions."""
    flows = [(host, (host + 1) % network.hosts) for host in range(network.hosts)]
    carried = measure_flows(network, flows, seconds=seconds)
    return [
        Figure(host, network.address(host), sent=carried[host], received=carried[host - 1])
        for host in range(network.hosts)
    ]


def check(network: Network, *, seconds: float = 1.0, attempts: int = 3) -> list[Figure]:
    """Measure, and raise LabError with the figures unless every link holds its rate.

    Something else that runs on the machine for a moment must not refuse a good lab, so it may try again.
    """
    for _ in range(attempts):
        figures = measure_links(network, seconds=seconds)
        rate = network.rate
        if rate is None or all(figure.holds(rate) for figure in figures):
            return figures
    assert rate is not None
    raise LabError(
        f"this machine does not hold {rate_text(rate)} on all links of {network.hosts} hosts at once "
        f"({attempts} attempts; a link holds it at {LEAST:.0%} to {MOST:.0%}):\n{table(figures, rate)}\n"
        "Take fewer hosts or a lower rate, or let nothing else run meanwhile. --no-check goes on all the "
        "same, and its figures are then not those of that network."
    )
