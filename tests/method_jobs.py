"""What the ranks do with a row of the table of methods: train, plant overflows, save, begin anew, compare."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from comparing import same
from ef21_law import astray, by_name, handed_over, own_messages
from jobs import batch, flat, owed, small_model
from method_rows import FIXED, ROWS, Row
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from compressed_ddp import CompressionConfig, LocalSync, SplitAdam, SplitOptimizer, SplitSGD, attach
from compressed_ddp.schedules import constant
from compressed_ddp.training.plain import PlainSync
from compressed_ddp.types import seed_of

STEPS, SAVED = 11, 5
"""How long a run is, and after which step it is saved. (Buckets are rebuilt after the first step.)"""
LOCAL = 3
"""Local steps between two meetings: the state is saved between two, and the run ends between two."""
SURE = 8
"""A step in which every row overflows, whatever chance has planted: the workers meet in it, and what is
remembered is compared, which it is not where buckets are rebuilt."""

Named = dict[str, Tensor]


class Run:
    """One rank's model, optimizer and synchroniser under ``row``."""

    def __init__(self, row: Row, rank: int, world: int, way: str, *, plain: bool = False) -> None:
        """``plain``: by DistributedDataParallel itself."""
        self.row, self.rank, self.world = row, rank, world
        config = CompressionConfig(**{"ratio": row.ratio(math.inf), "collective": way} | dict(row.config))
        self.net: nn.Module = small_model()
        self.model = self.net if row.local else DDP(self.net, bucket_cap_mb=0.01)
        self.optimizer = row.optimizer(self.model.parameters())
        self.halves = self.optimizer if isinstance(self.optimizer, SplitOptimizer) else None
        self.sync = self._plain() if plain else self._ours(config)
        fp16 = row.precision == "fp16"
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=fp16)
        self.laws = Laws(self)
        self._one_entry = False
        next(self.net.parameters()).register_hook(self._spoil)  # the last of DDP's buckets has it

    def _spoil(self, gradient: Tensor) -> Tensor:
        if self._one_entry:
            gradient = gradient.clone()
            gradient[0, 0] = torch.inf
        return gradient

    def _ours(self, config: CompressionConfig) -> Any:
        if self.row.local:
            return LocalSync(self.net, config, steps=LOCAL, bucket_cap_mb=0.01, **self.row.local)
        assert isinstance(self.model, DDP)
        return attach(self.model, config, optimizer=self.halves)

    def _plain(self) -> Any:
        assert isinstance(self.model, DDP)
        return PlainSync(self.model)

    def step(self, step: int, planted: bool) -> None:
        """One optimizer step; ``planted``: the loss of this rank is infinite, or, in the step ``SURE``, one
        entry of one gradient."""
        row = self.row
        self._one_entry, planted = planted and step == SURE, planted and step != SURE
        if row.ratio(step) != self.sync.ratio:
            self.sync.set_ratio(row.ratio(step))
        self.optimizer.zero_grad()
        if not row.local:
            self.sync.loss_scale = self.scaler.get_scale()
        self.backward(self.model, step, planted)
        self.laws.arrived()
        if row.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), row.clip)
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif all(bool(torch.isfinite(p.grad).all()) for p in self.net.parameters() if p.grad is not None):
            self.optimizer.step()

    def backward(self, model: nn.Module, step: int, planted: bool = False) -> None:
        micro = self.row.micro
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.row.precision)
        for at in range(micro):
            quiet = isinstance(model, DDP) and at + 1 < micro
            with model.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[union-attr,operator]
                with torch.autocast("cpu", dtype=kind) if kind else contextlib.nullcontext():
                    x, y = batch(self.rank, micro * step + at)
                    loss = nn.functional.mse_loss(model(x).float(), y) / micro
                self.scaler.scale(loss * torch.inf if planted else loss).backward()

    def gradients(self, step: int) -> Named:
        """What this rank's own gradients are in ``step``, by name; the model is left alone."""
        twin = copy.deepcopy(self.net)
        twin.zero_grad()
        self.backward(twin, step)
        scale = self.scaler.get_scale()
        return {name: p.grad / scale for name, p in twin.named_parameters() if p.grad is not None}

    def save(self) -> bytes:
        parts = ("net", "optimizer", "sync", "scaler")
        file = io.BytesIO()
        torch.save({part: getattr(self, part).state_dict() for part in parts}, file)
        return file.getvalue()

    def load(self, data: bytes) -> None:
        for part, state in torch.load(io.BytesIO(data), weights_only=True).items():
            getattr(self, part).load_state_dict(state)

    def remembered(self) -> dict[str, Any]:
        """What a step may change in the synchroniser, and an overflow must not; nothing is zeros."""
        state = self.sync.state_dict()
        owners = {str(bucket["names"]): bucket["state"] for bucket in state["buckets"]}
        found = {name: state[name] for name in ("residuals", "kept", "taken", "factors")}
        return without_zeros(found | {"owners": owners})

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.sync.close()


