"""Small CSV files in the experiments' formats, with invented figures: for tests of the report alone."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

ORIGIN = {
    "command": "python experiments/invented.py --for-tests",
    "commit": "0000000",
    "version": "compressed-ddp 0, torch 0",
    "machine": "an invented machine",
}
METHODS = {  # share of plain's bytes with P hosts, milliseconds of CPU
    "none": (lambda p: 0.0, 4),
    "plain": (lambda p: 1.0, 40),
    "fp16": (lambda p: 0.5, 60),
    "powersgd-1": (lambda p: 0.01, 300),
    "writeup-dense": (lambda p: 1.0, 400),
    "writeup-sparse": (lambda p: 0.015 * p, 330),
    "ours-allgather-int8": (lambda p: 0.0027 * p, 60),
    "ours-sharded-int8": (lambda p: 0.0065, 70),
}
NOTES = {"powersgd-1": "in one bucket: an invented note"}


def write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    rows = [{**ORIGIN, **row} for row in rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def lab_rows(dilation: int = 1) -> Iterable[dict[str, object]]:
    """Some labs; in one a method fails, another one is refused."""
    yield from ({**row, "dilation": dilation} for row in _lab_rows())


def _lab_rows() -> Iterable[dict[str, object]]:
    for hosts, rate, bits in ((2, "1gbit", 1e9), (4, "1gbit", 1e9), (8, "1gbit", 1e9), (16, "1gbit", 1e9)):
        yield from block(hosts, rate, bits)
    yield from block(8, "100mbit", 1e8)
    yield from block(2, "10gbit", 1e10)
    failed = {"method": "bf16", "failed": "RuntimeError: not here", "step_ms": "", "wire_sent": ""}
    one = next(iter(block(8, "1gbit", 1e9)))
    yield {**one, **failed}
    nothing = dict.fromkeys(one, "") | {"model": "resnet50", "compute_ms": 50.0}
    refusal = "this machine does not hold 10 Gbit/s on all links of 16 hosts at once"
    yield nothing | {"hosts": 16, "rate": "10gbit", "rate_bits": 1e10, "failed": refusal}


def block(hosts: int, rate: str, bits: float) -> Iterable[dict[str, object]]:
    for name, (share, cpu) in METHODS.items():
        sent = 2 * (hosts - 1) / hosts * 102e6 * share(hosts)
        ours = name.startswith("ours")
        for repeat in (1, 2):
            ms = 50 + 8e3 * sent / bits + cpu * hosts / 4 + repeat
            phase = {"select": 20.0, "encode": 4.0, "wait": ms - 60, "decode": 9.0, "exposed": ms - 50}
            yield {
                **{"hosts": hosts, "rate": rate, "rate_bits": bits, "link_share": 0.94, "model": "resnet50"},
                **{"elements": 25_557_032, "method": name, "ratio": 0.01 if ours else "", "compute_ms": 50.0},
                **{"repeat": repeat, "steps": 3, "buckets": 5, "step_ms": ms, "cpu_ms": cpu},
                **{f"{phase_}_ms": value if ours else "" for phase_, value in phase.items()},
                **{
                    "socket_sent": sent,
                    "socket_received": sent,
                    "wire_sent": 1.05 * sent,
                    "wire_received": sent,
                },
                **{"frames_sent": 1, "kernels": "", "note": NOTES.get(name, ""), "failed": ""},
            }


def training_rows(*, lab: bool = False) -> Iterable[dict[str, object]]:
    network = {"hosts": 4, "rate": "100mbit", "link_share": 0.94} if lab else {}
    for dataset, base in (("mnist", 99.0), ("cifar10", 62.0)):
        for at, ratio in enumerate((1.0, 0.1, 0.01, 0.001)):
            for seed in range(3):
                lost = dataset == "cifar10" and ratio == 0.001 and seed == 2
                yield {
                    **{"dataset": dataset, "model": "simple_cnn", "workers": 4, "ratio": ratio, "seed": seed},
                    **{"lr": 0.05, "epochs": 3, "accuracy": "" if lost else base - 0.2 * at + 0.1 * seed},
                    **{
                        "loss": "" if lost else 0.1,
                        "sent": "" if lost else 1.4e9 * (0.05 if at else 1) / 5**at,
                    },
                    **{
                        "dense_bytes": 1.4e9,
                        "seconds": 50,
                        "first_to": 30 if ratio > 0.01 else "",
                        "target": 98,
                    },
                    **{"purpose": "test", "failed": "the loss is nan" if lost else "", **network},
                }


def feedback_rows() -> Iterable[dict[str, object]]:
    about = {"dataset": "digits", "model": "simple_cnn", "workers": 4, "steps": 200}
    for seed in range(2):
        for method, ratio, lost in (
            ("dense", 1.0, 4e-8),
            ("no error feedback", 0.01, 0.8),
            ("write-up's residual", 0.01, 0.5),
            ("error feedback", 0.01, 1e-7),
            ("no error feedback", 0.001, 0.9),
            ("write-up's residual", 0.001, 0.7),
            ("error feedback", 0.001, 2e-7),
        ):
            score = 98.0 - 9 * lost + 0.1 * seed
            yield {**about, "method": method, "ratio": ratio, "seed": seed, "accuracy": score} | {
                "late": max(lost, 0.1),
                "lost": lost,
                "held": 0.5,
            }


def kernel_rows() -> Iterable[dict[str, object]]:
    passes = {"torch.topk": 60, "naive torch": 90, "native": 1.3, "take_ in place": 1.9, "encode": 0.1}
    passes |= {"select": 1.1, "decode": 0.15, "add_ (one pass)": 1.0}
    for n in (25_000, 1_000_000, 10_000_000, 25_600_000):
        for ratio in (0.1, 0.01, 0.001):
            for method, times in passes.items():
                yield {
                    **{"kind": "take", "method": method, "distribution": "gaussian", "elements": n},
                    **{
                        "ratio": ratio,
                        "threads": 1,
                        "best_ms": times * n / 1e6,
                        "gb_per_s": "",
                        "index_bits": 8.6,
                    },
                }


def map_rows() -> Iterable[dict[str, object]]:
    for method in ("ours-allgather-int8", "ours-sharded-int8"):
        for workers in (32, 64, 128, 256, 512, 1024, 2048, 4096):
            for rate in (1e7, 1e8, 1e9, 1e10, 1e11, 4e11):
                dense = 50 + 8e3 * 204e6 / rate
                growth = workers / 64 if "allgather" in method else 1
                ms = 90 + 8e3 * 1.4e6 * growth / rate
                yield {
                    **{"workers": workers, "rate_bits": rate, "method": method, "predicted_ms": ms},
                    **{"dense_ms": dense, "gain": dense / ms},
                }


def check_rows() -> Iterable[dict[str, object]]:
    for at in range(20):
        ms, error = 60 * 1.2**at, 0.01 * (at % 7 - 3)
        yield {
            **{"hosts": 4, "rate": "1gbit", "method": "plain", "ratio": "", "held_out": at % 3 == 0},
            **{
                "measured_ms": ms,
                "predicted_ms": ms * (1 + error),
                "error": error,
            },
        }


def write_all(folder: Path) -> Path:
    """Every file that a report reads."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "scalability_analysis.csv", lab_rows())
    write(folder / "scalability_dilated.csv", lab_rows(10))
    write(folder / "benchmark_training.csv", training_rows())
    write(folder / "lab_training.csv", training_rows(lab=True))
    write(folder / "error_feedback.csv", feedback_rows())
    write(folder / "benchmark_compression.csv", kernel_rows())
    write(folder / "cost_model.csv", [{"name": "latency", "value": 0.0002, "unit": "s"}])
    write(folder / "cost_model_check.csv", check_rows())
    write(folder / "cost_model_map.csv", map_rows())
    return folder
