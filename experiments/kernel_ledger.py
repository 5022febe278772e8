"""What the C++ kernels change in a real training: the ledger of the same job with either kind.

Four gloo workers on one machine train a network of 5.4 million parameters on scikit-learn's digits
with Top-K at ratio 0.01, by turns with the reference kernels and with the native ones, in fresh
processes each time. Milliseconds a step are means over the workers, after some steps that do not
count. The workers share the machine's cores, so `wait` is mostly waiting for each other, and a
phase takes longer than it would alone. Losses and weights must agree to the bit; if they do not,
it fails.

    python experiments/kernel_ledger.py            # writes results/kernel_ledger.csv
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from kernel_tables import ledger, medians
from origin import origin
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compressed_ddp import CompressionConfig, attach

WORKERS, BATCH, RATIO = 4, 32, 0.01
KERNELS = ("reference", "native")
COLLECTIVES = ("allgather", "sharded")
PHASES = ("select", "encode", "wait", "decode", "exposed")
TIMES = (*PHASES, "step")
COLUMNS = (
    *("collective", "kernels", "repeat", "workers", "parameters", "ratio", "steps", "buckets"),
    *(f"{name}_ms" for name in TIMES),
    *(f"{name}_speedup" for name in TIMES),
    *("last_loss", "weights_sha256", "command", "commit", "version", "machine"),
)

Row = dict[str, Any]


def train(rank: int, store: str, collective: str, warm_up: int, steps: int) -> None:
    """One worker; leaves what it found beside ``store``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORKERS)
    torch.manual_seed(0)
    images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    images = images.float() / 16
    net = nn.Sequential(
        *(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()),
        *(nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 10)),
    )
    model = DistributedDataParallel(net)
    sync = attach(model, CompressionConfig(ratio=RATIO, collective=collective))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    before, start = sync.stats.total, 0.0
    for step in range(warm_up + steps):
        if step == warm_up:
            before, start = replace(sync.stats.total), time.perf_counter()
        first = (step * WORKERS + rank) * BATCH
        mine = torch.arange(first, first + BATCH) % len(labels)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    spent, total = time.perf_counter() - start, sync.stats.total
    ms = {name: 1e3 * (getattr(total, name) - getattr(before, name)) / steps for name in PHASES}
    weights = torch.cat([weight.detach().view(-1) for weight in net.parameters()])
    found = {
        "ms": ms | {"step": 1e3 * spent / steps},
        "losses": losses,
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "parameters": weights.numel(),
        "kernels": sync.stats.kernels,
        "buckets": sum(sync.stats.collectives.values()),
    }
    torch.save(found, f"{store}.{rank}")
    sync.close()
    dist.destroy_process_group()


def run(kernels: str, collective: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What each of four fresh workers found."""
    os.environ["COMPRESSED_DDP_KERNELS"] = kernels
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        job = (store, collective, arguments.warm_up, arguments.steps)
        mp.spawn(train, job, nprocs=WORKERS)  # type: ignore[attr-defined,no-untyped-call]
        found = [torch.load(f"{store}.{rank}", weights_only=True) for rank in range(WORKERS)]
    assert all(each["kernels"].startswith(kernels) for each in found)
    assert len({each["weights"] for each in found}) == 1, "the workers' weights differ"
    return found


def row_of(kernels: str, collective: str, repeat: int, found: list[dict[str, Any]]) -> Row:
    first = found[0]
    return {
        **{"collective": collective, "kernels": kernels, "repeat": repeat, "workers": WORKERS},
        **{"parameters": first["parameters"], "ratio": RATIO, "buckets": first["buckets"]},
        **{f"{name}_ms": statistics.mean(each["ms"][name] for each in found) for name in TIMES},
        **{"last_loss": repr(first["losses"][-1]), "weights_sha256": first["weights"]},
    }


def pair(collective: str, repeat: int, arguments: argparse.Namespace) -> list[Row]:
    """The same job with both kinds of kernels; who begins changes from repeat to repeat."""
    rows, losses = {}, {}
    for kernels in KERNELS if repeat % 2 else KERNELS[::-1]:
        found = run(kernels, collective, arguments)
        rows[kernels] = row_of(kernels, collective, repeat, found)
        losses[kernels] = [each["losses"] for each in found]
    slow, fast = (rows[kernels] for kernels in KERNELS)
    assert losses["reference"] == losses["native"], f"{collective}: the losses differ"
    assert slow["weights_sha256"] == fast["weights_sha256"], f"{collective}: the weights differ"
    for row in (slow, fast):
        for name in TIMES:
            row[f"{name}_speedup"] = f"{slow[f'{name}_ms'] / row[f'{name}_ms']:.2f}"
    return [slow, fast]


def print_table(rows: list[Row]) -> None:
    """Medians over the repeats, and their quotients."""
    print(f"\nmilliseconds a step, median of the repeats\n\n{ledger(rows)}")
    for collective in COLLECTIVES:
        slow, fast = (medians(rows, collective, kernels) for kernels in KERNELS)
        quotients = [f"{a / b:.2f}" for a, b in zip(slow, fast, strict=True)]
        print(f"| {collective}, times faster | {' | '.join(quotients)} |")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("results/kernel_ledger.csv"), help="where to write")
    add("--steps", type=int, default=20, help="steps that count (default: 20)")
    add("--warm-up", type=int, default=5, help="steps before them (default: 5)")
    add("--repeats", type=int, default=3, help="how often each job runs (default: 3)")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    about, rows = origin(), []
    for repeat in range(1, arguments.repeats + 1):
        for collective in COLLECTIVES:
            for row in pair(collective, repeat, arguments):
                cells = ", ".join(f"{name} {row[f'{name}_ms']:.1f}" for name in TIMES)
                print(f"{collective}, {row['kernels']}, repeat {repeat}: ms a step: {cells}", flush=True)
                row |= {f"{name}_ms": f"{row[f'{name}_ms']:.2f}" for name in TIMES}
                rows.append(row | {"steps": arguments.steps} | about)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print_table(rows)
    print(f"\nlosses and weights agree to the bit in all {len(rows) // 2} pairs\nwrote {arguments.out}")


if __name__ == "__main__":
    main()
