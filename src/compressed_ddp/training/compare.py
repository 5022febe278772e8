"""``compressed-ddp compare``: the same training dense and compressed, side by side."""

from __future__ import annotations

import csv
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .. import models
from ..metrics import amount
from .config import Compress, LocalSteps, TrainConfig
from .flags import Parser, as_file, make_parser, parse
from .folder import CONFIG, SUMMARY
from .place import under_launcher
from .run import check_here

COMPARE = """Train dense and compressed with the same seeds, one run after the other, and compare.

Every setting of `compressed-ddp train` may be given. Ratio 1 is plain DistributedDataParallel. Leaves a
table (compare.csv, one row a run; curves.csv, one row an epoch) and two pictures in the folder it names.
Interrupted, it goes on with the same --out.
"""
SETTINGS = "settings.yaml"
# The dense run: every setting of compression and of meetings is the default, which is off.
DENSE = dataclasses.asdict(Compress()) | dataclasses.asdict(LocalSteps())
COLUMNS = (
    *("ratio", "seed", "method", "model", "dataset", "parameters", "workers", "epochs", "steps"),
    *("test_accuracy", "best_accuracy", "test_loss", "seconds", "exposed_seconds"),
    *("socket_sent", "socket_received", "payload_sent", "payload_received", "dense_ring", "saved_percent"),
)


def add_flags(parser: Parser) -> None:
    """The settings that only a comparison has."""
    parser.set_defaults(workers=2)
    group = parser.add_argument_group("what is compared")
    group.add_argument("--ratios", type=str, default="1,0.1,0.01,0.001", help="Ratios; 1 is plain DDP.")
    group.add_argument(
        "--seeds", type=str | None, default=None, help="Seeds, such as 0,1,2. Default: --seed alone."
    )
    group.add_argument(
        "--out", type=str | None, default=None, help="Folder for tables and pictures. Default: a new one."
    )


def command(arguments: Sequence[str]) -> int:
    """Run all trainings; the exit status of the first that fails, or 0."""
    parser = make_parser("compressed-ddp compare", COMPARE)
    add_flags(parser)
    config, options = parse(parser, arguments, compress=True)
    if config.task.model == "list":
        print(models.table())
        return 0
    if under_launcher():
        raise ValueError("compare starts its workers itself: --workers N, not torchrun")
    if config.running.resume is not None or config.running.run_dir is not None:
        raise ValueError("compare makes a folder for each run: leave --resume and --run-dir out, use --out")
    ratios = _numbers("ratios", options.ratios, float)
    seeds = [config.optimisation.seed] if options.seeds is None else _numbers("seeds", options.seeds, int)
    # Wrong ratios are found before the first training, not after it.
    runs = [(r, s, config.but(ratio=r, seed=s, **(DENSE if r == 1 else {}))) for s in seeds for r in ratios]
    if options.print_config:
        print(as_file(config, ratios=options.ratios, seeds=options.seeds, out=options.out), end="")
        return 0
    if config.running.workers == 1:
        raise ValueError("one worker alone sends nothing: there is nothing to compare; --workers 2 or more")
    name = f"compare-{config.task.model}-{config.task.dataset}-{time.strftime('%Y%m%d-%H%M%S')}"
    out = Path(options.out) if options.out is not None else Path(config.running.runs) / name
    folders = [out / f"ratio-{ratio:g}-seed-{seed}" for ratio, seed, _ in runs]
    for (*_, settings), folder in zip(runs, folders, strict=True):
        check_same(settings, folder)
    if not all((folder / SUMMARY).exists() for folder in folders):
        check_here(config)  # said once, and before a folder is made
    summaries, status = [], 0
    for (ratio, seed, settings), folder in zip(runs, folders, strict=True):
        print(
            f"== {'dense' if ratio == 1 else f'ratio {ratio:g}'}, seed {seed} ==", file=sys.stderr, flush=True
        )
        failed = run(settings, folder)
        status = status or failed
        if not failed:
            summaries.append({"ratio": ratio, "seed": seed} | json.loads((folder / SUMMARY).read_text()))
    if summaries:  # one that diverged does not take the others with it
        write(out, summaries)
        print(table(summaries))
        print(f"\nin {out}: compare.csv, curves.csv{pictures(out, summaries)}")
    return status


def check_same(config: TrainConfig, folder: Path) -> None:
    """Raises ValueError if a run was begun in ``folder``, and not that of ``config``."""
    settings = folder / SETTINGS
    begun = (folder / SUMMARY).exists() or (folder / CONFIG).exists()
    if begun and not (settings.is_file() and settings.read_text() == _text(config)):
        raise ValueError(f"{folder} has a run with other settings; give another --out")


