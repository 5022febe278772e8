"""Rates, and how a link is held to one."""

from __future__ import annotations

import re
from dataclasses import dataclass

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SLOWEST, FASTEST = 1e6, 100e9

FRAME = 1514
"""Bytes of a full Ethernet frame as the shaper counts it: without checksum and preamble."""


def parse_rate(text: str) -> float:
    """``"100mbit"``, ``"1gbit"`` or ``"2.5gbit"`` as bits a second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    if match is None:
        raise ValueError(f"rate {text!r} is not a number and kbit, mbit or gbit, such as 100mbit or 1gbit")
    rate = float(match[1]) * UNITS[match[2]]
    if not SLOWEST <= rate <= FASTEST:
        raise ValueError(f"rate {text!r} is out of range: 1mbit to 100gbit")
    return rate


def rate_code(rate: float) -> str:
    """Bits a second as ``parse_rate`` takes them: ``"100mbit"``."""
    unit = next(unit for unit in ("gbit", "mbit", "kbit") if rate >= UNITS[unit] or unit == "kbit")
    return f"{rate / UNITS[unit]:g}{unit}"


def rate_text(rate: float) -> str:
    """Bits a second for people: ``"937.4 Mbit/s"``."""
    unit, size = ("Gbit/s", 1e9) if rate >= 10e9 else ("Mbit/s", 1e6)
    return f"{rate / size:,.1f} {unit}"


@dataclass(frozen=True)
class Shape:
    """A token bucket, and the largest super-packet that TCP may hand to it.

    TCP gives the interface super-packets of up to ``gso`` bytes, which stand for many frames. A bucket
    smaller than one of them has to cut it up, at a third of the rate or less; so the bucket holds several.
    It also holds what passes in 1.5 ms, because that is how late a busy machine may wake the shaper. More
    would flatter short messages: after a pause the bucket is full, and that much passes at once.
    """

    rate: float
    burst: int
    limit: int
    """Bytes that may queue before the shaper drops, as in the port of a switch."""
    gso: int

    @staticmethod
    def of(rate: float) -> Shape:
        """The shape for ``rate`` bits a second."""
        second = rate / 8
        gso = round(min(65_536, max(2 * FRAME, 0.5e-3 * second)))
        burst = round(max(2 * gso, 1.5e-3 * second))
        limit = round(max(min(0.05 * second, 16e6), 32 * gso, 2 * burst))
        return Shape(rate, burst=burst, limit=limit, gso=gso)

    def qdisc(self) -> str:
        """What ``tc qdisc add dev ...`` is to be told."""
        return f"root tbf rate {self.rate:.0f}bit burst {self.burst} limit {self.limit}"