def without_zeros(found: dict[str, Any]) -> dict[str, Any]:
    """Mappings of tensors, at any depth, less those that are zero and those that have none left."""
    inner = {name: without_zeros(each) if isinstance(each, dict) else each for name, each in found.items()}
    return {
        name: each
        for name, each in inner.items()
        if each != {} and not (isinstance(each, Tensor) and not each.any())
    }


# --- conservation --------------------------------------------------------------------------


class Laws:
    """Adds up what this rank wanted and what arrived, step by step or meeting by meeting."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.wanted, self.applied = torch.zeros(2, flat(run.net).numel(), dtype=torch.float64)
        self.arrival = torch.zeros(0)
        self.average: Named = {}
        self.messages: list[Tensor] = []
        """EF21: what this rank's own messages of the step under way decode to."""
        self.astray = 0.0

    def arrived(self) -> None:
        """Read what the optimizer is about to get, in the gradient's own units."""
        grads = {name: p.grad for name, p in self.run.net.named_parameters() if p.grad is not None}
        self.arrival = end_to_end(grads) / self.run.scaler.get_scale()

    def count(self, gradients: Named, before: Mapping[str, Any]) -> None:
        """A step that counted; ``before`` is the synchroniser's state before it."""
        wanted = gradients
        if self.run.halves is not None:
            names = [bucket["names"] for bucket in self.run.sync.state_dict()["buckets"]]
            clipped = clip(gradients, self.run.halves, names)
            wanted = WANTED[type(self.run.halves)](self.run.halves, clipped, before)
        self.wanted += end_to_end(wanted)
        self.applied += self.arrival
        eta = self.run.row.config.get("eta", 1.0)
        self.average = {
            name: torch.lerp(self.average[name], want, eta) if self.average else want
            for name, want in wanted.items()
        }
        self._estimated(self.average if "average" in before["kept"] else wanted, before)

    def _estimated(self, target: Named, before: Mapping[str, Any]) -> None:
        """EF21: g_i moved by this rank's message, and nearer to ``target``."""
        after = self.run.sync.state_dict()
        if "estimate" not in after["kept"] or handed_over(before, after):
            return
        new = end_to_end(after["kept"]["estimate"])
        old = end_to_end(before["kept"]["estimate"]) if before["kept"]["estimate"] else torch.zeros_like(new)
        message = end_to_end(by_name(self.messages, after))
        self.astray = max(self.astray, astray(end_to_end(target), old, new, message))

    def broken(self) -> float:
        """By how much the law of this method is broken, as a share of what it is about."""
        state = self.run.sync.state_dict()
        if "estimate" in state["kept"]:
            return self._broken_ef21(state)
        wanted, debt = mean(self.wanted), mean(owed(self.run.sync, self.run.net).double())
        assert wanted.any() and debt.any()
        return float((self.applied + debt - wanted).abs().max() / wanted.abs().max())

    def _broken_ef21(self, state: Mapping[str, Any]) -> float:
        """g + what owners owe = the mean of all g_i, which went where messages said; g is what arrives; v_i
        is the average of gradients."""
        agreed = end_to_end(state["kept"]["agreed"])
        believed = mean(end_to_end(state["kept"]["estimate"]).double())
        debt = mean(owed(self.run.sync, self.run.net).double())
        found = [self.astray, (agreed + debt - believed).abs().max() / believed.abs().max()]
        assert believed.any() and not state["residuals"]
        if not self.run.row.local:
            found.append((self.arrival - agreed).abs().max() / agreed.abs().max())
        if "average" in state["kept"]:
            average = end_to_end(state["kept"]["average"])
            found.append((end_to_end(self.average) - average).abs().max() / average.abs().max())
        return float(max(found))

    def meeting(self, before: Mapping[str, Any], weights: Named) -> None:
        """A meeting that counted: the mean that moved the anchor is what the outer momentum took up."""
        old, new = before["local"], self.run.sync.state_dict()["local"]
        decay = self.run.sync.momentum
        self.applied += end_to_end(new["momentum"]).double() - decay * end_to_end(old["momentum"]).double()
        moved = {name: anchor - weights[name] for name, anchor in old["anchor"].items()}
        self.wanted += end_to_end(moved)
        self._estimated(moved, before)


