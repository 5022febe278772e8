"""The experiment about residuals: what is missing is owed with ours, and by nobody without one."""

from __future__ import annotations

import experiment
import pytest

pytest.importorskip("sklearn", reason="the digits are its")


def test_what_is_missing_is_owed_or_lost() -> None:
    script = experiment.load("error_feedback")
    rows = {name: script.row_of(name, 0.01, seed=0, epochs=1) for name in script.METHODS}
    late, lost, held = (
        {name: float(row[column]) for name, row in rows.items()} for column in ("late", "lost", "held")
    )
    assert all(value > 0.01 for value in late.values())
    assert lost["error feedback"] < 1e-5 and held["error feedback"] > 0
    assert lost["no error feedback"] == late["no error feedback"] and held["no error feedback"] == 0
    # On average nothing is lost with the write-up's either; it is in what each worker holds.
    assert lost["write-up's residual"] < 1e-5
    assert held["write-up's residual"] > held["error feedback"]
    assert script.row_of("dense", 1.0, seed=0, epochs=1)["steps"] == rows["error feedback"]["steps"] == 22
