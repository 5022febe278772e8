"""What the lab's runs say about networks that this machine cannot be: a cost model, checked, then used.

The model (compressed_ddp.lab.costs) has latency, bandwidth, CPU by element, entry and byte, and cores that
hosts share. It is fitted by least squares on a part of the rows of scalability_analysis.py and then
predicts the other part, which it has not seen: by default all runs with 8 hosts, because those stand
between the fewest and the most and are as oversubscribed as the rates allow. Then it says what a step
takes with 32 to 4,096 workers that have their own cores, from 10 Mbit/s to 400 Gbit/s.

    python experiments/cost_model.py     # writes results/cost_model.csv, _check.csv and _map.csv
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from origin import origin
from pages import ROOT

from compressed_ddp.lab.costs import MODELLED, PARAMETERS, Case, Sample, fit, predict, wire_bytes
from compressed_ddp.lab.summary import ROUND
from compressed_ddp.report import SOURCES, read_table, tables

WORKERS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
RATES = (1e7, 2.5e7, 1e8, 2.5e8, 5e8, 1e9, 2.5e9, 5e9, 1e10, 2.5e10, 4e10, 1e11, 2e11, 4e11)
MAPPED = ("plain", "fp16", "ours-allgather-int8", "ours-sharded-int8")
AIM = 15.0
CHECK = ("hosts", "rate", "method", "ratio", "elements", "held_out", "measured_ms", "predicted_ms", "error")
MAP = ("workers", "rate_bits", "method", "predicted_ms", "dense_ms", "gain")

Row = dict[str, Any]


def samples_of(rows: Iterable[Row]) -> dict[tuple[str, ...], Sample]:
    """A sample for each setting that is modelled, the median of its repeats."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["method"] in MODELLED and not row["failed"] and row["rate_bits"]:
            names = ("hosts", "rate", "method", "ratio", "elements", "model", "compute_ms")
            groups.setdefault(tuple(row[name] for name in names), []).append(row)
    found = {}
    for key, mine in groups.items():
        hosts, _, method, ratio, elements, model, compute = key
        # Scaled models do not hit their number exactly, and asking for the exact one gives the same again.
        case = Case(
            *(int(hosts), float(mine[0]["rate_bits"]), method, float(ratio or 0.01), model),
            *(int(elements), float(compute) / 1e3),
        )
        step, cpu = (
            statistics.median(float(row[name]) / 1e3 for row in mine) for name in ("step_ms", "cpu_ms")
        )
        found[key] = Sample(case, step, cpu)
    return found


def held_out(key: tuple[str, ...], rules: Sequence[tuple[str, str]]) -> bool:
    """Whether a rule such as hosts=8 takes a setting out of the fit."""
    values = dict(zip(("hosts", "rate", "method", "ratio", "elements"), key, strict=False))
    return any(values[name] == value for name, value in rules)


def check_rows(
    samples: dict[tuple[str, ...], Sample],
    fitted: dict[str, float],
    rules: Sequence[tuple[str, str]],
    cores: int,
) -> list[Row]:
    """Measured and predicted of every sample; the error in percent."""
    rows = []
    for key, sample in samples.items():
        measured, predicted = 1e3 * sample.step, 1e3 * predict(sample.case, fitted, cores)
        rows.append(
            dict(zip(("hosts", "rate", "method", "ratio", "elements"), key, strict=False))
            | {"held_out": held_out(key, rules), "measured_ms": round(measured, 3)}
            | {"predicted_ms": round(predicted, 3), "error": round(100 * (predicted / measured - 1), 2)}
        )
    return rows


def median_error(rows: Sequence[Row], *, held_out: bool) -> float:
    """Percent, whatever its sign."""
    errors = [abs(row["error"]) for row in rows if row["held_out"] == held_out]
    return statistics.median(errors) if errors else float("nan")


def map_rows(fitted: dict[str, float], ratio: float, compute: float, latency: float) -> list[Row]:
    """Every number of workers and rate; ResNet-50, hosts with their own cores.

    Bytes move without CPU, as network cards for the upper rates have it: that helps plain DDP most. Of what a
    message costs only ``latency`` is left, which the lab's links do not have: fitted rounds are CPU.
    """
    real = fitted | {"move": 0.0, "round": latency}
    rows = []
    for workers in WORKERS:
        for rate in RATES:
            ms = {
                method: 1e3 * predict(Case(workers, rate, method, ratio, compute=compute), real)
                for method in MAPPED
            }
            rows += [
                {"workers": workers, "rate_bits": f"{rate:.0f}", "method": method}
                | {"predicted_ms": round(ms[method], 3), "dense_ms": round(ms["plain"], 3)}
                | {"gain": round(ms["plain"] / ms[method], 4)}
                for method in MAPPED
            ]
    return rows


