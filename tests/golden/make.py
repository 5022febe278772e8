"""Rewrite the golden messages: ``.venv/bin/python tests/golden/make.py`` (from anywhere).

Run it only when the wire format changes on purpose, and raise WIRE_VERSION with it: workers of
two releases that differ here cannot talk to each other. It prints the files that changed.

Each file is one message as JSON: the inputs (float32 as eight hex digits of their bits), what
they decode to, and the bytes. Inputs come from the integer formulas below; no random generator
is asked. The formats that round at random get values that lie exactly on a level, so that every
draw gives the same bytes (``build`` checks it).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressed_ddp.types import Payload, Stamp
from compressed_ddp.wire import Decoded, MessageCodec
from compressed_ddp.wire.indices import seeded_indices

HERE = Path(__file__).parent
STAMP = {"seed": 7, "step": 3, "bucket": 2, "shard": 0, "sender": 1, "phase": 0}


@dataclass
class Golden:
    """One message with everything that goes into it and comes out of it."""

    about: str
    indices: str
    values: str
    numel: int
    room: int
    stamp: dict[str, int]
    input_indices: list[int]
    input_values: list[str]
    input_dense: list[str]
    finite: bool = True
    decoded_values: list[str] = field(default_factory=list)
    decoded_dense: list[str] = field(default_factory=list)
    message: list[str] = field(default_factory=list)

    @property
    def data(self) -> bytes:
        return bytes.fromhex("".join(self.message))

    def encode(self, **other_stamp: int) -> Tensor:
        """The message that the library makes of the inputs."""
        codec, stamp = self._codec(), Stamp(**self.stamp | other_stamp)
        dense = floats(self.input_dense)
        if not self.finite:
            message = torch.zeros(codec.nbytes(self.numel, self.room, dense.numel()), dtype=torch.uint8)
            codec.encode_not_finite(message, self.numel, dense.numel(), stamp)
            return message
        indices = torch.tensor(self.input_indices, dtype=torch.int64)
        payload = Payload(floats(self.input_values), indices, torch.Size([self.numel]))
        return codec.encode(payload, k=self.room, dense=dense, stamp=stamp).message

    def decode(self, message: Tensor) -> Decoded:
        """What the library makes of ``message``."""
        expected = {"numel": self.numel, "k": self.room, "dense": len(self.input_dense)}
        return self._codec().decode(message, stamp=Stamp(**self.stamp), **expected)

    def _codec(self) -> MessageCodec:
        return MessageCodec.named(self.indices, self.values)

    def text(self) -> str:
        lines = [f"  {json.dumps(name)}: {_compact(value)}" for name, value in asdict(self).items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: object) -> str:
    """JSON on one line; lists of many in rows of eight, bytes in rows of 32."""
    if not isinstance(value, list) or len(value) <= 1:
        return json.dumps(value)
    row = 1 if isinstance(value[0], str) and len(value[0]) > 8 else 8
    rows = [", ".join(map(json.dumps, value[at : at + row])) for at in range(0, len(value), row)]
    return "[\n    " + ",\n    ".join(rows) + "\n  ]"


def floats(words: list[str]) -> Tensor:
    """float32 values from the hex of their bits."""
    bits = [int(word, 16) for word in words]
    return torch.tensor([b - (b >> 31 << 32) for b in bits], dtype=torch.int32).view(torch.float32)


def words(values: Tensor) -> list[str]:
    """The inverse of ``floats``."""
    return [f"{bits & 0xFFFFFFFF:08x}" for bits in values.view(torch.int32).tolist()]


def load(path: Path) -> Golden:
    return Golden(**json.loads(path.read_text()))


# --- inputs: formulas of integers ----------------------------------------------------------


def spread(count: int, salt: int = 1) -> list[str]:
    """Values of both signs with exponents from 2^-8 to 2^7 and all mantissa bits in use."""
    bits = []
    for i in range(count):
        mixed = (i + salt) * 0x9E3779B1 & 0xFFFFFFFF
        exponent = 127 - 8 + (mixed >> 8) % 16
        bits.append((mixed >> 31 << 31) | exponent << 23 | (mixed * 2654435 & 0x7FFFFF))
    return [f"{b:08x}" for b in bits]


def scattered(numel: int, count: int) -> list[int]:
    """``count`` increasing indices with uneven gaps, from the first element to the last."""
    if count < 2:
        return [numel - 1] * count
    return [(numel - count) * i * i // (count - 1) ** 2 + i for i in range(count)]


def integers(count: int) -> list[str]:
    """Signed integers over 16: alternating signs, so every block has as many of each."""
    return words(torch.tensor([(1 + i * 7 % 32) * (-1) ** i / 16 for i in range(count)]))


LEVELS = {
    "ternary": [1, -1, -1],
    "qsgd1": [-1],
    "qsgd3": [2, -2, 1],
    "qsgd7": [6, -3, 2],
    "qsgd15": [-14, 5, 2],
    "qsgd31": [30, -6, 5],
    "qsgd63": [-62, 10, -5],
    "qsgd127": [126, -15, 5, 1, -1, 1],
}
"""Squares that sum to the square of the number of levels, so the norm is that number."""


def on_levels(name: str, count: int) -> list[str]:
    """Every value exactly on a level; beyond 512, two blocks with scales of their own."""
    values = [0.0] * count
    for i, level in enumerate(LEVELS[name]):
        if count > 512:
            values[3 + 70 * i] = level / 64
        values[(count - 7) // 512 * 512 + i] = level * 2.0
    return words(torch.tensor(values))


def edges() -> list[str]:
    """Four blocks: denormals and zeros of both signs, the largest floats, all equal, zeros."""
    tiny = [0, 1 << 31, 1, 1 << 31 | 0x7FFFFF, 0x800000, 0x10000, 1 << 31 | 0xFFFF, 0xC0FFEE] * 8
    huge = [0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F0000, 0xFF7F0001, 0x7F000000, 0, 0x7C123456, 0x3F800000] * 8
    equal = [0xC0490FDB] * 64
    return [f"{bits:08x}" for bits in [*tiny, *huge, *equal, *[0, 1 << 31, 0]]]


# --- cases ---------------------------------------------------------------------------------


def sparse(about: str, values: str, numel: int, count: int, **more: Any) -> Golden:
    """``count`` entries by Elias-Fano; ``more`` replaces any other field."""
    fields: dict[str, Any] = {
        "indices": "elias_fano",
        "room": count,
        "stamp": STAMP,
        "input_indices": scattered(numel, count),
        "input_values": spread(count),
        "input_dense": [],
    }
    return Golden(about=about, values=values, numel=numel, **fields | more)


def seeded(about: str, values: str, numel: int, count: int) -> Golden:
    drawn = seeded_indices(numel, count, Stamp(**STAMP), torch.device("cpu"))
    return sparse(about, values, numel, count, indices="seeded", input_indices=drawn.tolist())


def full(about: str, values: str, inputs: list[str]) -> Golden:
    n = len(inputs)
    return sparse(about, values, n, n, indices="all", input_indices=list(range(n)), input_values=inputs)


def cases() -> dict[str, Golden]:
    """All messages by file name."""
    made = {}
    for name in ("fp32", "fp16", "bf16", "int8", "int4"):
        made[f"elias_fano_{name}"] = sparse("the plain case", name, 1000, 30)
    for name in ("int8", "int4"):
        made[f"elias_fano_{name}_blocks"] = sparse("two blocks and a short one", name, 5000, 131)
        about = "denormals, the largest floats, all equal, zeros; an odd number of codes"
        made[f"elias_fano_{name}_edges"] = sparse(about, name, 900, 195, input_values=edges())
    about = "beyond 65504: saturates; too small: zero with its sign"
    beyond = ["47800000", "c7ffffff", "477fe000", "7f7fffff", "30000000", "b0000000"]
    made["elias_fano_fp16_saturated"] = sparse(about, "fp16", 64, 6, input_values=beyond)
    about = "beyond bfloat16's largest: saturates; ties go to even"
    beyond = ["7f7fffff", "ff7fffff", "3f808000", "3f818000", "00000001"]
    made["elias_fano_bf16_saturated"] = sparse(about, "bf16", 64, 5, input_values=beyond)
    made["elias_fano_crowded"] = sparse("more than half of all elements: no low bits", "fp32", 50, 40)
    made["elias_fano_every"] = sparse("every element by index", "int8", 64, 64)
    made["elias_fano_far"] = sparse("the largest bucket: indices up to 2^31 - 2", "fp32", 2**31 - 1, 5)
    made["empty"] = sparse("a shard without elements", "int8", 0, 0)
    limits = {"step": 2**32 - 1, "bucket": 2**16 - 1, "shard": 3, "sender": 2**16 - 1, "phase": 1}
    about = "an owner's result; step, bucket and sender at their limits"
    made["from_owner_int4"] = sparse(about, "int4", 640, 12, stamp=STAMP | limits)

    few, many = spread(3, salt=5), spread(70, salt=5)
    made["small_values_fp32"] = sparse("small values after the entries", "fp32", 700, 9, input_dense=few)
    made["small_values_int8"] = sparse("small values: blocks start anew", "int8", 700, 9, input_dense=many)
    made["small_values_only"] = sparse("no entries, only small values", "int8", 12, 0, input_dense=few)

    about = "70 entries in the room of 140, then small values"
    made["part_full_int8"] = sparse(about, "int8", 4000, 70, room=140, input_dense=few)
    made["part_full_fp32"] = sparse("3 entries in the room of 8", "fp32", 100, 3, room=8)
    made["part_full_none"] = sparse("no entry in the room of 8", "int8", 100, 0, room=8)

    zeros: dict[str, Any] = {"finite": False, "input_dense": ["00000000"] * 4}
    made["not_finite_int8"] = sparse("the sender's gradient was not finite", "int8", 700, 0, room=9, **zeros)
    zeros = {"finite": False, "indices": "all"}
    made["not_finite_sign"] = sparse("the same, of every element", "sign", 20, 0, room=20, **zeros)

    made["seeded_fp32"] = seeded("indices drawn from the seed", "fp32", 500, 20)
    made["seeded_int8"] = seeded("indices drawn from the seed", "int8", 2000, 67)

    for name in ("fp32", "fp16", "bf16"):
        made[f"all_{name}"] = full("every element", name, spread(21))
    for name in ("sign", "onebit"):
        made[f"all_{name}"] = full("every element; a block of 512 and one of 64", name, integers(576))
    about = "no negative value: the second mean is 0"
    made["all_onebit_positive"] = full(about, "onebit", ["3f800000"] * 8)
    for name in LEVELS:
        two = name in ("ternary", "qsgd127")
        about = "every element; a block of 512 and one of 13" if two else "every element; a short block"
        made[f"all_{name}"] = full(about, name, on_levels(name, 525 if two else 13))
    return made


def build(case: Golden) -> Golden:
    """Fill in ``case``'s message and what it decodes to; return it."""
    message = case.encode()
    for seed in range(3):
        assert torch.equal(case.encode(seed=seed), message), "a golden message must not be random"
    decoded = case.decode(message)
    case.decoded_values, case.decoded_dense = words(decoded.payload.values), words(decoded.dense)
    data = bytes(message.tolist())
    case.message = [data[at : at + 32].hex() for at in range(0, len(data), 32)]
    return case


def main() -> None:
    wanted = {HERE / f"{name}.json": build(case).text() for name, case in cases().items()}
    for path in sorted(HERE.glob("*.json")):
        if path not in wanted:
            path.unlink()
            print(f"removed {path.name}")
    for path, text in wanted.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
