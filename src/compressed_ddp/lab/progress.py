"""How far a measurement is: a bar on a terminal if tqdm is there, a line for each block elsewhere."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .measure import Plan, Row
from .methods import pick


class BlockProgress:
    """Call it with every row. Writes to standard error; use it in a ``with`` block."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._done = plan, 0
        self._total = len(pick(plan.methods)) * plan.repeats
        self._bar: Any = None
        if sys.stderr.isatty():
            try:
                make = importlib.import_module("tqdm").tqdm
            except ImportError:
                return
            self._bar = make(total=self._total, unit="block", leave=False, file=sys.stderr)

    def __call__(self, row: Row) -> None:
        self._done += 1
        if row["failed"]:  # it will not be tried again
            self._total -= self._plan.repeats - row["repeat"]
        found = "failed" if row["failed"] else f"{row['step_ms']:.1f} ms a step"
        text = f"{row['method']}, repeat {row['repeat']}: {found}"
        if self._bar is None:
            print(f"[{self._done}/{self._total}] {text}", file=sys.stderr, flush=True)
        else:
            self._bar.total = self._total
            self._bar.set_description_str(text, refresh=False)
            self._bar.update()

    def __enter__(self) -> BlockProgress:
        return self

    def __exit__(self, *reason: object) -> None:
        if self._bar is not None:
            self._bar.close()
