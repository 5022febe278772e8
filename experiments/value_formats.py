"""How should Top-K values travel? Test accuracy with each value format, beside plain DDP.

Four gloo workers on one machine train a small CNN on MNIST and Fashion-MNIST, once for each
value format and seed. The same seed gives the same first weights and the same order of images to
every format, so runs differ in nothing but the way gradients travel. One CSV row a run, written
as it ends; started again, it goes on where it was stopped. The column `seconds` tells how long to
wait for it: the workers share one machine's cores, so it is no measure of speed.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from origin import origin
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compressed_ddp import CompressionConfig, attach

WORKERS, BATCH, MOMENTUM = 4, 256, 0.9
HELD_OUT = 10_000  # training images that no run trains on: the learning rate is chosen on them
DATASETS = ("mnist", "fashion-mnist")
TOPK = [(values, 0.01) for values in ("fp32", "fp16", "bf16", "int8", "int4")]
TOPK += [(values, 0.001) for values in ("fp32", "fp16", "int8")]
TUNE_RATES, TUNE_SEED = (0.01, 0.02, 0.05, 0.1, 0.2), 100

Data = dict[str, tuple[Tensor, Tensor]]


class Run(NamedTuple):
    """What tells one run from another; the first columns of the CSV."""

    dataset: str
    seed: int
    method: str  # dense: DDP without a hook; topk: DDP with compressed_ddp attached
    values: str
    ratio: float
    epochs: int
    lr: float
    train_images: int
    scored_on: str  # test, or validation


RESULTS = ("test_accuracy", "validation_accuracy", "collective", "bytes_sent", "steps", "seconds")
COLUMNS = (*Run._fields, *RESULTS, "command", "commit", "machine")


def read_idx(path: Path) -> Tensor:
    """The uint8 array of idx file `path`, or of `path`.gz."""
    packed = path.with_name(path.name + ".gz")
    raw = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of unsigned bytes")
    shape = [int.from_bytes(raw[4 + 4 * d : 8 + 4 * d], "big") for d in range(raw[3])]
    return torch.frombuffer(bytearray(raw[4 + 4 * raw[3] :]), dtype=torch.uint8).view(shape)


def load(folder: Path) -> Data:
    """Images and labels: to train on, to choose the learning rate on, and to test on."""

    def pair(name: str) -> tuple[Tensor, Tensor]:
        return read_idx(folder / f"{name}-images-idx3-ubyte"), read_idx(folder / f"{name}-labels-idx1-ubyte")

    images, labels = pair("train")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    held, rest = slice(0, HELD_OUT), slice(HELD_OUT, None)
    validation = (images[held], labels[held])
    return {"train": (images[rest], labels[rest]), "validation": validation, "test": pair("t10k")}


def cnn() -> nn.Module:
    """207,178 parameters: one DDP bucket, so Top-K chooses among all of them."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def pixels(images: Tensor) -> Tensor:
    return images.unsqueeze(1).float().div_(127.5).sub_(1)


