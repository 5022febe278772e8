"""Does it work here? Six checks in about twenty seconds on two busy cores, most of them loading torch twice.

    python experiments/quick_validation.py

Two gloo processes on this machine train a small network on scikit-learn's handwritten digits. Each
check prints one line, PASS with what was found or FAIL with what does not hold, and the exit status
is 1 if any failed. Nothing is downloaded, and nothing is left behind.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compressed_ddp import CompressionConfig, attach, get_compressor, reshard_states
from compressed_ddp.communication.collectives import parted
from compressed_ddp.communication.packer import Packer
from compressed_ddp.data import load
from compressed_ddp.layout import BucketLayout
from compressed_ddp.metrics import Ledger, SocketMeter
from compressed_ddp.types import Slot, Stamp

WORKERS, BATCH, RATE = 2, 32, 0.2
STEPS, MORE, MANY = 10, 20, 100
WAYS = ("allgather", "sharded")

Claims = dict[str, bool]
"""What a check says, and whether it holds."""


# --- a small training ----------------------------------------------------------------------


class Here(NamedTuple):
    """What a worker knows: its number, a folder that both see, and the digits (inputs, labels)."""

    rank: int
    folder: Path
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The next few of this worker's digits: every second one is its own."""
        images, labels = (tensor[self.rank :: WORKERS] for tensor in self.train)
        at = torch.arange(step * BATCH, (step + 1) * BATCH) % len(labels)
        return images[at], labels[at]


def network() -> nn.Module:
    """85,000 parameters, always with the same first weights."""
    torch.manual_seed(0)
    layers = (nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return nn.Sequential(nn.Flatten(), *layers)


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Fresh gradients for one batch, also returned end to end."""
    model.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


class Training:
    """The network under DDP, in several buckets; with a ``config`` its gradients travel compressed."""

    def __init__(self, here: Here, config: CompressionConfig | None) -> None:
        self.here, self.done = here, 0
        self.model = DistributedDataParallel(network(), bucket_cap_mb=0.1)
        self.sync = attach(self.model, config) if config is not None else None
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)

    def run(self, steps: int) -> Tensor:
        """Train on; returns the last gradient that was applied."""
        for step in range(self.done, self.done + steps):
            applied = backward(self.model, self.here.batch(step))
            self.optimizer.step()
        self.done += steps
        return applied

    def finish(self) -> list[str]:
        """End it; returns a hash of every worker's weights, in rank order."""
        if self.sync is not None:
            self.sync.close()
        weights = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])
        digest = torch.tensor(list(hashlib.sha256(weights.numpy().tobytes()).digest()))
        everyones = [torch.empty_like(digest) for _ in range(WORKERS)]
        dist.all_gather(everyones, digest)
        return [bytes(each.tolist()).hex() for each in everyones]


def trained(here: Here, config: CompressionConfig | None, steps: int) -> list[str]:
    """Every worker's hash after a training of ``steps``."""
    training = Training(here, config)
    training.run(steps)
    return training.finish()


def shared(here: Here, name: str, state: dict[str, Any]) -> list[dict[str, Any]]:
    """Both workers' ``state``, in rank order, by way of files as in a checkpoint."""
    torch.save(state, here.folder / f"{name}.{here.rank}")
    dist.barrier()
    return [torch.load(here.folder / f"{name}.{rank}", weights_only=True) for rank in range(WORKERS)]


# --- the checks ----------------------------------------------------------------------------


def compression(here: Here) -> Claims:
    """A tensor becomes a message and comes back; sorting says what should have been chosen."""
    gradient = torch.randn(100_000, generator=torch.Generator().manual_seed(here.rank)) ** 3
    largest = gradient.abs().argsort(descending=True)[:1000].sort().values
    values, indices, _ = get_compressor(ratio=0.01).compress(gradient)
    right = torch.equal(indices, largest) and torch.equal(values, gradient[largest])
    claims = {"Top-K finds exactly the 1 % largest": right}
    for form, allowed in (("fp32", 0.0), ("int8", 0.05)):
        compressor = get_compressor(ratio=0.01, values=form)
        payload = compressor.compress(gradient)
        message = compressor.codec.encode(payload).message
        back = compressor.codec.decode(message, numel=gradient.numel(), k=1000).payload
        error = ((back.values - payload.values) / payload.values).abs().max().item()
        size = message.numel() / (4 * gradient.numel())
        good = torch.equal(back.indices, payload.indices) and error <= allowed and size < 0.02
        claims[f"{form} comes back within {error:.1%} from {size:.2%} of the bytes"] = good
    return claims


