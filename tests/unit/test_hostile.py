"""Decoders handed what nobody should hand them: wrong buffers, rows, descriptions, states, manifests.

Messages that lie are in test_wire.py; test_fuzz.py and ``make fuzz`` look for what nobody thought of.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compressed_ddp import CompressionConfig, SyncError, WireError, reshard_states
from compressed_ddp.communication import Reducer, run_in_process
from compressed_ddp.communication.guard import Guard, straggler
from compressed_ddp.communication.handshake import compare, handshake
from compressed_ddp.compression.factory import from_config
from compressed_ddp.error_feedback.state import check_local, check_state, saved_ratio
from compressed_ddp.kernels import CodedEntries, reference
from compressed_ddp.layout import BucketLayout, Partition
from compressed_ddp.metrics import Ledger
from compressed_ddp.training import checkpoint
from compressed_ddp.training.checkpoint import CheckpointError
from compressed_ddp.types import Payload, Stamp, Transport
from compressed_ddp.wire import MessageCodec, value_format
from compressed_ddp.wire.values import _FORMATS

try:
    from compressed_ddp.kernels import native
except ImportError:
    native = None  # type: ignore[assignment]

KERNELS = [reference] if native is None else [reference, native]
CPU = torch.device("cpu")

# --- messages ------------------------------------------------------------------------------


def test_a_message_is_a_row_of_bytes() -> None:
    """Anything else of the right length would be read as other bytes, or fail far from here."""
    codec = MessageCodec.named("elias_fano", "fp32")
    good = codec.encode(Payload(torch.ones(3), torch.arange(3), torch.Size([40]))).message
    for wrong in (
        good.to(torch.int32),
        good.view(torch.int8),
        good.view(1, -1),
        good.repeat_interleave(2)[::2],
    ):
        with pytest.raises(TypeError, match="contiguous row of uint8"):
            codec.decode(wrong, numel=40, k=3)


def test_not_finite_and_yet_with_entries() -> None:
    """Nobody writes that; whoever read on would find entries where there are none."""
    codec = MessageCodec.named("elias_fano", "fp32")
    message = codec.encode(Payload(torch.ones(3), torch.arange(3), torch.Size([40]))).message
    message[5] |= 1
    message[28:32] = 0
    message[28:32] = torch.tensor(list(reference.checksum(message).to_bytes(4, "little")), dtype=torch.uint8)
    with pytest.raises(WireError, match="not finite, and yet it has 3 entries"):
        codec.decode(message, numel=40, k=3)


@pytest.mark.parametrize("values", sorted(_FORMATS))
def test_value_parts_of_a_wrong_size(values: str) -> None:
    form = value_format(values)
    for count in (1, 70, 600):
        size = form.nbytes(count)
        for wrong in (0, size - 1, size + 1, size + 4):
            with pytest.raises(WireError, match=f"value part has {wrong} bytes, not {size}"):
                form.decode(torch.zeros(wrong, dtype=torch.uint8), count)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__.rpartition(".")[2])
def test_more_entries_than_there_is_room_for(kernel: Any) -> None:
    """As many ones in the bitmap as the count says, and yet no room for their low bits."""
    full = torch.full((reference.ef_nbytes(100, 3),), 0xFF, dtype=torch.uint8)
    for data, room, count in ((full, 3, 8), (full[:0], 0, 5), (full, 3, -1)):
        with pytest.raises(WireError, match=f"{count} entries, where there is room for {room}"):
            kernel.ef_decode(data, 100, room, count)
        out, values = torch.full((100,), 7.0), torch.zeros(4 * max(count, 0), dtype=torch.uint8)
        with pytest.raises(WireError, match="room for"):
            kernel.sum_coded_(
                out, Partition.whole(100, room), [CodedEntries(0, data, values, 100, room, count)], 0, 1.0
            )
        assert bool((out == 7).all())


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__.rpartition(".")[2])
def test_messages_about_another_shard(kernel: Any) -> None:
    """A good message that is summed into a bucket it does not belong to, or a shard that is not there."""
    part = Partition(200, 3, ((), (), ()))
    good = reference.ef_encode(torch.tensor([3, 63]), 64, 2)
    for shard, numel in ((0, 64), (2, 63), (3, 64), (-1, 64)):
        out = torch.full((200,), 7.0)
        with pytest.raises(ValueError, match=f"about {numel} elements; shard {shard} has"):
            kernel.sum_coded_(
                out,
                part,
                [CodedEntries(shard, good, torch.zeros(8, dtype=torch.uint8), numel, 2, 2)],
                0,
                1.0,
            )
        assert bool((out == 7).all())


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__.rpartition(".")[2])
@pytest.mark.parametrize("size", [8, 7])
def test_which_of_several_messages_it_is(kernel: Any, size: int) -> None:
    """One says two entries and holds three, or is too short: the second of three."""
    coded, values = reference.ef_encode(torch.tensor([3, 30, 63]), 64, 3), torch.zeros(12, dtype=torch.uint8)
    good = CodedEntries(0, coded, values, 64, 3, 3)
    bad = CodedEntries(0, coded, values[:size], 64, 3, 2)
    with pytest.raises(WireError) as caught:
        kernel.sum_coded_(torch.zeros(64), Partition.whole(64, 3), [good, bad, good], 0, 1.0)
    assert caught.value.which == 1


@pytest.mark.parametrize("indices", ["elias_fano", "all"])
def test_who_sent_it(indices: str) -> None:
    """An error of the message's own names its sender, wherever it is found: opened, read or added up."""
    codec = MessageCodec.named(indices, "fp32")
    payload = Payload(torch.ones(40), torch.arange(40), torch.Size([40]))
    opened = []
    for sender in (0, 3, 5):
        stamp = Stamp(sender=sender)
        message = codec.encode(payload, stamp=stamp).message
        opened.append(codec.open(message, numel=40, k=40, stamp=stamp))
        message[50] ^= 1
        with pytest.raises(WireError, match="damaged") as caught:
            codec.open(message, numel=40, k=40, stamp=stamp)
        assert caught.value.sender == sender
    opened[1] = opened[1]._replace(entries=39, values=opened[1].values[: 39 * 4])  # its checksum would fit
    with pytest.raises(WireError) as caught:
        codec.sum_(torch.zeros(40), Partition.whole(40, 40), [(0, each) for each in opened], 1.0)
    assert caught.value.sender == 3
    with pytest.raises(WireError) as caught:
        codec.read(opened[1])
    assert caught.value.sender == 3


