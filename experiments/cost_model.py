"""What the lab's runs say about networks that this machine cannot be: a cost model, checked, then used.

The model (compressed_ddp.lab.costs) has latency, bandwidth, CPU by element, entry and byte, and cores that
hosts share. It is fitted by least squares on a part of the rows of scalability_analysis.py and then
predicts the other part, which it has not seen: by default all runs with 8 hosts, because those stand
between the fewest and the most and are as oversubscribed as the rates allow. Then it says what a step
takes with 32 to 4,096 workers that have their own cores, from 10 Mbit/s to 400 Gbit/s.

    python experiments/cost_model.py --rows results/scalability_analysis.csv results/scalability_dilated.csv
    # writes results/cost_model.csv, _check.csv, _map.csv and .png
"""

from __future__ import annotations

import argparse
import csv
import math
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

WORKERS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
RATES = (1e7, 2.5e7, 1e8, 2.5e8, 5e8, 1e9, 2.5e9, 5e9, 1e10, 2.5e10, 4e10, 1e11, 2e11, 4e11)
MAPPED = ("plain", "fp16", "ours-allgather-int8", "ours-sharded-int8")
OURS = ("ours-allgather-int8", "ours-sharded-int8")
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

    Bytes move without CPU, as network cards for the upper rates have it: that helps plain DDP most.
    ``latency`` is what the lab's links do not have.
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


def break_even(rows: Sequence[Row], workers: int, methods: Sequence[str]) -> float | None:
    """The highest rate of the map up to which the best of ``methods`` gains; None if it never does."""
    best: dict[float, float] = {}
    for row in rows:
        if row["workers"] == workers and row["method"] in methods:
            rate = float(row["rate_bits"])
            best[rate] = max(best.get(rate, 0.0), row["gain"])
    winning = [rate for rate, gain in best.items() if gain > 1]
    return max(winning) if winning else None


def plot(rows: Sequence[Row], path: Path, ratio: float, compute: float, latency: float) -> None:
    """Where compression wins: gain of the better of ours by workers and rate, and the break-even line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import TwoSlopeNorm

    gains = {(row["workers"], float(row["rate_bits"]), row["method"]): row["gain"] for row in rows}
    figure, axes = plt.subplots(1, 2, figsize=(13, 5.6), layout="constrained")
    titles = {"ours: the better of all-gather and sharded": OURS, "torch's fp16 hook": ("fp16",)}
    for each, (title, methods) in zip(axes, titles.items(), strict=True):
        best = [[max(gains[w, rate, m] for m in methods) for w in WORKERS] for rate in RATES]
        logs = [[math.log2(gain) for gain in line] for line in best]
        limit = max(1.0, max(max(line) for line in logs))
        norm = TwoSlopeNorm(0.0, min(-1.0, min(min(line) for line in logs)), limit)
        mesh = each.pcolormesh(range(len(WORKERS)), range(len(RATES)), logs, cmap="RdBu", norm=norm)
        for y, line in enumerate(best):
            for x, gain in enumerate(line):
                colour = "white" if abs(norm(logs[y][x]) - 0.5) > 0.35 else "black"
                text = f"{gain:.2f}" if gain < 2 else f"{gain:.1f}" if gain < 10 else f"{gain:.0f}"
                each.text(x, y, text, ha="center", va="center", fontsize=7, color=colour)
        if min(map(min, logs)) < 0 < max(map(max, logs)):
            each.contour(range(len(WORKERS)), range(len(RATES)), logs, [0.0], colors="black", linewidths=2)
        each.set_xticks(range(len(WORKERS)), [f"{w:,}" for w in WORKERS])
        each.set_yticks(range(len(RATES)), [_rate(rate) for rate in RATES])
        each.set_xlabel("workers")
        each.set_title(title, fontsize=11)
        figure.colorbar(mesh, ax=each, label="doublings of speed against plain DDP")
    figure.suptitle(
        "Predicted: times faster than plain DDP's ring; black line: break-even. ResNet-50, "
        f"{1e3 * compute:g} ms of compute, ratio {ratio:g},\n"
        f"hosts with their own cores, {1e3 * latency:g} ms a round, cards that move bytes by themselves",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _rate(rate: float) -> str:
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


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
    print("\nours gain on plain DDP up to:")
    for workers in WORKERS:
        rate = break_even(mapped, workers, OURS)
        print(f"  {workers:>5} workers: {'nowhere' if rate is None else _rate(rate)}")
    plot(mapped, options.out / "cost_model.png", options.ratio, options.compute, options.latency)
    print(f"\nwrote cost_model.csv, _check.csv, _map.csv and .png to {options.out}")


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