def clip(gradients: Named, halves: SplitOptimizer, buckets: Iterable[list[str]]) -> Named:
    """Each bucket held to its share of the norm, as docs/methods.md has it."""
    if halves.max_norm is None:
        return gradients
    limit = halves.max_norm * (math.sqrt(dist.get_world_size()) if isinstance(halves, SplitSGD) else 1.0)
    everything = sum(grad.numel() for grad in gradients.values())
    clipped = {}
    for names in buckets:
        mine = torch.cat([gradients[name].reshape(-1) for name in names])
        factor = min(1.0, limit * math.sqrt(mine.numel() / everything) / float(mine.norm()))
        clipped |= {name: gradients[name] * factor for name in names}
    return {name: clipped[name] for name in gradients}


def velocity(optimizer: SplitOptimizer, gradients: Named, before: Mapping[str, Any]) -> Named:
    options, kept = optimizer.param_groups[0], before["kept"]["momentum"]
    m, wanted = options["momentum"], {}
    for name, grad in gradients.items():
        u = grad + m * kept[name] if name in kept else grad
        wanted[name] = grad + m * u if options["nesterov"] else u
    return wanted


def update(optimizer: SplitOptimizer, gradients: Named, before: Mapping[str, Any]) -> Named:
    assert isinstance(optimizer, SplitAdam)
    options, kept, taken = optimizer.param_groups[0], before["kept"], before["taken"]
    b, b1, wanted = options["beta"], optimizer.beta1, {}
    penalty = 0.0 if optimizer.decoupled_weight_decay else options["weight_decay"]
    freeze = optimizer.freeze or math.inf
    for name, grad in gradients.items():
        g = grad + penalty * before["weights"][name]
        s, m = (kept.get(what, {}).get(name, torch.zeros_like(g)) for what in ("square", "momentum"))
        m = b1 * m + (1 - b1) * g
        count = min(taken + 1, freeze)
        new = (1 - b) * g**2
        s = b * s + new if taken < freeze else torch.maximum(s, new)
        root = (s / (1 - b**count)).sqrt()
        wanted[name] = options["lr"] * m / (1 - b1 ** (taken + 1)) / (root + options["eps"])
    return wanted


WANTED: dict[type, Callable[[SplitOptimizer, Named, Mapping[str, Any]], Named]] = {
    SplitSGD: velocity,
    SplitAdam: update,
}
"""The first half of every optimizer that has two, written down once more."""


def end_to_end(tensors: Mapping[str, Tensor]) -> Tensor:
    order = [name for name, _ in small_model().named_parameters()]
    return torch.cat([tensors[name].detach().reshape(-1).float() for name in order])