def train(run: Run, data: Data, rank: int) -> dict[str, Any]:
    """One whole training: its results, the bytes being this worker's own."""
    torch.manual_seed(run.seed)
    net = cnn()
    model = DistributedDataParallel(net)
    sync = None
    if run.method == "topk":
        sync = attach(model, CompressionConfig(ratio=run.ratio, values=run.values, collective="allgather"))
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=MOMENTUM)
    images, labels = (part[: run.train_images] for part in data["train"])
    shuffler = torch.Generator().manual_seed(run.seed)
    steps, start = 0, time.perf_counter()
    for _ in range(run.epochs):
        order = torch.randperm(len(labels), generator=shuffler)
        for batch in order[: len(order) // BATCH * BATCH].split(BATCH):
            mine = batch.chunk(WORKERS)[rank]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pixels(images[mine])), labels[mine].long()).backward()
            optimizer.step()
            steps += 1
    seconds = time.perf_counter() - start
    if sync is None:  # not measured: what a worker sends in a dense ring all-reduce
        numel = sum(parameter.numel() for parameter in net.parameters())
        way, sent = "ring (computed)", steps * (2 * (WORKERS - 1) * 4 * numel // WORKERS)
    else:
        way, sent = " ".join(sync.stats.collectives), sync.stats.total.bytes_sent
        sync.close()
    accuracy = score(net, *data[run.scored_on], rank)
    found = {"collective": way, "bytes_sent": sent, "steps": steps, "seconds": round(seconds, 1)}
    return {f"{run.scored_on}_accuracy": f"{accuracy:.2f}", **found}


def score(net: nn.Module, images: Tensor, labels: Tensor, rank: int) -> float:
    """Percent of `images` that `net` gets right; each worker looks at its share."""
    with torch.no_grad():
        chunks = zip(images[rank::WORKERS].split(500), labels[rank::WORKERS].split(500), strict=True)
        right = torch.tensor(sum(int((net(pixels(x)).argmax(1) == y).sum()) for x, y in chunks))
    dist.all_reduce(right)
    return 100 * int(right) / len(labels)


def worker(rank: int, runs: list[Run], args: argparse.Namespace, store: str, origin: dict[str, str]) -> None:
    """One of four processes that live through all runs; rank 0 writes them down."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORKERS)
    data = {name: load(args.data_dir / name) for name in DATASETS}
    for number, run in enumerate(runs, 1):
        row = run._asdict() | train(run, data[run.dataset], rank) | origin
        if rank == 0:
            fresh = not args.out.exists()
            with args.out.open("a", newline="") as file:
                book = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                if fresh:
                    book.writeheader()
                book.writerow(row)
            what = f"{run.dataset}, seed {run.seed}, {label(row)}, lr {run.lr}"
            done = f"{row[f'{run.scored_on}_accuracy']} % on {run.scored_on}, {row['seconds']} s"
            print(f"[{number}/{len(runs)}] {what}: {done}", flush=True)
    dist.destroy_process_group()


def where_from(data_dir: Path) -> dict[str, str]:
    """Where the numbers come from. The data directory is the reader's own, so it is not named."""
    about = origin()
    return {
        "command": about["command"].replace(str(data_dir), "DATA"),
        "commit": about["commit"],
        "machine": f"{about['machine']}, torch {torch.__version__}",
    }


def plan(args: argparse.Namespace) -> list[Run]:
    ways, seeds, rates, scored_on = [("dense", "", 1.0)], args.seeds, [args.lr], "test"
    if args.tune:
        seeds, rates, scored_on = [TUNE_SEED], TUNE_RATES, "validation"
    else:
        ways = [way for way in (*ways, *(("topk", *way) for way in TOPK)) if way[2] in args.ratios]
    return [
        Run(name, seed, *way, args.epochs, lr, args.train_images, scored_on)
        for way, lr, seed, name in itertools.product(ways, rates, seeds, DATASETS)
    ]


def label(row: dict[str, Any]) -> str:
    return f"{row['values']} at {row['ratio']}" if row["method"] == "topk" else "dense"


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def print_table(rows: list[dict[str, str]]) -> None:
    """Mean and sample standard deviation over the seeds, and what rank 0 sent in a step."""
    scores: dict[str, dict[str, list[float]]] = {}
    sent = {label(row): int(row["bytes_sent"]) / int(row["steps"]) for row in rows}
    for row in rows:
        of_way = scores.setdefault(label(row), {name: [] for name in DATASETS})
        of_way[row["dataset"]].append(float(row["test_accuracy"]))
    print(f"| values | {' | '.join(DATASETS)} | bytes a step |\n|---|{'---|' * len(DATASETS)}---|")
    for way, of_way in scores.items():
        spreads = [f"{statistics.stdev(s):.2f}" if len(s) > 1 else "?" for s in of_way.values()]
        means = [f"{statistics.mean(s):.2f}" for s in of_way.values()]
        cells = [f"{mean} ± {spread}" for mean, spread in zip(means, spreads, strict=True)]
        print(f"| {way} | {' | '.join(cells)} | {sent[way]:,.0f} |")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data-dir", type=Path, required=True, help="holds mnist/ and fashion-mnist/ with the idx files")
    add("--out", type=Path, default=Path("results/value_formats.csv"), help="CSV; rows it has are skipped")
    add("--epochs", type=int, default=2, help="passes over the training images")
    add("--lr", type=float, default=0.1, help="learning rate of every run")
    add("--train-images", type=int, default=50_000, help="train on so many of those not held out")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="each format is trained once for each")
    add("--ratios", type=float, nargs="+", default=[1.0, 0.01, 0.001], help="only these; 1.0 is dense")
    add("--tune", action="store_true", help=f"instead train dense at lr {TUNE_RATES}, score held-out images")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()

    known = {tuple(row[name] for name in Run._fields) for row in rows_of(args.out)}
    runs = [run for run in plan(args) if tuple(map(str, run)) not in known]
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if runs:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (runs, args, f"{folder}/store", where_from(args.data_dir)), nprocs=WORKERS)
    planned = {tuple(map(str, run)) for run in plan(args)}
    if not args.tune:
        print_table([r for r in rows_of(args.out) if tuple(r[name] for name in Run._fields) in planned])


if __name__ == "__main__":
    main()
