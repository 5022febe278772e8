"""What else comes from outside: saved states, what workers tell each other at the start, the guard's rows.

``one_state(data)`` reads ``data`` as changes to a good state, each at a place and to a thing that no worker
ever wrote; ``one_handshake`` as the texts of several ranks; ``one_guard`` as their rows. Each raises
AssertionError if something is accepted that should not be, and lets through what a user should never see.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compressed_ddp import CompressionConfig, SyncError, reshard_states
from compressed_ddp.communication import Reducer, run_in_process
from compressed_ddp.communication.adaptive import check_factors
from compressed_ddp.communication.guard import _ROW, Guard, straggler
from compressed_ddp.communication.handshake import compare, fingerprint
from compressed_ddp.compression.factory import from_config
from compressed_ddp.error_feedback.state import check_local, check_state, saved_ratio
from compressed_ddp.layout import BucketLayout, Partition
from compressed_ddp.metrics import Ledger

LAYOUTS = (
    BucketLayout(("w", "b"), (torch.Size([20, 7]), torch.Size([9]))),
    BucketLayout(("v",), (torch.Size([90]),)),
)
SHAPES = {name: shape for each in LAYOUTS for name, shape in zip(each.names, each.shapes, strict=True)}
DTYPES = dict.fromkeys(SHAPES, torch.float32)
WORLD = 2

THINGS: list[Callable[[], Any]] = [
    lambda: None,
    lambda: -1,
    lambda: 2**70,
    lambda: 1.5,
    lambda: math.nan,
    lambda: True,
    lambda: "w",
    lambda: b"\xff",
    lambda: [],
    lambda: [[]],
    lambda: {},
    lambda: {"w": {"w": 1}},
    lambda: {1: 2},
    lambda: torch.full((20, 7), math.inf),
    lambda: torch.zeros(20, 7, dtype=torch.int64),
    lambda: torch.zeros(20, 7, dtype=torch.complex64),
    lambda: torch.zeros(7, 20),
    lambda: torch.zeros(20, 7, dtype=torch.float64),
    lambda: torch.zeros(1).expand(10**9),
    lambda: torch.zeros(1).expand(20, 7),
    lambda: torch.zeros(20, 7).to_sparse(),
    lambda: torch.zeros(20, 7, device="meta"),
    lambda: torch.zeros(0),
    lambda: torch.tensor(3),
    lambda: [2**62, 2**62],
    lambda: ["w", "w"],
    lambda: ("v",),
    lambda: torch.Size([90]),
]
REMOVE, TWICE, RENAME = (len(THINGS) + i for i in range(3))


@functools.cache
def good_states() -> list[dict[str, Any]]:
    """Of both ranks of a run with two buckets, after three steps."""
    config = CompressionConfig(ratio=0.1, collective="sharded", min_compress_numel=16)

    def work(net: Any) -> dict[str, Any]:
        reducer = Reducer(from_config(config), config, net)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for layout in LAYOUTS:
                gradient = torch.randn(layout.numel, generator=generator)
                reducer.reduce_(layout, gradient, last=layout is LAYOUTS[-1])
        return reducer.state_dict()

    return run_in_process(WORLD, work)


def change(state: Any, path: bytes, what: int) -> None:
    """Walk into ``state`` as ``path`` says, and change what is there."""
    here: Any = state
    for at, byte in enumerate(path):
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        if not keys:
            return
        key = keys[byte % len(keys)]
        inner = here[key]
        if at + 1 < len(path) and isinstance(inner, (dict, list)) and inner and byte < 192:
            here = inner
            continue
        if what % (RENAME + 1) == REMOVE:
            del here[key]
        elif what % (RENAME + 1) == TWICE and isinstance(here, list):
            here.append(inner)
        elif what % (RENAME + 1) == RENAME and isinstance(here, dict):
            here["renamed"] = here.pop(key)
        else:
            here[key] = THINGS[what % len(THINGS)]()
        return


def one_state(data: bytes) -> bool:
    """Whether a changed state is accepted; AssertionError if it should not have been."""
    states = [_copied(state) for state in good_states()]
    for at in range(0, len(data) - 4, 5):
        change(states[data[at] % WORLD], data[at + 1 : at + 4], data[at + 4])
    try:
        saved = check_state(states[0], 0, WORLD, SHAPES)
        saved_ratio(states[0], 0.1)
        check_factors(states[0], SHAPES)
    except ValueError:
        assert len(data) >= 5, "a state as it was saved is refused"
        accepted = False
    else:
        _must_fit(states[0], saved)
        accepted = True
    for read in (lambda: check_local(states[0], SHAPES, DTYPES), lambda: reshard_states(states, 3)):
        try:
            read()
        except ValueError:  # the one way to say no
            continue
    return accepted


def _copied(value: Any) -> Any:
    """A copy down to the tensors, which nobody changes."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else copy.copy(value)


