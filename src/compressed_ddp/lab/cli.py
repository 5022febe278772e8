"""``compressed-ddp lab``: run a program on a network of its own, check one, clean up."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from ..metrics import amount
from .hosts import Counters, Loopback, Network
from .launch import LaunchFailed, launch
from .network import Lab
from .records import clean
from .selftest import check, table
from .shaping import parse_rate
from .tools import LabError, missing


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compressed-ddp lab",
        description="A network inside this machine: hosts on a switch, every link held to a rate in both "
        "directions. Needs Linux, root and iproute2.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    run = commands.add_parser(
        "run",
        help="run a program on every host, one process each",
        usage="compressed-ddp lab run --hosts N [--rate RATE] [--no-check] [--loopback] -- command ...",
        description="Run any program that torchrun could run on every host, one process each. What rank 0 "
        "writes is shown; of the others if they fail. The bytes at the interfaces follow at the end.",
        epilog="example: compressed-ddp lab run --hosts 4 --rate 100mbit -- python my_train.py",
    )
    run.add_argument("--no-check", action="store_true", help="run even if the machine cannot hold the rate")
    run.add_argument("--loopback", action="store_true", help="no lab: all processes on loopback, no shaping")
    test = commands.add_parser(
        "check",
        help="measure every link while all are busy",
        description="Build the lab, measure what every link carries while all are busy in both directions, "
        "and remove it. Exit status 1 if some link does not hold the rate.",
    )
    commands.add_parser(
        "clean",
        help="remove labs whose runner was killed",
        description="Remove the namespaces of labs whose runner is dead, and end what runs in them. A lab "
        "in use is left alone.",
    )
    for each in (run, test):
        each.add_argument("--hosts", type=int, required=True, help="how many, from 2")
        each.add_argument(
            "--rate", help="of every link in each direction, such as 100mbit or 1gbit (default: no limit)"
        )
    return parser


def run_command(options: argparse.Namespace) -> int:
    """Run a program on every host; the exit status of the rank that failed first, or 0."""
    if not options.program:
        raise ValueError("nothing to run: put the command after --, such as: -- python my_train.py")
    with _network(options) as network:
        checked = ""
        if network.rate is not None:
            checked = (
                "; NOT checked: this machine may be slower" if options.no_check else "; every link holds it"
            )
            if not options.no_check:
                check(network)
        _say(network.describe() + checked)
        before = network.counters()
        try:
            launch(network, options.program)
        except LaunchFailed as error:
            _say(str(error))
            code = error.codes[error.first]
            return code if code > 0 else 128 - code
        after = network.counters()
        if before is not None and after is not None:
            _say(traffic([end - start for start, end in zip(before, after, strict=True)]))
    return 0


def _network(options: argparse.Namespace) -> Network:
    """The lab that is asked for, or loopback where there can be none."""
    if options.rate is not None:
        parse_rate(options.rate)  # a wrong one is wrong on loopback too
    lacking = None if options.loopback else missing()
    if lacking:
        _say(f"no shaped network here: {lacking}. Going on with loopback, where no rate is held")
    if options.loopback or lacking:
        return Loopback(options.hosts)
    return Lab(options.hosts, options.rate)


def traffic(counted: Sequence[Counters]) -> str:
    """What passed each host's interface, for people."""
    lines = [
        "at the interfaces, with Ethernet, IP and TCP headers:",
        f"{'host':<6}{'sent':>12}{'received':>12}{'frames out':>12}{'frames in':>12}",
    ]
    for host, each in enumerate(counted):
        sent, received = amount(each.tx_wire_bytes), amount(each.rx_wire_bytes)
        lines.append(f"{host:<6}{sent:>12}{received:>12}{each.tx_frames:>12,}{each.rx_frames:>12,}")
    return "\n".join(lines)


def check_command(options: argparse.Namespace) -> int:
    """Measure every link and print the table; 1 if some link does not hold the rate."""
    with Lab(options.hosts, options.rate) as lab:
        print(table(check(lab), lab.rate))
    return 0


def clean_command(options: argparse.Namespace) -> int:
    """Remove what dead runners left; 1 if something of theirs could not be removed."""
    lacking = missing()
    if lacking:
        raise LabError(f"no lab here: {lacking}")
    results = clean()
    for each in results:
        print(f"{each.prefix} {each.fate}")
    if not results:
        print("there are no labs")
    return 1 if any(each.stuck for each in results) else 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": run_command,
    "check": check_command,
    "clean": clean_command,
}


def main(arguments: Sequence[str]) -> int:
    """Run a command of the lab; the exit status. What a user can mend is said without a traceback."""
    arguments = list(arguments)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = make_parser().parse_args(arguments[:at])
    options.program = arguments[at + 1 :]
    try:
        return COMMANDS[options.command](options)
    except (LabError, ValueError, OSError) as error:
        if os.environ.get("COMPRESSED_DDP_TRACEBACK"):
            raise
        _say(str(error))
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130


def _say(text: str) -> None:
    print(f"compressed-ddp lab: {text}", file=sys.stderr, flush=True)
