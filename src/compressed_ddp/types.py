"""The nouns everything else is written in: payload, stamp, configuration, protocols, errors."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .layout import BucketLayout

MAX_NUMEL = 2**31 - 1
"""Largest bucket or tensor: element counts and indices travel as unsigned 32-bit words."""


MEMORIES = ("ef", "ef21", "ef21-sgdm")
"""How error feedback may remember."""


Held = Sequence[tuple[int, int]]
"""Ranges (start, stop) of a flat bucket."""


class WireError(ValueError):
    """Bytes that are not a message we could have sent: truncated, damaged, foreign or out of turn."""

    sender: int | None = None
    """The rank that sent them, where that is known."""
    which: int | None = None
    """Of several messages, which one it is (from 0)."""


class SyncError(RuntimeError):
    """A peer or a collective failed, or the workers disagree about what they are training."""

    def __init__(
        self, message: str, *, phase: str = "", bucket: int | None = None, ranks: tuple[int, ...] = ()
    ) -> None:
        """``phase`` is what failed on this rank (all-to-all, all-gather, decode ...), in which ``bucket`` of
        the step; ``ranks`` are those at fault, as the job numbers them and as far as that can be known."""
        super().__init__(message)
        self.phase, self.bucket, self.ranks = phase, bucket, ranks


class Payload(NamedTuple):
    """A compressed tensor. Unpacks as ``values, indices, shape``."""

    values: Tensor
    """float32, one per index."""
    indices: Tensor
    """int64 positions in the flattened tensor, strictly increasing."""
    shape: torch.Size


def seed_of(*parts: int) -> int:
    """A seed for what ``parts`` name, far from the seed of anything else; it fits a signed 64-bit number."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Stamp(NamedTuple):
    """Where and when a message was made: checked on arrival, and the root of all randomness.

    Random draws depend on nothing but the stamp, so a resumed run draws what the
    uninterrupted run would have drawn.
    """

    seed: int = 0
    step: int = 0
    bucket: int = 0
    shard: int = 0
    sender: int = 0
    phase: int = 0
    """0: from a worker; 1: from the owner of a shard, with the reduced result."""

    def shared_seed(self) -> int:
        """A seed that every worker derives alike (Random-K's index set)."""
        return seed_of(self.seed, self.step, self.bucket, self.shard)

    def private_seed(self) -> int:
        """A seed of this message's own (stochastic rounding)."""
        return seed_of(*self)


NO_STAMP = Stamp()


def unknown_name(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for a name that no registry holds, with the nearest one that it does hold."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ValueError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}")


