"""Before the first step, all workers compare what they are about to do."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from ..types import CompressionConfig, SyncError, Transport
from ..version import WIRE_VERSION, __version__

T = TypeVar("T")
_LIMIT = 16 * 2**20
"""Bytes of a description: 50,000 parameters with names of 100 letters fit. A peer may claim as much."""
_DEPTH = 16
"""Dictionaries and lists inside of each other; a description of ours has four."""


def fingerprint(config: CompressionConfig, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Everything in which two workers must agree for their messages to mean the same."""
    return {
        "library": __version__,
        "wire": WIRE_VERSION,
        "torch": torch.__version__.split("+")[0],
        "config": config.as_dict(),
        "parameters": {
            name: f"{p.dtype} {list(p.shape)}" + ("" if p.requires_grad else " frozen")
            for name, p in parameters.items()
        },
        "order": list(parameters),
    }


def agree(transport: Transport, device: torch.device, prepare: Callable[[], tuple[T, dict[str, Any]]]) -> T:
    """Run ``prepare`` and compare what it tells (its second result) over all ranks; return the first.

    If it raises on some rank, that rank raises its error and all others a SyncError that quotes
    it: nobody is left waiting.
    """
    result: T | None = None
    told: dict[str, Any] = {}
    problem: Exception | None = None
    try:
        result, told = prepare()
        json.dumps(told)  # what cannot be told is this rank's own error too
    except Exception as error:
        problem, told = error, {}
    try:
        handshake(transport, {"problem": problem and str(problem), **told}, device)
    except SyncError:
        if problem is None:
            raise
    if problem is not None:
        raise problem
    return cast(T, result)


def handshake(transport: Transport, mine: Mapping[str, Any], device: torch.device) -> None:
    """Raises the same SyncError on every rank if any two differ, naming rank and field.

    Text travels as JSON: nothing that comes from another worker is ever unpickled.
    """
    text = json.dumps(mine).encode()
    sizes = torch.empty((transport.world_size, 8), dtype=torch.uint8, device=device)
    transport.all_gather(sizes, _row(len(text).to_bytes(8, "little"), device))
    lengths = [int.from_bytes(bytes(size.tolist()), "little") for size in sizes.cpu()]
    if max(lengths) > _LIMIT:
        raise SyncError(f"a worker's description of its model has {max(lengths):,} bytes; is it one of ours?")
    width = -(-max(lengths) // 8) * 8
    texts = torch.empty((transport.world_size, width), dtype=torch.uint8, device=device)
    transport.all_gather(texts, _row(text.ljust(width, b" "), device))
    here = texts.cpu()  # a list of numbers would take eight times the bytes; numpy need not be there
    compare(
        [ctypes.string_at(row.data_ptr(), n) for row, n in zip(here, lengths, strict=True)], transport.ranks
    )


def compare(texts: Sequence[bytes], ranks: Sequence[int] | None = None) -> None:
    """Raises SyncError, naming rank and field, unless all ranks' descriptions are one and the same.

    ``ranks`` is what the job calls them, if they are a part of it.
    """
    ranks = range(len(texts)) if ranks is None else ranks
    everyone = [_read(rank, text) for rank, text in zip(ranks, texts, strict=True)]
    for rank, theirs in zip(ranks, everyone, strict=True):
        if theirs.get("problem"):
            raise SyncError(f"rank {rank} cannot take part: {theirs['problem']}")
    for rank, theirs in zip(ranks, everyone, strict=True):
        for field, first, other in _differences(everyone[0], theirs):
            raise SyncError(
                f"rank {rank} differs from rank {ranks[0]} in {field}: {other!r}, not {first!r}. All workers "
                "need the same model, the same configuration and the same release"
            )


def _read(rank: int, text: bytes) -> dict[str, Any]:
    """A rank's description. It came over the network: anything but ours is a SyncError."""
    try:
        found = json.loads(text)
        if isinstance(found, dict) and _shallow(found):
            return found
        what = "is nested too deeply" if isinstance(found, dict) else f"is a {type(found).__name__}"
    except (ValueError, RecursionError) as error:
        what = f"cannot be read ({type(error).__name__})"
    raise SyncError(f"rank {rank}'s description of its model {what}; is it one of ours?")


def _shallow(value: dict[str, Any]) -> bool:
    """Whether what follows can walk through ``value``: it calls itself for every level."""
    level: list[Any] = [value]
    for _ in range(_DEPTH):
        dicts = [inner for each in level if isinstance(each, dict) for inner in each.values()]
        level = dicts + [inner for each in level if isinstance(each, list) for inner in each]
    return not any(isinstance(each, (dict, list)) for each in level)


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of names, shapes and bits, for what is too large to be compared itself."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        # Not by numpy: torch comes without it.
        found.update(
            (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
        )
    return found.hexdigest()


def _row(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _differences(first: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every leaf at which two JSON values differ, with its path."""
    if isinstance(first, dict) and isinstance(other, dict):
        for key in [*first, *(key for key in other if key not in first)]:
            where = f"{path}.{key}" if path else key
            yield from _differences(first.get(key, "nothing"), other.get(key, "nothing"), where)
    elif first != other:
        yield path, first, other