def error_feedback(here: Here) -> Claims:
    """Nothing is lost, only delayed: in each message, and over a training of both workers."""
    claims = {"residual + gradient == message + new residual to the bit": law_holds(here)}
    for way in WAYS:
        gap = conservation_gap(here, way)
        claims[f"{way}: applied + owed == true sum within {gap:.0e}"] = gap < 1e-5
    return claims


def law_holds(here: Here) -> bool:
    """One worker by itself descends by what its messages decode to; the law is looked at in each step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    names, parameters = zip(*model.named_parameters(), strict=True)
    layout = BucketLayout(names, tuple(p.shape for p in parameters))
    compressor = get_compressor(0.01)
    packer = Packer(compressor, *parted(layout, compressor, CompressionConfig(), 1, torch.device("cpu")))
    memory, clock = Slot(torch.zeros(layout.numel)), Ledger("topk", "", error_feedback=True)
    holds = True
    for step in range(STEPS):
        gradient, stamp = backward(model, here.batch(step)), Stamp(step=step, sender=here.rank)
        message = packer.pack_(gradient.clone(), memory, stamp, clock)[0]
        decoded = torch.empty_like(gradient)
        packer.sum_(decoded, [(0, packer.unpack(message, 0, stamp))], 1.0)
        holds &= torch.equal(memory.old + gradient, decoded + memory.new)
        memory.commit()
        for parameter, part in zip(parameters, layout.views(decoded).values(), strict=True):
            parameter.grad = part
        optimizer.step()
    return holds and bool(memory.old.any())


def conservation_gap(here: Here, way: str) -> float:
    """How far what was applied and what is owed are from the true mean gradients, relative to these."""
    training = Training(here, CompressionConfig(collective=way))
    assert training.sync is not None
    true, applied = torch.zeros(2, sum(p.numel() for p in training.model.parameters()), dtype=torch.float64)
    for step in range(STEPS):
        true += backward(copy.deepcopy(training.model.module), here.batch(step)) / WORKERS
        applied += training.run(1)
    dist.all_reduce(true)
    states = shared(here, f"owed-{way}", training.sync.state_dict())
    training.finish()
    # Made to fit a job of one worker, the states have all that is owed in that worker's residuals.
    residuals = reshard_states(states, 1)[0]["residuals"]
    owed = torch.cat([residuals[name].reshape(-1) for name, _ in training.model.module.named_parameters()])
    return float((applied + owed - true).abs().max() / true.abs().max())


def identical_replicas(here: Here) -> Claims:
    """Every worker decodes and adds for itself, and yet all weights are the same."""
    claims = {}
    for way in WAYS:
        hashes = trained(here, CompressionConfig(collective=way), MORE)
        shown = " = ".join(each[:8] for each in hashes)
        claims[f"{way}: weights {shown} after {MORE} steps"] = len(set(hashes)) == 1
    return claims


def ratio_one(here: Here) -> Claims:
    """Everything sent and nothing rounded: that must be what DDP does by itself."""
    claims, plain = {}, trained(here, None, STEPS)
    for way in WAYS:
        everything = CompressionConfig(ratio=1.0, values="fp32", collective=way)
        claims[f"{way}: the same weights to the bit"] = trained(here, everything, STEPS) == plain
    return claims


def exact_resume(here: Here) -> Claims:
    """Saved half-way and loaded into a new training: the rest is as if nothing had happened."""
    claims, half = {}, STEPS // 2
    for way in WAYS:
        whole, resumed = (Training(here, CompressionConfig(collective=way)) for _ in range(2))
        assert whole.sync is not None and resumed.sync is not None
        whole.run(half)
        state = {"model": whole.model.module.state_dict(), "sync": whole.sync.state_dict()}
        saved = shared(here, f"saved-{way}", state)[here.rank]
        whole.run(half)
        resumed.model.module.load_state_dict(saved["model"])
        resumed.sync.load_state_dict(saved["sync"])
        resumed.done = half
        resumed.run(half)
        claims[f"{way}: steps {half} to {2 * half} to the bit"] = resumed.finish() == whole.finish()
    return claims


def learns_digits(here: Here) -> Claims:
    """A short training, dense and compressed, scored on digits that it has not seen."""
    images, labels = here.test
    claims, sent = {}, []
    for name, config in (("dense", None), ("Top-K 1 %", CompressionConfig(ratio=0.01))):
        training, meter = Training(here, config), SocketMeter()
        training.run(MANY)
        traffic = meter.read()
        if traffic is not None:  # what the kernel counted
            sent.append(traffic.sent)
        elif training.sync is not None:  # not on Linux: what the ledger says, of both
            sent = [training.sync.stats.total.dense_bytes, training.sync.stats.total.bytes_sent]
        training.finish()
        with torch.no_grad():
            accuracy = (training.model.module(images).argmax(1) == labels).float().mean().item()
        claims[f"{name} reaches {accuracy:.1%}"] = accuracy >= 0.85
    dense, compressed = sent
    claims[f"bytes sent {compressed / dense:.2%} of dense"] = 0 < compressed < 0.05 * dense
    return claims


CHECKS: dict[str, Callable[[Here], Claims]] = {
    "compression": compression,
    "error feedback": error_feedback,
    "identical replicas": identical_replicas,
    "ratio 1 is plain DDP": ratio_one,
    "exact resume": exact_resume,
    "learns digits": learns_digits,
}


# --- the two processes ---------------------------------------------------------------------


def judge(here: Here, name: str) -> bool:
    """Run one check on both workers; whether both found that all of it holds. The first one prints."""
    start = time.perf_counter()
    claims = CHECKS[name](here)
    everyones = torch.tensor([int(all(claims.values()))])
    dist.all_reduce(everyones, dist.ReduceOp.MIN)
    wrong = [claim for claim, holds in claims.items() if not holds]
    if not wrong and not everyones.item():
        wrong = ["the other worker finds the same"]
    text = "; ".join(claims) if not wrong else f"does not hold: {'; '.join(wrong)}"
    if here.rank == 0:
        line = f"{'FAIL' if wrong else 'PASS'}  {name:<20}  {text}  ({time.perf_counter() - start:.1f} s)"
        print(line, flush=True)
    return not wrong


def work(rank: int, folder: Path) -> int:
    """One of the two workers, from start to end; returns how many checks passed."""
    torch.set_num_threads(1)
    store, limit = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORKERS, timeout=limit)
    dist.barrier()
    digits = torch.load(folder / "digits", weights_only=True)
    here = Here(rank, folder, digits["train"], digits["test"])
    passed, names = 0, list(CHECKS)
    try:
        while names:
            passed += judge(here, names[0])
            names.pop(0)
    except Exception as error:
        if rank > 0:
            raise
        # The workers are out of step now, so that what was still to come has failed as well.
        print(f"FAIL  {names[0]:<20}  {type(error).__name__}: {error}")
        for name in names[1:]:
            print(f"FAIL  {name:<20}  not run after that")
    finally:
        dist.destroy_process_group()
    return passed


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return parser.parse_args(arguments)


def main() -> int:
    """This process is the first worker and starts the second; returns the exit status."""
    start = time.perf_counter()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        second = get_context("spawn").Process(target=work, args=(1, folder), daemon=True)
        second.start()
        try:
            digits = load("digits")  # takes scikit-learn a while: once is enough
            splits = {"train": digits.train, "test": digits.test}
            tensors = {part: split.batch(torch.arange(len(split))) for part, split in splits.items()}
            torch.save(tensors, folder / "digits")
            passed = work(0, folder)
            second.join(5)
        finally:
            second.kill()
            second.join()
    print(
        f"{passed} of {len(CHECKS)} passed in {time.perf_counter() - start:.1f} s, loading torch not counted"
    )
    return 0 if passed == len(CHECKS) else 1


if __name__ == "__main__":
    parse()
    sys.exit(main())