def _text(config: TrainConfig) -> str:
    flat = {name: value for name, value in config.flat().items() if name not in ("run_dir", "resume")}
    return yaml.safe_dump(flat, sort_keys=False)


def run(config: TrainConfig, folder: Path) -> int:
    """One training in processes of its own; where it was begun before, it goes on, and done, it stays."""
    if (folder / SUMMARY).exists():
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / SETTINGS
    settings.write_text(_text(config))
    program = [
        sys.executable,
        "-m",
        "compressed_ddp",
        "train",
        "--config",
        str(settings),
        "--run-dir",
        str(folder),
        "--resume",
        "auto",
    ]
    return subprocess.run(program, check=False).returncode


def _numbers(what: str, text: str, kind: type) -> list[Any]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{what} must be numbers with commas between them, got {text!r}") from None
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"{what} has a number twice: {text!r}")
    return numbers


def write(out: Path, summaries: Sequence[Mapping[str, Any]]) -> None:
    """compare.csv and curves.csv."""
    with (out / "compare.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(summaries)
    with (out / "curves.csv").open("w", newline="") as file:
        rows = [
            {"ratio": summary["ratio"], "seed": summary["seed"], **epoch}
            for summary in summaries
            for epoch in summary["history"]
        ]
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def sent(summary: Mapping[str, Any]) -> int:
    """Bytes that a worker sent: measured at its sockets where they are counted, payload otherwise."""
    measured = summary["socket_sent"]
    return int(summary["payload_sent"] if measured is None else measured)


def table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """One line a ratio: means over the seeds, and how each stands against dense."""
    groups: dict[float, list[Mapping[str, Any]]] = {}
    for summary in summaries:
        groups.setdefault(summary["ratio"], []).append(summary)
    base = groups.get(1.0)
    dense = None if base is None else statistics.fmean(map(sent, base))
    measured = all(summary["socket_sent"] is not None for summary in summaries)
    rows = [("", "test accuracy", "time", "exposed", "sent by each", "of dense", "of a dense ring")]
    for ratio, mine in groups.items():
        score = [summary["test_accuracy"] for summary in mine]
        spread = f" ± {statistics.stdev(score):.2f}" if len(score) > 1 else ""
        bytes_ = statistics.fmean(map(sent, mine))
        rows.append(
            (
                "dense" if ratio == 1 else f"{mine[0]['method']}",
                f"{statistics.fmean(score):.2f}{spread} %",
                f"{statistics.fmean(summary['seconds'] for summary in mine):.1f} s",
                f"{statistics.fmean(summary['exposed_seconds'] for summary in mine):.1f} s",
                amount(round(bytes_)),
                "" if not dense else f"{100 * bytes_ / dense:.2f} %",
                f"{100 * bytes_ / max(1, mine[0]['dense_ring']):.2f} %",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if not i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    how = "measured at the workers' sockets" if measured else "payload; sockets cannot be read here"
    return "\n".join(["", *lines, "", f"sent: {how}; times are of workers that share this machine"])


def pictures(out: Path, summaries: Sequence[Mapping[str, Any]]) -> str:
    """Draw accuracy over epochs and over bytes; what to say about it."""
    try:
        import matplotlib
    except ImportError:
        return " (no pictures: pip install 'compressed-ddp[plots]')"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for file, label, x_of in (
        ("accuracy_over_epochs.png", "epoch", lambda _, epoch: float(epoch["epoch"])),
        ("accuracy_over_bytes.png", "bytes sent by each worker", _bytes_so_far),
    ):
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        colours: dict[float, Any] = {}
        for summary in summaries:
            ratio, history = summary["ratio"], summary["history"]
            first = ratio not in colours
            (line,) = axes.plot(
                [x_of(summary, epoch) for epoch in history],
                [epoch["test_accuracy"] for epoch in history],
                marker="o",
                markersize=3,
                color=colours.get(ratio),
                label=("dense" if ratio == 1 else f"ratio {ratio:g}") if first else None,
            )
            colours[ratio] = line.get_color()
        if label != "epoch":
            axes.set_xscale("log")
        axes.set(
            xlabel=label,
            ylabel="test accuracy, %",
            title=f"{summaries[0]['model']} on {summaries[0]['dataset']}, {summaries[0]['workers']} workers",
        )
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(out / file, dpi=120)
        pyplot.close(figure)
    return ", accuracy_over_epochs.png, accuracy_over_bytes.png"


def _bytes_so_far(summary: Mapping[str, Any], epoch: Mapping[str, Any]) -> float:
    """Sockets are read at the end of a run; payload tells how it was spread over epochs."""
    total = float(sent(summary))
    return max(1.0, float(epoch["bytes_sent"]) * total / max(1.0, float(summary["payload_sent"])))
