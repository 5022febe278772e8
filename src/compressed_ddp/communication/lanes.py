"""Which collective serves which bucket, and what is handed over when buckets change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compression import BaseCompressor
from ..error_feedback.state import SavedBucket, fold_owner_, owed_by_owner
from ..layout import BucketLayout
from ..types import MAX_NUMEL, Collective, CollectiveFactory, CompressionConfig, Transport, unknown_name
from .collectives import AllGather, Sharded
from .lowrank import LowRank

COLLECTIVES: dict[str, CollectiveFactory] = {
    "allgather": AllGather,
    "sharded": Sharded,
    "lowrank": LowRank,
}


class Lane(NamedTuple):
    """A bucket's collective, under its name."""

    name: str
    collective: Collective
    ratio: float
    factors: Mapping[str, float]
    """What its message sizes were computed for."""


class Lanes:
    """The collective of every bucket. DDP rebuilds its buckets, ratios change, runs are resumed: what
    owners of shards owe then moves to a lane of the same kind for the same bucket as it is, and to any
    other by way of this rank's own debt."""

    def __init__(
        self,
        compressor: BaseCompressor,
        config: CompressionConfig,
        transport: Transport,
        take_back_: Callable[[BucketLayout, Tensor], Callable[[], None]],
    ) -> None:
        """``take_back_`` adds to what this rank owes in a bucket, and returns what takes that away again."""
        self._compressor, self._config, self._transport = compressor, config, transport
        self._take_back_ = take_back_
        self._lanes: dict[BucketLayout, Lane] = {}
        self._order: list[BucketLayout] = []
        """The buckets of the last step."""
        self._plan: list[SavedBucket] = []
        """Buckets of a loaded state; one whose state is empty has been handed over."""
        self._undo: list[Callable[[], None]] = []
        """What takes back, from the last to the first, what was handed over since the last ``commit``."""

    def open(self, layout: BucketLayout, device: torch.device) -> Collective:
        """The collective of ``layout``: a new one for a bucket not seen before, or not with these ratios."""
        lane, now = self._lanes.get(layout), self._compressor
        if lane is None or lane.ratio != now.ratio or lane.factors is not now.factors:
            lane = self._new(layout, device)
        return lane.collective

    def planned(self, layout: BucketLayout) -> list[BucketLayout]:
        """The loaded state's buckets, if ``layout`` is exactly several of them put together."""
        if not self._plan or layout in self._lanes:
            return []
        names = set(layout.names)
        parts = [saved.layout for saved in self._plan if names.issuperset(saved.layout.names)]
        covered = [name for part in parts for name in part.names]
        return parts if len(covered) == len(names) and set(covered) == names else []

    def count(self, seen: list[BucketLayout]) -> dict[str, int]:
        """How many buckets each collective served in a step of buckets ``seen``, or, if none, the last."""
        self._order = seen or self._order
        names = [self._lanes[layout].name for layout in self._order]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    def state(self) -> list[dict[str, Any]]:
        """What owners owe, bucket by bucket; copies."""
        lanes = {layout: self._lanes[layout] for layout in self._order if layout in self._lanes} | self._lanes
        buckets = [
            SavedBucket(layout, lane.name, lane.collective.state_dict()) for layout, lane in lanes.items()
        ]
        covered = {name for layout in lanes for name in layout.names}
        buckets += [saved for saved in self._plan if not covered.intersection(saved.layout.names)]
        return [bucket.as_dict() for bucket in buckets]

    def check(self, plan: list[SavedBucket], device: torch.device) -> None:
        """Raises ValueError unless the first step can take back what each bucket of ``plan`` remembers."""
        for saved in plan:
            if saved.way not in COLLECTIVES:
                raise unknown_name("collective in a saved state", saved.way, COLLECTIVES)
            if saved.state and saved.way in _ways(self._compressor, self._config):
                way = COLLECTIVES[saved.way]
                trial = way(saved.layout, self._compressor, self._config, self._transport, device)
                trial.load_state_dict(saved.state)
            else:
                owed_by_owner(saved)

    def load(self, plan: list[SavedBucket]) -> None:
        """Begin again with the buckets of a loaded state."""
        self._lanes, self._order, self._plan = {}, [], plan
        self.commit()

    def commit(self) -> None:
        """A step counts, and what was handed over in it."""
        self._undo = []

    def undo(self) -> None:
        """A step does not count: owners owe again what they owed before it, to the bit."""
        while self._undo:
            self._undo.pop()()

    def _new(self, layout: BucketLayout, device: torch.device) -> Lane:
        names = set(layout.names)
        lane = choose(layout, self._compressor, self._config, self._transport, device)
        olds = [known for known in self._lanes if names.intersection(known.names)]
        plan = [saved for saved in self._plan if saved.state and names.intersection(saved.layout.names)]
        if olds or plan:
            self._undo.append(self._as_it_is(plan))
        for old in olds:
            before = self._lanes.pop(old)
            if old == layout and before.name == lane.name:
                lane.collective.load_state_dict(before.collective.state_dict())
            else:
                owed = torch.zeros(old.numel, dtype=torch.float32, device=device)
                before.collective.fold_(owed)
                self._undo.append(self._take_back_(old, owed))
        for saved in plan:
            if saved.layout == layout and saved.way == lane.name:
                lane.collective.load_state_dict(saved.state)
            else:
                self._fold(saved, device)
            saved.state.clear()
        self._lanes[layout] = lane
        return lane

    def _as_it_is(self, plan: list[SavedBucket]) -> Callable[[], None]:
        """What brings these lanes back, and what the buckets of ``plan`` hold."""
        lanes, order = dict(self._lanes), self._order
        states = [dict(saved.state) for saved in plan]

        def bring_back() -> None:
            self._lanes, self._order = lanes, order
            for saved, state in zip(plan, states, strict=True):
                saved.state.update(state)

        return bring_back

    def _fold(self, saved: SavedBucket, device: torch.device) -> None:
        """A loaded bucket that no longer exists. Raises ValueError where nobody knows what it owes."""
        owner = owed_by_owner(saved)
        if owner is not None:
            net = self._transport
            owed = torch.zeros(saved.layout.numel, dtype=torch.float32, device=device)
            fold_owner_(owed, owner.to(device), net.rank, net.world_size)
            self._undo.append(self._take_back_(saved.layout, owed))


