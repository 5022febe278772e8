"""The command line of a run, made from its configuration's dataclasses by jsonargparse."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import docstring_parser
import yaml
from jsonargparse import ActionYesNo, ArgumentParser, Namespace

from ..types import CompressionConfig, unknown_name
from .config import NOT_FLAGS, SECTIONS, TrainConfig
from .folder import read_settings, saved_settings


class Parser(ArgumentParser):
    """jsonargparse's parser, with a short word about errors and the nearest name for a wrong one."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong and how to find out more, and end the program."""
        message = _wrong_kind(message) or message + self._hint(message)
        print(f"{self.prog}: {message}\n{self.prog} --help shows all settings", file=sys.stderr)
        sys.exit(2)

    def _hint(self, message: str) -> str:
        """What a flag, a key of a file or a word that nobody knows may have meant."""
        found = re.search(r"(unrecognized arguments: |Option ')(-*)([\w.-]+)", message)
        if found is None:
            return ""
        is_flag = found[1].startswith("unrecognized")
        if is_flag and not found[2]:
            return (
                "; settings are flags, as in --dataset mnist, and a switch takes no value: --compress turns "
                "it on, --no-compress off"
            )
        names = [option for action in self._actions for option in action.option_strings]
        wanted = "--" + found[3].rpartition(".")[2].replace("_", "-")  # all keys are on one level
        near = difflib.get_close_matches(wanted, names, n=1)
        if not near:
            return ""
        return f"; did you mean {near[0] if is_flag else near[0][2:].replace('-', '_')}?"


def _wrong_kind(message: str) -> str | None:
    """jsonargparse's words about a value of another kind, in ours; None if it is about something else."""
    found = re.match(r'Parser key "(\w+)":.*(?:Got|Given) value: (.*)', message, re.DOTALL)
    hints = {name: hint for kind in SECTIONS.values() for name, hint in get_type_hints(kind).items()}
    if found is None or found[1] not in hints:
        return None
    name, value, hint = found[1], found[2].strip(), hints[found[1]]
    if get_origin(hint) is Literal:
        return str(unknown_name(name, value, get_args(hint)))
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    wanted = [kinds[kind] for kind in (get_args(hint) or (hint,)) if kind in kinds]
    none = ", or null for none" if type(None) in get_args(hint) else ""
    return f"{name} must be {' or '.join(wanted)}{none}; got {value!r}" if wanted else None


def make_parser(prog: str, description: str) -> Parser:
    """A parser with every setting of a run, in the groups of its configuration."""
    # Its own --print-config would print before a resumed run is asked and anything is checked.
    parser = Parser(prog=prog, description=description, print_config=None)
    parser.add_argument("--config", action="config", help="A YAML file with settings; flags win over it.")
    parser.add_argument(
        "--print-config", action="store_true", help="Print what would run, as a file for --config, and exit."
    )
    for section, kind in SECTIONS.items():
        group = parser.add_argument_group(_title(kind))
        types = get_type_hints(kind)
        help_of = {
            item.arg_name: item.description for item in docstring_parser.parse_from_object(kind).params
        }
        defaults = kind()
        for name, hint in types.items():
            if (section, name) in NOT_FLAGS:
                continue
            flag = f"--{name.replace('_', '-')}"
            text = re.sub(r"``?([^`]+)``?", r"\1", (help_of.get(name) or "")).replace("%", "%%")
            about = {"default": getattr(defaults, name), "help": text}
            if name == "lr":
                about["default"] = None  # depends on the optimizer
            if hint is bool:
                group.add_argument(flag, action=ActionYesNo(no_prefix="no-"), **about)
            else:
                group.add_argument(flag, type=hint, **about)
    return parser


def _title(kind: type) -> str:
    """A section's docstring; the compressor's own is about more than a command line."""
    return "how gradients travel with --compress" if kind is SECTIONS["compression"] else str(kind.__doc__)


def parse(parser: Parser, arguments: Sequence[str], **fixed: Any) -> tuple[TrainConfig, Namespace]:
    """The configuration that ``arguments`` mean, and everything that the parser found.

    Settings in ``fixed`` are the command's own, whatever the arguments say.

    Flags win over files wherever they stand, and files over the defaults, which for a run that is
    resumed are its own configuration. Wrong values end the program with a message, as wrong flags do.
    """

    def told(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (ValueError, RuntimeError, OSError) as error:
            parser.error(str(error))

    files, rest = _files_first(arguments)
    for file in files:
        if os.path.isfile(file):  # what else there is, the parser knows to say
            told(partial(read_settings, Path(file)))
    arguments = [*(f"--config={file}" for file in files), *rest]
    found = parser.parse_args(arguments)
    names = TrainConfig().flat()
    if found.resume is not None:
        saved = told(lambda: saved_settings(found.resume, found.run_dir))
        parser.set_defaults(saved)
        found = parser.parse_args(arguments)
    if "compress" not in fixed and not found.compress:
        _refuse_idle(parser, rest, files)
    return told(lambda: TrainConfig.from_flat({name: found[name] for name in names} | fixed)), found


def _refuse_idle(parser: Parser, arguments: Sequence[str], files: Sequence[str]) -> None:
    """End the program if it was said how gradients are compressed, and nothing about whether they are.

    Where a file or a flag says that they are not, the rest may stay as it is.
    """
    said = {key for file in files for key in read_settings(Path(file))}
    flags = (argument for argument in arguments if argument.startswith("--"))
    said |= {flag.partition("=")[0][2:].replace("-", "_") for flag in flags}
    if said & {"compress", "no_compress"}:
        return
    # Time limits and looks at weights are there without compression too.
    always = {"seed", "sync_timeout", "guard_every"}
    for each in fields(CompressionConfig):
        if each.name in said - always:
            flag = "--" + each.name.replace("_", "-")
            parser.error(
                f"{flag} says how gradients are compressed, and nothing says that they are: add --compress, "
                f"leave {flag} out, or say --no-compress"
            )


def as_file(config: TrainConfig, **more: Any) -> str:
    """What --print-config prints: the whole configuration, and ``more``, as --config takes it."""
    return yaml.safe_dump(config.flat() | more, sort_keys=False, allow_unicode=True)


def _files_first(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values of every --config, and all other arguments: files come first, for what comes later wins."""
    rest = list(arguments)
    files = []
    while "--config" in rest[:-1]:
        at = rest.index("--config")
        rest.pop(at)
        files.append(rest.pop(at))
    glued = [argument for argument in rest if argument.startswith("--config=")]
    files += [argument.partition("=")[2] for argument in glued]
    return files, [argument for argument in rest if argument not in glued]
