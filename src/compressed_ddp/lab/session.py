"""A plan measured on a network: the bench runs on every host, and the interfaces are read beside it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .bench import arguments_for
from .hosts import Counters, Network
from .launch import launch
from .measure import COLUMNS as BENCH_COLUMNS
from .measure import Plan, Row
from .selftest import Figure
from .shaping import rate_code

WIRE = ("wire_sent", "wire_received", "frames_sent")
_AT = BENCH_COLUMNS.index("socket_received") + 1
_PLACE = ("hosts", "rate", "rate_bits", "link_share", "model", "elements", "method", "ratio")
COLUMNS = (
    *_PLACE,
    *(name for name in BENCH_COLUMNS[:_AT] if name not in _PLACE),
    *WIRE,
    *BENCH_COLUMNS[_AT:],
)
"""Of a row: where it was measured, then what the bench says, with what passed the interfaces."""

Tell = Callable[[Row], None]


def link_share(figures: Sequence[Figure], rate: float) -> float:
    """The least share of the rate that a link carried in the self-test, in either direction."""
    return min(min(figure.sent, figure.received) for figure in figures) / rate


def place(network: Network, plan: Plan, share: float | None = None) -> Row:
    """A row in which only the place is filled in."""
    rate = network.rate
    code = None if rate is None else rate_code(rate)
    where = {"hosts": network.hosts, "rate": code, "rate_bits": rate, "link_share": share}
    return dict.fromkeys(COLUMNS) | where | {"model": plan.model, "compute_ms": 1e3 * plan.compute}


def measure(network: Network, plan: Plan, share: float | None = None, tell: Tell | None = None) -> list[Row]:
    """Measure ``plan`` on all hosts of ``network``, which is open; a row for each method and repeat.

    ``share`` is what the self-test saw (``link_share``). ``tell`` gets every row as soon as it is known,
    in another thread. Raises LaunchFailed if a process dies; rows that were told hold nevertheless.
    """
    rows: list[Row] = []
    listener = _Listener(network, place(network, plan, share), rows, tell)
    command = [sys.executable, "-m", "compressed_ddp.lab.bench", *arguments_for(plan)]
    command += ["--announce=-", "--ack", "--out=-", "--no-table"]
    # In namespaces without name servers every connection would warn that names cannot be found.
    quiet = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    launch(network, command, quiet, listen=listener)
    return rows


class _Listener:
    """Hears rank 0: reads the counters at the beginning and end of a block, and completes its row."""

    def __init__(self, network: Network, place: Row, rows: list[Row], tell: Tell | None) -> None:
        self._network, self._place, self._rows, self._tell = network, place, rows, tell
        self._before: list[Counters] | None = None
        self._wire: Row = {}

    def __call__(self, line: str) -> str | None:
        """The answer to an announcement; None to a row, and to words that are not the bench's."""
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            print(line, file=sys.stderr, flush=True)
            return None
        if "event" in said:
            self._announced(said)
            return "go on"
        row = self._place | said | self._wire
        self._wire = {}
        self._rows.append(row)
        if self._tell is not None:
            self._tell(row)
        return None

    def _announced(self, event: dict[str, Any]) -> None:
        counted = self._network.counters()
        if event["event"] == "begin":
            self._before = counted
        elif counted is not None and self._before is not None and "failed" not in event:
            passed = [end - start for start, end in zip(self._before, counted, strict=True)]
            self._wire = per_step(passed, event["steps"])


def per_step(passed: Sequence[Counters], steps: int) -> Row:
    """What passed the interfaces in ``steps`` steps: for a step and host, the mean over hosts."""
    share = 1 / (steps * len(passed))
    return {
        "wire_sent": share * sum(each.tx_wire_bytes for each in passed),
        "wire_received": share * sum(each.rx_wire_bytes for each in passed),
        "frames_sent": share * sum(each.tx_frames for each in passed),
    }