def mean(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


# --- the job -------------------------------------------------------------------------------


def overflows(name: str, world: int) -> Iterator[int]:
    """For each step which rank overflows, -1 for none: at random, about every fifth, alike on all ranks.

    And surely in step ``SURE``.
    """
    chance = torch.Generator().manual_seed(seed_of(*name.encode()))
    for step in itertools.count():
        hit = float(torch.rand((), generator=chance)) < 0.2 or step == SURE
        yield int(torch.randint(world, (), generator=chance)) if hit else -1


def every_law(rank: int, world: int, name: str, way: str) -> dict[str, Any]:
    """A whole run, and one that begins anew from what was saved in the middle of it."""
    row = ROWS[name]
    train = by_meetings if row.local else by_steps
    with own_messages() as messages, Run(row, rank, world, way) as whole:
        whole.laws.messages = messages
        found = train(whole, range(STEPS), overflows(name, world))
        found |= {"law": whole.laws.broken(), "noted": whole.sync.stats.total.skipped_steps}
        found["saved_percent"] = whole.sync.stats.as_dict()["saved_percent"]
        end = whole.remembered(), whole.net.state_dict(), whole.optimizer.state_dict()
    with own_messages() as messages, Run(row, rank, world, way) as second:
        second.laws.messages = messages
        for parameter in second.net.parameters():
            parameter.data.add_(1.0)
        second.load(found.pop("saved"))
        hits = overflows(name, world)
        train(second, range(SAVED, STEPS), (hit for at, hit in enumerate(hits) if at >= SAVED))
        again = second.remembered(), second.net.state_dict(), second.optimizer.state_dict()
        found["resumed"] = [same(mine, theirs) for mine, theirs in zip(end, again, strict=True)]
    return found


def everything_sent(rank: int, world: int) -> dict[str, tuple[Tensor, Tensor]]:
    """By name of a row: where plain DDP leads, and where we do when we send everything as it is."""
    found = {}
    for name, row in ROWS.items():
        torchs_own = row.optimizer(small_model().parameters()).__class__.__module__.startswith("torch")
        if torchs_own and not row.local and not row.config and row.ratio is FIXED:
            exact = replace(row, config={"values": "fp32"}, ratio=constant(1.0))
            weights = []
            for plain in (True, False):
                with Run(exact, rank, world, "allgather", plain=plain) as run:
                    for step in range(5):
                        run.step(step, planted=False)
                    weights.append(flat(run.net))
            found[name] = weights[0], weights[1]
    return found


def by_steps(run: Run, numbers: range, hits: Iterator[int]) -> dict[str, Any]:
    """Gradients are synchronised in every step; an overflow, wherever it is, changes nothing anywhere."""
    planted, untouched, checked, layouts, scales, saved = 0, True, 0, set(), set(), b""
    for step in numbers:
        hit = next(hits)
        run.laws.messages.clear()
        gradients, before = run.gradients(step), run.sync.state_dict()
        before["weights"] = {name: p.detach().clone() for name, p in run.net.named_parameters()}
        remembered, weights = run.remembered(), flat(run.net)
        scales.add(run.scaler.get_scale())
        run.step(step, planted=run.rank == hit)
        layouts.add(tuple(tuple(bucket["names"]) for bucket in run.sync.state_dict()["buckets"]))
        if hit < 0:
            run.laws.count(gradients, before)
        else:
            planted += 1
            untouched &= torch.equal(weights, flat(run.net)) and not run.sync.counted
            # One entry spoils its own bucket, and none of the others.
            untouched &= bool(run.laws.arrival.isfinite().any()) == (step == SURE)
            if step != 1:  # owners hand over at a rebuild
                untouched &= same(remembered, run.remembered())
                checked += step > 1
        if step + 1 == SAVED:
            saved = run.save()
    found = {"parameters": flat(run.net), "planted": planted, "untouched": untouched, "saved": saved}
    return found | {"checked": checked, "layouts": len(layouts), "scales": len(scales)}


def by_meetings(run: Run, numbers: range, hits: Iterator[int]) -> dict[str, Any]:
    """Workers meet every third step; a weight that is infinite costs the period and nothing else."""
    planted, untouched, scales, saved = 0, True, set(), b""
    for step in numbers:
        before, remembered, hit = run.sync.state_dict(), run.remembered(), next(hits)
        run.laws.messages.clear()
        scales.add(run.scaler.get_scale())
        run.step(step, planted=False)
        weights = {name: p.detach().clone() for name, p in run.net.named_parameters()}
        lost = before["local"]["since"] + 1 == LOCAL and hit >= 0
        if lost and run.rank == hit:
            next(run.net.parameters()).data[0, 0] = torch.inf
        met = run.sync.step()
        if lost:
            planted += 1
            untouched &= met and same(remembered, run.remembered())
            after, now = run.sync.state_dict()["local"], dict(run.net.named_parameters())
            untouched &= all(same(before["local"][part], after[part]) for part in ("momentum", "anchor"))
            untouched &= all(torch.equal(anchor, now[name]) for name, anchor in after["anchor"].items())
        elif met:
            run.laws.meeting(before, weights)
        if step + 1 == SAVED:
            saved = run.save()
    before, apart = run.sync.state_dict(), flat(run.net)
    run.laws.messages.clear()
    weights = {name: p.detach().clone() for name, p in run.net.named_parameters()}
    run.sync.synchronize()
    run.laws.meeting(before, weights)
    found = {"parameters": flat(run.net), "planted": planted, "untouched": untouched, "saved": saved}
    return found | {"checked": planted, "apart": apart, "scales": len(scales)}