def _ways(compressor: BaseCompressor, config: CompressionConfig) -> Sequence[str]:
    """The collectives that a bucket may get."""
    return compressor.collectives if config.collective == "auto" else (config.collective,)


def choose(
    layout: BucketLayout,
    compressor: BaseCompressor,
    config: CompressionConfig,
    transport: Transport,
    device: torch.device,
) -> Lane:
    """The collective for one bucket. All ranks choose alike: nothing but sizes matters.

    ``auto`` counts bytes. Sharded has a second round, and an owner's second choice costs a
    little accuracy, so where it chooses (fewer entries than elements) it must save 40 %.
    """
    names = _ways(compressor, config)
    terms = compressor.ratio, compressor.factors
    lanes = [
        Lane(name, COLLECTIVES[name](layout, compressor, config, transport, device), *terms) for name in names
    ]
    best = lanes[0]
    margin = 0.6 if compressor.quota(layout.numel) < layout.numel else 1.0
    for other in lanes[1:]:
        if other.collective.traffic < margin * best.collective.traffic:
            best = other
    return best


def split_by_size(layout: BucketLayout, limit: int = MAX_NUMEL) -> list[BucketLayout]:
    """``layout`` as consecutive buckets that the wire format can number; most often itself."""
    parts: list[tuple[list[str], list[torch.Size]]] = [([], [])]
    size = 0
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if shape.numel() > limit:
            raise ValueError(
                f"parameter {name!r} has {shape.numel():,} elements; one message can number "
                f"{limit:,}. Split the parameter, or keep it out of this DDP model"
            )
        if size + shape.numel() > limit:
            parts.append(([], []))
            size = 0
        parts[-1][0].append(name)
        parts[-1][1].append(shape)
        size += shape.numel()
    if len(parts) == 1:
        return [layout]
    return [BucketLayout(tuple(names), tuple(shapes)) for names, shapes in parts]
