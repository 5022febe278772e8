"""The fuzz target for everything that Python decodes: ``one_input(data)``, and a fuzzer around it.

    python fuzz/python_messages.py -runs=100000 corpus/     # atheris; the flags are libFuzzer's

The first byte chooses a decoder: messages most of the time (messages.py), else saved states, what workers
tell each other at the start, the guard's rows (states.py). tests/property/test_fuzz.py runs the same function
on inputs that hypothesis draws, and on changed seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

MESSAGES = 240
"""First bytes below this mean a message."""


def decoders() -> list[Callable[[bytes], bool]]:
    """All but that of messages."""
    from states import one_guard, one_handshake, one_state

    return [one_state, one_handshake, one_guard]


def one_input(data: bytes) -> bool:
    """Whether ``data`` is accepted by the decoder that it chooses; raises if anything else is wrong."""
    from messages import one_message

    if not data or data[0] < MESSAGES:
        return one_message(data[1:])
    every = decoders()
    return every[data[0] % len(every)](data[1:])


def seeds() -> list[bytes]:
    """Inputs to begin with: the golden messages, packed ones, states, descriptions, rows."""
    import messages
    import states

    every, found = decoders(), [b"\0" + seed for seed in messages.seeds()]
    for decoder, inputs in states.seeds().items():
        first = next(b for b in range(MESSAGES, 256) if every[b % len(every)] is decoder)
        found += [bytes([first]) + seed for seed in inputs]
    return found


ROOMS = (
    "wire",
    "kernels",
    "layout",
    "communication.packer",
    "communication.handshake",
    "communication.guard",
)
"""Where decoders live, besides error_feedback.state: what coverage is measured in."""


def functions() -> Iterator[FunctionType]:
    """Every function and method of those rooms."""
    wanted = tuple(f"compressed_ddp.{room}" for room in (*ROOMS, "error_feedback.state"))
    for name, module in list(sys.modules.items()):
        if name.startswith(wanted):
            mine = [it for it in vars(module).values() if getattr(it, "__module__", None) == name]
            inner = [member for it in mine if isinstance(it, type) for member in vars(it).values()]
            for it in (*mine, *inner):
                plain = getattr(it, "__func__", it)  # of class methods and static ones
                if isinstance(plain, FunctionType) and plain.__module__ == name:
                    yield plain


def main() -> None:
    import atheris
    import torch

    torch.set_num_threads(1)
    for first in (0, MESSAGES, MESSAGES + 1, MESSAGES + 2):  # imports all there is
        one_input(bytes([first]))
    # Not by atheris' hook on imports: it sees nothing of a package that is installed for editing.
    for function in functions():
        atheris.instrument_func(function)

    def run(data: bytes) -> None:
        one_input(data)

    atheris.Setup(sys.argv, run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