def write(path: Path, columns: Sequence[str], rows: Iterable[Row], about: Row) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, (*columns, *about), lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)


def rule(text: str) -> tuple[str, str]:
    match = re.fullmatch(r"(hosts|rate|method|ratio)=(\S+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: write hosts=8, rate=1gbit, method=fp16 or ratio=0.001")
    return match[1], match[2]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    default = ROOT / "results" / "scalability_analysis.csv"
    add("--rows", type=Path, nargs="+", default=[default], help="what scalability_analysis.py wrote")
    add("--hold-out", type=rule, nargs="+", default=[("hosts", "8")], help="default: hosts=8")
    add(
        "--cores", type=int, default=os.cpu_count(), help="of the machine that ran them (default: this one's)"
    )
    add("--ratio", type=float, default=0.01, help="of the map (default: 0.01)")
    add("--compute", type=float, default=0.05, help="seconds a step of the map (default: 0.05)")
    add("--latency", type=float, default=ROUND, help="seconds a round of the map (default: %(default)g)")
    add("--out", type=Path, default=ROOT / "results", help="folder (default: results)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    rows = []
    for path in options.rows:
        with path.open(newline="") as file:
            rows += list(csv.DictReader(file))
    samples = samples_of(rows)
    fitted = fit(
        [each for key, each in samples.items() if not held_out(key, options.hold_out)], options.cores
    )
    options.out.mkdir(parents=True, exist_ok=True)
    about = origin()
    parameters = [
        {"name": name, "value": f"{fitted[name]:.4g}", "unit": PARAMETERS[name][1]} for name in fitted
    ]
    write(options.out / "cost_model.csv", ("name", "value", "unit"), parameters, about)
    for each in parameters:
        print(f"{each['name']:<10}{each['value']:>12} {each['unit']}")
    checked = check_rows(samples, fitted, options.hold_out, options.cores)
    write(options.out / "cost_model_check.csv", CHECK, checked, about)
    tell_errors(checked, options.hold_out)
    tell_bytes(rows, samples)
    mapped = map_rows(fitted, options.ratio, options.compute, options.latency)
    write(options.out / "cost_model_map.csv", MAP, mapped, about)
    grid = tables.break_even(read_table(SOURCES["cost_model_map"], options.out / "cost_model_map.csv"))
    assert grid is not None  # ours are in the map
    print(f"\n{grid.markdown()}\n\nwrote cost_model.csv, _check.csv and _map.csv to {options.out}")


def tell_errors(checked: Sequence[Row], rules: Sequence[tuple[str, str]]) -> None:
    rule_text = " or ".join(f"{name}={value}" for name, value in rules)
    print(f"\n{'':<34}{'measured':>10}{'predicted':>11}{'error':>9}   ms a step; * held out: {rule_text}")
    for row in checked:
        what = f"{row['hosts']:>3} {row['rate']:<8} {row['method']} {row['ratio']}"
        mark = "*" if row["held_out"] else " "
        print(f"{mark}{what:<36}{row['measured_ms']:>9.1f}{row['predicted_ms']:>10.1f}{row['error']:>8.1f} %")
    for held, name in ((False, "fitted"), (True, "held out")):
        count = sum(row["held_out"] == held for row in checked)
        print(f"median error, {name}: {median_error(checked, held_out=held):.1f} % of {count} settings")
    aim = "below" if median_error(checked, held_out=True) < AIM else "NOT below"
    print(f"held out: {aim} the {AIM:g} % that are aimed at")


def tell_bytes(rows: Sequence[Row], samples: dict[tuple[str, ...], Sample]) -> None:
    """Bytes are computed and not fitted; how far off they are."""
    errors = []
    for (hosts, rate, method, ratio, elements, *_), sample in samples.items():
        names = ("hosts", "rate", "method", "ratio", "elements")
        sent = [
            float(row["wire_sent"])
            for row in rows
            if tuple(row[name] for name in names) == (hosts, rate, method, ratio, elements)
            and row["wire_sent"]
        ]
        if sent and method != "none":
            errors.append(abs(100 * (wire_bytes(sample.case) / statistics.median(sent) - 1)))
    if errors:
        print(
            f"median error of computed bytes: {statistics.median(errors):.1f} % (largest {max(errors):.1f} %)"
        )


if __name__ == "__main__":
    main()
