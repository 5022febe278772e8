"""The command line: ``compressed-ddp info``, and the way to the application, the lab and the report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .compression import COMPRESSORS
from .kernels import describe, same_bits
from .version import WIRE_VERSION, __version__

APPLICATION = {
    "train": "train a model, dense or compressed, alone or with several workers",
    "compare": "train dense and compressed with the same seeds, and compare",
    "data": "list datasets, and download them",
}
REPORT = "one page of plots and tables from the experiments' CSV files"
LAB = "a network inside this machine, held to a rate: run a program on it, check it, clean up"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in APPLICATION:
        return application(arguments[0], arguments[1:])
    if arguments and arguments[0] == "lab":
        from .lab.cli import main as lab

        return lab(arguments[1:])
    if arguments and arguments[0] == "report":
        from .report.cli import main as report

        return report(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="compressed-ddp",
        description="Data-parallel training on slow networks: compressed gradients that travel compressed.",
    )
    parser.add_argument("--version", action="version", version=f"compressed-ddp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, about_it in {**APPLICATION, "lab": LAB, "report": REPORT}.items():
        commands.add_parser(name, help=about_it)
    info = commands.add_parser(
        "info",
        help="what is installed here, and which kernels run and why",
        description="What is installed here, and which kernels run and why. Exit status 1 where the C++ "
        "kernels give other bits than the torch ones; please report that.",
    )
    info.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    info.add_argument(
        "--expect-native", action="store_true", help="exit status 1 unless the C++ kernels are there"
    )
    options = parser.parse_args(arguments)
    try:
        return show_info(as_json=options.json, expect_native=options.expect_native)
    except (ValueError, ImportError) as error:
        print(f"compressed-ddp: {error}", file=sys.stderr)
        return 2


def application(command: str, arguments: Sequence[str]) -> int:
    """Run a command that needs more than the core's torch."""
    try:
        from .training.cli import main as run
    except ModuleNotFoundError as error:
        needed = "install what it needs with: pip install 'compressed-ddp[train]'"
        print(f"compressed-ddp {command} needs {error.name}; {needed}", file=sys.stderr)
        return 2
    return run(command, arguments)


def show_info(*, as_json: bool, expect_native: bool) -> int:
    """Print what ``about`` says; 0 if it is as it should be."""
    facts = about()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        for name, value in facts.items():
            print(f"{name:<12} {', '.join(value) if isinstance(value, list) else value}")
    native = str(facts["kernels"]).startswith("native")
    if expect_native and not native:
        print("the C++ kernels are not in use here", file=sys.stderr)
    return 1 if facts["same bits"] == "no" or (expect_native and not native) else 0


def about() -> dict[str, str | list[str]]:
    """Versions, kernels, devices and process-group backends of this machine."""
    devices = ["cpu"]
    devices += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    available = dist.is_available()
    backends = [name for name in ("gloo", "nccl", "mpi") if available and dist.is_backend_available(name)]
    same = same_bits()
    return {
        "version": f"{__version__}, wire format {WIRE_VERSION}",
        "torch": str(torch.__version__),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "kernels": describe(),
        "same bits": "nothing to compare" if same is None else "yes" if same else "no",
        "threads": f"torch uses {torch.get_num_threads()}, the machine has {os.cpu_count()} cores",
        "devices": devices,
        "backends": backends,
        "compressors": sorted(COMPRESSORS),
    }