# --- what ranks tell each other ------------------------------------------------------------

DESCRIPTIONS = [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 500 + b"1" + b"}" * 500]


@pytest.mark.parametrize("text", DESCRIPTIONS, ids=lambda text: repr(text[:10]))
def test_descriptions_that_are_none(text: bytes) -> None:
    """Not a JSONDecodeError or a RecursionError from somewhere, but who it was."""
    with pytest.raises(SyncError, match="rank 1's description of its model"):
        compare([b'{"a": 1}', text])
    with pytest.raises(SyncError, match="rank 0's description"):
        compare([text, text])


def test_everyone_is_told_of_a_foreign_description() -> None:
    """Rank 1 speaks another language; the others raise, and nobody waits."""

    def work(net: Transport) -> str:
        if net.rank == 1:
            sizes, text = torch.empty((3, 8), dtype=torch.uint8), b"GET / HTTP/1.1\r\n"
            net.all_gather(sizes, torch.tensor([len(text), *[0] * 7], dtype=torch.uint8))
            width = -(-int(sizes[:, 0].max()) // 8) * 8
            rows = torch.empty((3, width), dtype=torch.uint8)
            net.all_gather(rows, torch.tensor(list(text.ljust(width)), dtype=torch.uint8))
            return ""
        with pytest.raises(SyncError) as caught:
            handshake(net, {"config": 1}, CPU)
        return str(caught.value)

    told = run_in_process(3, work)
    assert told[0] == told[2] and "rank 1's description of its model cannot be read" in told[0]


def test_a_rank_whose_hashes_contradict_each_other() -> None:
    """All parameters together differ and each of them does not: no silent pass."""

    def work(net: Transport) -> str:
        guard = Guard(1, net, CPU, Ledger("", "", False, False))
        if net.rank == 1:
            send = guard._everyones
            guard._everyones = lambda row: send(
                row if len(row) == 8 else bytes([row[0], row[1] ^ 1]) + row[2:]
            )  # type: ignore[method-assign]
        with pytest.raises(SyncError) as caught:
            guard.look({"w": torch.ones(3)}, 0)
        return str(caught.value)

    told = run_in_process(2, work)
    assert told[0] == told[1] and "those of each do not" in told[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_waits_that_are_no_numbers_name_nobody(bad: float) -> None:
    assert straggler([0.5, 0.0, 0.5], 1.0) is not None
    for waits, step in (([0.5, bad, bad], 1.0), ([bad, 0.0, 0.5], 1.0), ([0.5, 0.0, 0.5], bad)):
        told = straggler(waits, step)
        assert told is None or ("nan" not in told and "inf" not in told)


# --- states --------------------------------------------------------------------------------

LAYOUT = BucketLayout(("w", "b"), (torch.Size([20, 7]), torch.Size([90])))
SHAPES = dict(zip(LAYOUT.names, LAYOUT.shapes, strict=True))
DTYPES = dict.fromkeys(LAYOUT.names, torch.float32)


def states() -> list[dict[str, Any]]:
    config = CompressionConfig(ratio=0.1, collective="sharded")

    def work(net: Transport) -> dict[str, Any]:
        reducer = Reducer(from_config(config), config, net)
        reducer.reduce_(LAYOUT, torch.arange(float(LAYOUT.numel)), last=True)
        return reducer.state_dict()

    return run_in_process(2, work)


def put(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = to

    return change


CHANGES = {
    "step is a tensor": put("step", to=torch.tensor(3)),
    "taken is text": put("taken", to="3"),
    "format is a tensor": put("format", to=torch.zeros(4)),
    "world size is a billion numbers": put("world_size", to=torch.zeros(1).expand(10**9)),
    "residual of another shape": put("residuals", "w", to=torch.zeros(7, 20)),
    "a billion entries": put("residuals", "w", to=torch.zeros(1).expand(10**9)),
    "one number many times": put("residuals", "w", to=torch.zeros(1).expand(20, 7)),
    "sparse residual": put("residuals", "w", to=torch.zeros(20, 7).to_sparse()),
    "meta residual": put("residuals", "w", to=torch.zeros(20, 7, device="meta")),
    "something kept as 'residual'": put("kept", "residual", to={"w": torch.full((20, 7), math.nan)}),
    "bucket without parameters": put("buckets", 0, "names", to=[]),
    "bucket with a parameter twice": lambda state: state["buckets"].append(state["buckets"][0]),
    "shapes to be read one by one": put("buckets", 0, "shapes", to=torch.zeros(1).expand(10**9)),
    "buckets to be read one by one": put("buckets", to=torch.zeros(1).expand(10**9)),
    "a bucket's state to be read one by one": put("buckets", 0, "state", to=torch.zeros(1).expand(10**9)),
    "a way that is no name": put("buckets", 0, "way", to=["sharded"]),
    "owner of another size": put("buckets", 0, "state", "owner", to=torch.zeros(3)),
    "a billion owed": put("buckets", 0, "state", "owner", to=torch.zeros(1).expand(10**9)),
}


@pytest.mark.parametrize("what", CHANGES, ids=lambda what: what.replace(" ", "-"))
def test_states_that_no_run_saved(what: str) -> None:
    """One ValueError, and soon: a state that hangs a rank leaves the others waiting."""
    good = states()
    check_state(good[0], 0, 2, SHAPES)
    CHANGES[what](good[0])
    with pytest.raises(ValueError):
        check_state(good[0], 0, 2, SHAPES)


@pytest.mark.parametrize(
    "what", ["format is a tensor", "a billion entries", "a billion owed", "meta residual"]
)
def test_damaged_states_are_not_resharded(what: str) -> None:
    good = states()
    assert len(reshard_states(good, 3)) == 3
    CHANGES[what](good[0])
    if what == "format is a tensor":
        good[0]["rank"] = torch.zeros(4)
    with pytest.raises(ValueError):
        reshard_states(good, 3)


@pytest.mark.parametrize("missed", [torch.zeros(1).expand(10**9), {"w": torch.tensor(1)}, {"w": -1}, None])
def test_missed_steps_that_nobody_counted(missed: Any) -> None:
    good = states()
    good[1]["missed"] = missed
    with pytest.raises(ValueError, match="damaged state"):
        reshard_states(good, 3)


@pytest.mark.parametrize("what", ["ratio", "config"])
def test_ratios_that_no_run_had(what: str) -> None:
    state = {"ratio": 0.1, "config": {"ratio": 0.1}}
    assert saved_ratio(state, 0.1) == 0.1 and saved_ratio(state, 0.2) is None
    for wrong in (torch.zeros(1).expand(10**9), math.nan, "0.1", -1):
        with pytest.raises(ValueError):
            saved_ratio({**state, what: wrong if what == "ratio" else {"ratio": wrong}}, 0.1)


@pytest.mark.parametrize("what", ["since", "anchor", "momentum"])
def test_local_states_that_no_run_saved(what: str) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    local = {"since": 0, "anchor": tensors, "momentum": tensors, "weights": {}}
    assert check_local({"local": local}, SHAPES, DTYPES) == local
    with pytest.raises(ValueError, match="damaged state"):
        check_local({"local": {**local, what: torch.zeros(1).expand(10**9)}}, SHAPES, DTYPES)


def test_a_bad_state_on_one_rank_is_told_to_all() -> None:
    """What cannot be told as JSON must not raise between two messages: the others would wait for ever."""
    good = states()
    good[1]["step"] = torch.tensor(1)

    def work(net: Transport) -> str:
        config = CompressionConfig(ratio=0.1, collective="sharded")
        reducer = Reducer(from_config(config), config, net)
        with pytest.raises(ValueError if net.rank == 1 else SyncError) as caught:
            reducer.load_state_dict(good[net.rank], SHAPES)
        return str(caught.value)

    told = run_in_process(2, work)
    assert "step is" in told[1] and "rank 1 cannot take part" in told[0]
    assert threading.active_count() < 10


# --- checkpoints ---------------------------------------------------------------------------


def write(folder: Path, data: bytes, **manifest: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / checkpoint.SHARED).write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    files = {checkpoint.SHARED: entry, checkpoint.rank_file(0): entry}
    told = {"format": checkpoint.FORMAT, "step": 1, "world_size": 1, "files": files} | manifest
    (folder / checkpoint.MANIFEST).write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize("world", [10**12, math.inf, -1, "1", None])
def test_manifests_of_a_trillion_workers(tmp_path: Path, world: Any) -> None:
    """Refused at the first file that is missing, not after a list of all of them was made."""
    folder = write(tmp_path / "step-00000001", b"x", world_size=world)
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read"):
        checkpoint.read(folder, checkpoint.SHARED)


@pytest.mark.parametrize(
    "entry", [{"bytes": 1}, {"bytes": "1", "sha256": "00"}, {"bytes": 1, "sha256": 3}, 7]
)
def test_manifests_with_half_an_entry(tmp_path: Path, entry: Any) -> None:
    files = {checkpoint.SHARED: entry, checkpoint.rank_file(0): entry}
    folder = write(tmp_path / "step-00000001", b"x", files=files)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.read(folder, checkpoint.SHARED)


def test_a_deep_manifest(tmp_path: Path) -> None:
    folder = write(tmp_path / "step-00000001", b"x")
    (folder / checkpoint.MANIFEST).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="RecursionError"):
        checkpoint.read(folder, checkpoint.SHARED)


@pytest.mark.parametrize(
    "data", [b"", b"PK\x03\x04", b"\x80\x02.", b"\x80\x02]q\x00(K\x01e.", b"garbage" * 99]
)
def test_files_that_only_look_whole(tmp_path: Path, data: bytes) -> None:
    """A right hash over bytes that torch cannot read: no EOFError or KeyError reaches the user."""
    with pytest.raises(CheckpointError, match=r"is damaged: [^;]"):
        checkpoint.read(write(tmp_path / "step-00000001", data), checkpoint.SHARED)