@dataclass(frozen=True)
class CompressionConfig:
    """Everything that must be equal on all workers; compared over all of them at start-up.

    Names (``compressor``, ``values``, ``collective``) are resolved by their registries when the
    synchroniser is built; everything else is checked here.
    """

    compressor: str = "topk"
    """What is sent: topk, threshold, randomk, powersgd, sign, onebit, terngrad, qsgd, fp16, bf16 or dense."""
    ratio: float = 0.01
    """Share of the entries that a sparse compressor sends, in (0, 1]."""
    values: str = "int8"
    """How a sparse compressor's values travel: fp32, fp16, bf16, int8 or int4."""
    collective: str = "auto"
    """allgather, sharded, or auto (by bytes, bucket by bucket)."""
    scope: str = "bucket"
    """Where the k largest are sought: in the whole bucket, or in each tensor by itself."""
    min_compress_numel: int = 256
    """Tensors with fewer elements travel whole inside the same message."""
    error_feedback: bool | None = None
    """None: what the compressor is made for (on for biased ones, off for unbiased ones)."""
    memory: str = "ef"
    """What error feedback remembers: ef (what was not sent yet), ef21 (what the others believe this worker's
    gradient is), or ef21-sgdm (the same of an average of its gradients)."""
    eta: float = 0.1
    """``ef21-sgdm``: how much the newest gradient counts in that average, in (0, 1]."""
    owner_factor: float = 1.0
    """Sharded: owners pass on this many times the entries that one worker sent them."""
    seed: int = 0
    threshold: float | None = None
    """``threshold`` compressor: a fixed magnitude; None estimates the k-th from a sample."""
    levels: int = 127
    """``qsgd``: quantisation levels, one less than a power of two."""
    unbiased: bool = False
    """``randomk``: scale by n/k, so that the expectation is the gradient itself."""
    rank: int = 2
    """``powersgd``: the rank of the approximation."""
    sync_timeout: float = 60.0
    """Seconds after which a silent peer is an error. Raise it if one rank works alone for longer."""
    hold_unused: bool = False
    """Keep back what is owed for parameters that got no gradient in this step. ``attach`` turns it
    on for ``find_unused_parameters=True``, where DDP throws the results of such parameters away."""
    guard_every: int = 100
    """Steps after which ranks compare a hash of all parameters, their waiting and what they owe (25 bytes),
    and measure how old that is; 0: never."""
    adapt_every: int = 0
    """Steps after which entries are distributed over parameters anew, by what they are about to send
    (see docs/methods.md); 0: every parameter, or bucket, sends the same share."""
    exact: bool = True
    """``topk``: exactly the k largest. False: about the largest, at most k; hardly faster, for small
    tensors, and for large ones at ratio 0.1, slower."""

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            _check_kind(field.name, value, str(field.type))
            object.__setattr__(self, field.name, _plain(value))
        if self.scope not in ("bucket", "tensor"):
            raise unknown_name("scope", self.scope, ("bucket", "tensor"))
        if self.memory not in MEMORIES:
            raise unknown_name("memory", self.memory, MEMORIES)
        if not 0.0 < self.eta <= 1.0:
            raise ValueError(f"eta must be in (0, 1], got {self.eta}; 1 takes no average")
        if self.min_compress_numel < 0:
            raise ValueError(
                f"min_compress_numel must be 0 or more, got {self.min_compress_numel!r}; "
                "0 compresses every tensor"
            )
        if not self.owner_factor >= 1.0:
            raise ValueError(
                f"owner_factor must be at least 1, got {self.owner_factor}; owners cannot pass on "
                "less than one worker's share"
            )
        if not self.sync_timeout > 0:
            raise ValueError(f"sync_timeout must be positive seconds, got {self.sync_timeout}")
        if self.threshold is not None and not self.threshold > 0:
            raise ValueError(
                f"threshold must be a positive magnitude, got {self.threshold}; "
                "leave it out to estimate it from a sample"
            )
        for name in ("adapt_every", "guard_every"):
            every = getattr(self, name)
            if every < 0:
                raise ValueError(f"{name} must be a number of steps, or 0 for never, got {every!r}")
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values only: what the handshake compares and a checkpoint keeps."""
        return dataclasses.asdict(self)


def _check_kind(name: str, value: object, kind: str) -> None:
    """Raises ValueError unless ``value`` is of ``kind``, as a field is annotated; numbers must be finite."""
    wanted, _, optional = kind.partition(" | ")
    if optional and value is None:
        return
    flag = isinstance(value, bool)
    fits = {
        "str": isinstance(value, str),
        "bool": flag,
        "int": isinstance(value, Integral) and not flag,
        "float": isinstance(value, Real) and not flag and math.isfinite(value),
    }
    if not fits[wanted]:
        words = {
            "str": "a name",
            "bool": "True or False",
            "int": "a whole number",
            "float": "a finite number",
        }
        raise ValueError(f"{name} must be {words[wanted]}{' or None' if optional else ''}, got {value!r}")


def _plain(value: Any) -> Any:
    """``value`` as Python's own type: numpy's cannot be told to other workers, nor kept in a checkpoint."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str(value)
    return int(value) if isinstance(value, Integral) else float(value)


def check_ratio(ratio: object) -> None:
    """Raises ValueError unless ``ratio`` is a number in (0, 1]."""
    if not isinstance(ratio, Real) or isinstance(ratio, bool) or not 0.0 < float(ratio) <= 1.0:
        raise ValueError(
            f"ratio must be in (0, 1], got {ratio!r}; 0.01 sends one entry in a hundred, 1.0 all of them"
        )