def _must_fit(state: dict[str, Any], saved: list[Any]) -> None:
    """What the first step after loading takes on trust."""
    assert isinstance(state["step"], int) and state["step"] >= 0 and state["taken"] >= 0
    for tensors in (state["residuals"], *state["kept"].values()):
        for name, tensor in tensors.items():
            assert tensor.shape == SHAPES[name]
            _must_be_numbers(tensor)
    names = [name for bucket in saved for name in bucket.layout.names]
    assert len(names) == len(set(names)) and set(names) <= set(SHAPES)
    for bucket in saved:
        assert all(SHAPES[name] == bucket.layout.shapes[i] for i, name in enumerate(bucket.layout.names))
        for key, tensor in bucket.state.items():
            _must_be_numbers(tensor)
            if key == "owner":
                assert tensor.numel() == Partition(bucket.layout.numel, WORLD, ()).local_numel(0)


def _must_be_numbers(tensor: Tensor) -> None:
    assert tensor.dtype.is_floating_point and bool(torch.isfinite(tensor.clone()).all())


# --- the start, and the guard --------------------------------------------------------------


@functools.cache
def description() -> bytes:
    parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return json.dumps({"problem": None, **fingerprint(CompressionConfig(), parameters)}).encode()


def one_handshake(data: bytes) -> bool:
    """``data`` are the texts of several ranks, between bytes that no text has."""
    texts = data.split(b"\xfe")
    try:
        compare(texts)
    except SyncError:
        assert any(text != description() for text in texts), "descriptions that are alike are refused"
        return False
    told = [json.loads(text) for text in texts]
    assert all(isinstance(each, dict) and not each.get("problem") and each == told[0] for each in told)
    return True


def one_guard(data: bytes) -> bool:
    """``data`` are the rows of several ranks."""
    size = _ROW.size
    rows = [_ROW.unpack(data[at : at + size]) for at in range(0, len(data) - size + 1, size)]
    if len(rows) < 2:
        return False
    told = straggler([row[2] for row in rows], rows[0][3])
    assert told is None or ("nan" not in told and "inf" not in told), told
    looked = _look([data[at : at + size] for at in range(0, len(data) - size + 1, size)])
    return told is not None or looked


class _Others:
    """A transport on which the other ranks say the same every time, cut or repeated to what is wanted."""

    rank = 0

    def __init__(self, rows: list[bytes]) -> None:
        self._rows, self.world_size = rows, len(rows) + 1
        self.ranks = range(self.world_size)

    def all_gather(self, out: Tensor, mine: Tensor) -> None:
        out[0] = mine
        for at, row in enumerate(self._rows, 1):
            said = (row * (-(-mine.numel() // len(row))))[: mine.numel()]
            out[at] = torch.frombuffer(bytearray(said), dtype=torch.uint8)


def _look(rows: list[bytes]) -> bool:
    """Whether a guard goes on after it has heard ``rows`` a few times; the one other end is a SyncError."""
    net: Any = _Others(rows)
    logger = logging.getLogger("compressed_ddp")
    before, logger.disabled = logger.disabled, True  # what it has to say of hostile rows, nobody reads
    guard = Guard(1, net, torch.device("cpu"), Ledger("", "", False, False))
    try:
        for step in range(3):
            guard.look(WATCHED, step)
            guard.end_step(step, finite=True)
    except SyncError:
        return False
    finally:
        logger.disabled = before
    return True


WATCHED = {"w": torch.ones(3), "b": torch.zeros(2)}


@functools.cache
def watched_hash() -> int:
    """What a rank with the same parameters says of them."""
    heard: list[bytes] = []
    net: Any = _Others([bytes(_ROW.size)])
    tell = net.all_gather
    net.all_gather = lambda out, mine: (heard.append(bytes(mine.tolist())), tell(out, mine))
    Guard(1, net, torch.device("cpu"), Ledger("", "", False, False)).look(WATCHED, 0)
    return int(_ROW.unpack(heard[0])[1])


def _said(parameters: int, wait: float, owed: float) -> bytes:
    """A rank's row: steps of a second, and whatever it says of its debts is ``owed``."""
    debts = len(_ROW.unpack(bytes(_ROW.size))) - 4
    return _ROW.pack(True, parameters, wait, 1.0, *[owed] * debts)


def seeds() -> dict[Callable[[bytes], bool], list[bytes]]:
    """Good inputs, and a first step away from them."""
    text = description()
    rows = [_said(7, wait, 2.0) for wait in (0.5, 0.0, 0.6)]
    alike = [_said(watched_hash(), wait, norm) for wait, norm in ((0.5, 2.0), (0.0, 9e30))]
    paths = [bytes([0, key, 0, 0, what]) for key in range(11) for what in (0, 13, REMOVE)]
    return {
        one_state: [b"", *paths],
        one_handshake: [text, text + b"\xfe" + text, b"{}\xfe[]", b"[" * 50, b'{"a":' * 30],
        one_guard: [b"".join(rows), b"".join(alike)],
    }
