"""Is error feedback needed, and is what was sent the true sum? Three residuals beside dense training.

Four workers in one process train SimpleCNN on scikit-learn's handwritten digits with Top-K: without a
residual, with the write-up's (compensated less the average) and with ours (compensated less what this worker
sent). Each keeps the sum of its gradients beside the sum of the means that were applied. Three figures then
say what became of the gradients, all as a share of the true sum's length:

    late     |applied - true|: what has not been applied yet, or never will be
    lost     |applied + mean residual - true|: what nobody owes any more
    held     |residual|, the mean over workers: what each believes that it owes

One CSV row a run; some minutes.

    python experiments/error_feedback.py            # writes results/error_feedback.csv
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import legacy
import torch
from origin import origin
from pages import ROOT
from rows import append
from torch import Tensor, nn

from compressed_ddp import CompressionConfig
from compressed_ddp.communication import Reducer, run_in_process
from compressed_ddp.compression.factory import from_config
from compressed_ddp.data import Dataset
from compressed_ddp.data.images import digits
from compressed_ddp.layout import BucketLayout
from compressed_ddp.models import build
from compressed_ddp.types import Transport

WORKERS, BATCH, EPOCHS, RATE, MOMENTUM, SEEDS = 4, 16, 10, 0.05, 0.9, (0, 1, 2)
RATIOS = (0.01, 0.001)
METHODS: dict[str, dict[str, Any]] = {
    "no error feedback": {"error_feedback": False, "collective": "allgather"},
    "write-up's residual": {"compressor": legacy.NAME, "collective": legacy.NAME},
    "error feedback": {"collective": "allgather"},
}
COLUMNS = (
    *("method", "dataset", "model", "workers", "ratio", "seed", "epochs", "steps", "lr", "parameters"),
    *("accuracy", "late", "lost", "held", "command", "commit", "version", "machine"),
)


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def train(
    options: dict[str, Any], seed: int, epochs: int, data: Dataset, first: nn.Module, net: Transport
) -> dict[str, Any]:
    """One worker's training of a copy of ``first``: sums in float64, and the test accuracy in percent."""
    torch.set_num_threads(1)  # OpenMP keeps it for each thread by itself
    model = copy.deepcopy(first)
    names, weights = zip(*model.named_parameters(), strict=True)
    layout = BucketLayout(names, tuple(weight.shape for weight in weights))
    config = CompressionConfig(**options)
    reducer = Reducer(from_config(config), config, net)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    total, applied = (torch.zeros(layout.numel, dtype=torch.float64) for _ in range(2))
    steps = 0
    shuffler = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(data.train), generator=shuffler)
        for batch in order[: len(order) // (WORKERS * BATCH) * WORKERS * BATCH].split(WORKERS * BATCH):
            inputs, targets = data.train.batch(batch.chunk(WORKERS)[net.rank])
            gradients = torch.autograd.grad(nn.functional.cross_entropy(model(inputs), targets), weights)
            bucket = flat(list(gradients))
            total += bucket
            reducer.reduce_(layout, bucket, last=True)
            applied += bucket
            for weight, part in zip(weights, bucket.split([w.numel() for w in weights]), strict=True):
                weight.grad = part.view_as(weight).clone()
            optimizer.step()
            steps += 1
    owed = torch.zeros_like(total)
    if all(name in reducer.memory for name in names):
        owed += flat([reducer.memory.residual(name) for name in names])
    with torch.no_grad():
        inputs, targets = data.test.batch(torch.arange(len(data.test)))
        right = (model(inputs).argmax(1) == targets).double().mean()
    return {"true": total, "applied": applied, "owed": owed, "steps": steps, "accuracy": 100 * float(right)}


def row_of(method: str, ratio: float, seed: int, epochs: int) -> dict[str, Any]:
    """One training by all workers."""
    options = {"compressor": "dense"} if ratio == 1 else {"ratio": ratio, **METHODS[method]}
    data = digits()
    torch.manual_seed(seed)
    first = build("simple_cnn", shape=data.shape, classes=data.classes)
    found = run_in_process(WORKERS, lambda net: train(options, seed, epochs, data, first, net))
    true, owed = (torch.stack([each[name] for each in found]).mean(0) for name in ("true", "owed"))
    late, length = found[0]["applied"] - true, float(true.norm())
    held = sum(float(each["owed"].norm()) for each in found) / WORKERS
    return {
        **{"method": method, "dataset": "digits", "model": "simple_cnn", "workers": WORKERS, "ratio": ratio},
        **{"seed": seed, "epochs": epochs, "steps": found[0]["steps"], "lr": RATE, "parameters": len(true)},
        "accuracy": round(found[0]["accuracy"], 2),
        "late": f"{float(late.norm()) / length:.3g}",
        "lost": f"{float((late + owed).norm()) / length:.3g}",
        "held": f"{held / length:.3g}",
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "results" / "error_feedback.csv", help="where to write, anew")
    add("--epochs", type=int, default=EPOCHS, help=f"through the training data (default: {EPOCHS})")
    add("--seeds", type=int, nargs="+", default=SEEDS, help="default: 0 1 2")
    return parser.parse_args(arguments)


def main() -> None:
    options, about = parse(), origin()
    options.out.unlink(missing_ok=True)
    for seed in options.seeds:
        for method, ratio in (("dense", 1.0), *((name, ratio) for name in METHODS for ratio in RATIOS)):
            row = row_of(method, ratio, seed, options.epochs)
            append(options.out, COLUMNS, [row | about])
            said = f"{row['accuracy']:.2f} %, late {row['late']}, lost {row['lost']}, held {row['held']}"
            print(f"{method:<20} {100 * ratio:g} %, seed {seed}: {said}", flush=True)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