class Transport(Protocol):
    """What a collective needs from a network. Blocking; all ranks call in the same order."""

    rank: int
    world_size: int
    ranks: Sequence[int]
    """What the job calls each of them, for messages: other numbers where this network is a part of it."""

    def all_gather(self, out: Tensor, row: Tensor) -> None:
        """Fill ``out`` (world_size, n) with every rank's ``row`` (n), in rank order."""
        ...

    def all_to_all(self, out: Tensor, rows: Tensor) -> None:
        """Row r of ``rows`` goes to rank r; row s of ``out`` comes from rank s."""
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over ranks, the same bits on all of them."""
        ...

    def alive(self) -> bool:
        """False once the process group behind it is gone."""
        ...

    def close(self, *, failed: bool = False, blamed: int | None = None) -> None:
        """Give it back; ``failed`` tells the peers that this rank is out of step, and whom it blames for
        that: itself, unless ``blamed`` is another rank of the job."""
        ...


class Clock(Protocol):
    """Where time and bytes are written down (``metrics.Ledger`` is the real one)."""

    def phase(self, name: str) -> Any:
        """A context manager that adds its duration to phase ``name``."""
        ...

    def traffic(self, sent: int, received: int) -> None: ...


class Collective(Protocol):
    """One bucket's way from the local gradient to the mean of all workers' gradients."""

    slots: list[Slot]
    """What this rank must remember besides the residual; part of the step's transaction."""
    traffic: int
    """Payload bytes that this rank sends for one bucket, and receives."""

    def mean_(
        self,
        bucket: Tensor,
        memory: Slot | None,
        stamp: Stamp,
        clock: Clock,
        held: Held = (),
        sent: list[Tensor] | None = None,
    ) -> bool:
        """Overwrite ``bucket`` (the local gradient) with the mean; False: someone's was not finite.

        Reads ``memory.old`` and writes ``memory.new``. What is owed in the ranges ``held``, where
        the gradient is zero, is not sent now. To ``sent`` come bucket positions of the entries that
        this worker chose and that rounding left something of; none where all of them travel, so that
        none had to wait.
        """
        ...

    def fold_(self, residual: Tensor) -> None:
        """Add what this rank owes besides its residual to ``residual``, before the layout is given up.

        What is owed to the mean by one of P workers is owed P times by that one.
        """
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of what is remembered, by name; empty if that is nothing.

        A debt is kept as "owner", in this rank's shard (``Partition``) of the bucket: under that name it is
        folded by whoever loads a state into other buckets or for another number of workers, without this
        object. Any other name is refused there, so that no debt is lost without a word.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what ``state_dict`` gave for the same bucket; ValueError if it does not fit."""
        ...


class Slot:
    """A tensor with a transaction: a step reads ``old``, writes ``new``, and commits or not.

    This is what lets a step with a non-finite gradient leave every residual as it was, down to
    the bit: nothing was overwritten. It costs a second buffer and no extra pass.
    """

    __slots__ = ("_new", "old")

    def __init__(self, old: Tensor, new: Tensor | None = None) -> None:
        """``new`` is where to write, if that is memory of someone else's."""
        self.old = old
        self._new = new

    @property
    def new(self) -> Tensor:
        if self._new is None:
            self._new = torch.empty_like(self.old)
        return self._new

    def commit(self) -> None:
        """What was written becomes what will be read."""
        self.old, self._new = self.new, self.old


class SenderHalf(Protocol):
    """What a worker makes of its own gradient before it is compressed (``optim`` has some)."""

    @property
    def memories(self) -> tuple[str, ...]:
        """What it remembers, by name, each as large as the model."""
        ...

    @property
    def masking(self) -> bool:
        """Whether ``after_`` wants to know what was sent."""
        ...

    def before_(
        self, layout: BucketLayout, bucket: Tensor, slots: Mapping[str, Slot], taken: Sequence[int]
    ) -> None:
        """Replace ``bucket``. Reads the slots' ``old`` and writes their ``new``.

        ``taken``: for each parameter, how many steps it was there for before.
        """
        ...

    def after_(self, slots: Mapping[str, Slot], sent: Sequence[Tensor]) -> None:
        """May change the slots' ``new``, knowing what was ``sent`` (see ``Collective.mean_``).

        Called where ``masking`` is.
        """
        ...


class CollectiveFactory(Protocol):
    """How a collective is made for one bucket."""

    def __call__(
        self,
        layout: BucketLayout,
        compressor: Any,
        config: CompressionConfig,
        transport: Transport,
        device: torch.device,
    ) -> Collective: ...


__all__ = [
    "MAX_NUMEL",
    "MEMORIES",
    "NO_STAMP",
    "Clock",
    "Collective",
    "CollectiveFactory",
    "CompressionConfig",
    "Held",
    "Payload",
    "SenderHalf",
    "Slot",
    "Stamp",
    "SyncError",
    "Transport",
    "WireError",
    "check_ratio",
    "seed_of",
    "unknown_name",
]
