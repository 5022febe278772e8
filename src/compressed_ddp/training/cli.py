"""``compressed-ddp train``, ``compare`` and ``data``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .. import data, models
from ..types import SyncError
from . import compare
from .checkpoint import CheckpointError
from .figures import TrainingDiverged
from .flags import as_file, make_parser, parse
from .folder import choose_folder
from .launch import launch, set_threads
from .place import under_launcher
from .run import check_here, train

TRAIN = """Train a model on real data, with or without compressed gradients.

Alone, with workers that it starts itself (--workers 4), or under torchrun. Without a flag it trains
a small network on handwritten digits that come with scikit-learn: no download.
"""


def train_command(arguments: Sequence[str]) -> int:
    """One run: start its workers, or be one of them."""
    parser = make_parser("compressed-ddp train", TRAIN)
    config, found = parse(parser, arguments)
    if found.print_config:
        print(as_file(config), end="")
        return 0
    if config.task.model == "list":
        print(models.table())
        return 0
    if under_launcher() or (config.running.workers == 1 and not config.running.max_restarts):
        set_threads(config.running)
        train(config)
        return 0
    check_here(config)  # what is wrong for all of them is better said once, by nobody but us
    return launch(config.running, ["train", *arguments, f"--run-dir={choose_folder(config)}"])


def data_command(arguments: Sequence[str]) -> int:
    """List datasets, or download one."""
    parser = argparse.ArgumentParser(
        prog="compressed-ddp data", description="The datasets, and how to get them."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("list", help="what there is, and what is here already")
    download = commands.add_parser(
        "download",
        help="fetch one over verified TLS, checked against pinned SHA-256",
        description="Fetch a dataset over verified TLS and check it against pinned SHA-256. Interrupted, it "
        "goes on where it was.",
    )
    download.add_argument("name", choices=sorted(name for name, info in data.DATASETS.items() if info.files))
    for each in commands.choices.values():
        each.add_argument("--data-dir", default="data", help="where the files are to be (default: data)")
    options = parser.parse_args(arguments)
    if options.command == "list":
        print(data.table(options.data_dir))
        return 0
    print(f"{options.name} is in {_download(options.name, options.data_dir)}")
    return 0


def _download(name: str, folder: str) -> str:
    """Download with a bar for each file."""
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def progress(file: str, done: int, total: int | None) -> None:
        if file not in bars:
            bars[file] = tqdm(desc=file, total=total, unit="B", unit_scale=True, disable=None)
        bars[file].n = done
        bars[file].refresh()

    try:
        return str(data.download(name, folder, progress=progress))
    finally:
        for bar in bars.values():
            bar.close()


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train_command,
    "compare": compare.command,
    "data": data_command,
}


def main(command: str, arguments: Sequence[str]) -> int:
    """Run ``command``; the exit status. What a user can mend is said in a line, without a traceback."""
    try:
        return COMMANDS[command](arguments)
    except (RuntimeError, OSError, ValueError, ImportError) as error:
        if os.environ.get("COMPRESSED_DDP_TRACEBACK"):
            raise
        rank = f" rank {os.environ['RANK']}:" if under_launcher() and os.environ["RANK"] != "0" else ""
        ours = CheckpointError, TrainingDiverged, SyncError, OSError, ValueError, ImportError
        hint = "" if isinstance(error, ours) else " (COMPRESSED_DDP_TRACEBACK=1 shows where)"
        print(f"compressed-ddp:{rank} {error}{hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
