"""``compressed-ddp lab``: compare methods or run a program on a network of its own, check one, clean up."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

from ..metrics import amount
from .bench import add_plan_options, list_methods, make_plan, writer
from .hosts import Counters, Loopback, Network
from .launch import LaunchFailed, find_program, launch
from .measure import Plan, Row
from .methods import TABLE
from .network import Lab
from .progress import BlockProgress
from .records import clean
from .selftest import check
from .selftest import table as link_table
from .session import COLUMNS, link_share, measure
from .shaping import parse_rate
from .summary import table
from .tools import LabError, missing

PLANNED = (*(field.name for field in fields(Plan)), "out")
"""Options that are about comparing methods."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compressed-ddp lab",
        description="A network inside this machine: hosts on a switch, every link held to a rate in both "
        "directions. Needs Linux, root and iproute2.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    run = commands.add_parser(
        "run",
        help="compare methods, or run a program on every host",
        usage="compressed-ddp lab run --hosts N [--rate RATE] [options] [-- command ...]",
        description="Without a command: measure plain DDP, torch's hooks and ours side by side on the "
        "gradients of a model, and print a table. Compute is emulated; communication and compression are "
        "real. With one: run any program that torchrun could run on every host, one process each. What "
        "rank 0 writes is shown; of the others if they fail. The bytes at the interfaces follow at the end.",
        epilog="examples:\n  compressed-ddp lab run --hosts 8 --rate 1gbit --model resnet50 --compute 50ms\n"
        f"  compressed-ddp lab run --hosts 4 --rate 100mbit -- python my_train.py\n\n{list_methods()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("--no-check", action="store_true", help="run even if the machine cannot hold the rate")
    run.add_argument("--loopback", action="store_true", help="no lab: all processes on loopback, no shaping")
    run.add_argument("--out", help="without a command: write every row to this CSV file")
    add_plan_options(run, methods=TABLE)
    run.set_defaults(of=run)
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
    """Compare methods, or run a program; the exit status of the rank that failed first, or 0.

    1 if not one method ran. What can be known to be wrong is refused before the network is built.
    """
    if options.program:
        stray = [name for name in PLANNED if getattr(options, name) != options.of.get_default(name)]
        if stray:
            flag = f"--{stray[0].replace('_', '-')}"
            raise ValueError(f"{flag} is about comparing methods; a program after -- has flags of its own")
        find_program(options.program)
    elif options.out is not None:
        check_out(Path(options.out))
    plan = make_plan(options)
    with _network(options) as network:
        checked, share = "", None
        if network.rate is not None:
            checked = (
                "; NOT checked: this machine may be slower" if options.no_check else "; every link holds it"
            )
            if not options.no_check:
                share = link_share(check(network), network.rate)
        _say(network.describe() + checked)
        try:
            if options.program:
                run_program(network, options.program)
            elif not compare(network, plan, share, options.out):
                _say("no method ran; the table says why")
                return 1
        except LaunchFailed as error:
            _say(str(error))
            code = error.codes[error.first]
            return code if code > 0 else 128 - code
    return 0


def check_out(path: Path) -> None:
    """Raises ValueError unless a file can be written there; it is not touched."""
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(f"--out {path}: there is no folder {folder}; make it, or name another")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"--out {path} cannot be written; name another file")


def run_program(network: Network, program: Sequence[str]) -> None:
    """Run a program on every host, and say what passed the interfaces."""
    before = network.counters()
    launch(network, program)
    after = network.counters()
    if before is not None and after is not None:
        _say(traffic([end - start for start, end in zip(before, after, strict=True)]))


def compare(network: Network, plan: Plan, share: float | None, out: str | None) -> bool:
    """Measure ``plan`` and print the table; rows go to ``out`` as they come. Whether any method ran."""
    cores = os.cpu_count() or 1
    _say(
        f"{plan.model}; {1e3 * plan.compute:g} ms of compute a step are EMULATED (hosts sleep); what is sent "
        f"and what compressing it costs are real, and {network.hosts} hosts share {cores} cores"
    )
    rows: list[Row] = []
    with ExitStack() as stack:
        tell: list[Callable[[Row], None]] = [rows.append, stack.enter_context(BlockProgress(plan))]
        if out is not None:
            file = stack.enter_context(open(out, "w", newline="", encoding="utf-8"))
            tell.append(writer(file, as_csv=True, columns=COLUMNS))

        def hear(row: Row) -> None:
            for each in tell:
                each(row)

        try:
            measure(network, plan, share, hear)
        finally:
            stack.close()
            if rows:
                print(table(rows, plan, network.rate), flush=True)
    return any(not row["failed"] for row in rows)


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
        print(link_table(check(lab), lab.rate))
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


def check_program(options: argparse.Namespace) -> None:
    """Raises ValueError unless what stands after ``--`` is a program for a command that runs one."""
    if options.command != "run":
        raise ValueError(f"lab {options.command} runs no program: leave out -- {' '.join(options.program)}")
    if not options.program:
        raise ValueError("nothing stands after --: name a program, or leave -- out to compare methods")


def main(arguments: Sequence[str]) -> int:
    """Run a command of the lab; the exit status. What a user can mend is said without a traceback."""
    arguments = list(arguments)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = make_parser().parse_args(arguments[:at])
    options.program = arguments[at + 1 :]
    try:
        if at < len(arguments):
            check_program(options)
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
