"""Bytes that one worker sends for a bucket of a million elements, by every compressor and collective.

Real messages through the in-process network, counted by the ledger, beside a dense ring all-reduce. Sizes
depend on nothing but the bucket, so any machine gives the same figures; rows name it all
the same, as all rows do.

    python experiments/message_sizes.py            # writes results/message_sizes.csv
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from origin import origin

from compressed_ddp import CompressionConfig
from compressed_ddp.communication import Reducer, run_in_process
from compressed_ddp.compression import COMPRESSORS
from compressed_ddp.compression.factory import from_config
from compressed_ddp.layout import BucketLayout
from compressed_ddp.types import Transport

ROWS: list[dict[str, Any]] = [
    {"compressor": "dense"},
    {"compressor": "fp16"},
    {"compressor": "bf16"},
    *(
        {"compressor": "topk", "ratio": r, "values": v}
        for r in (0.1, 0.01, 0.001)
        for v in ("int8", "int4", "fp16")
    ),
    {"compressor": "threshold", "ratio": 0.01},
    {"compressor": "randomk", "ratio": 0.01},
    *({"compressor": "qsgd", "levels": levels} for levels in (127, 7)),
    {"compressor": "sign"},
    {"compressor": "terngrad"},
    {"compressor": "onebit"},
    {"compressor": "powersgd", "rank": 2},
]
ROWS += [{"compressor": name} for name in COMPRESSORS if name not in {row["compressor"] for row in ROWS}]


def sent(options: dict[str, Any], way: str, world: int, layout: BucketLayout) -> int:
    """Payload bytes that one of ``world`` workers sends for one bucket."""
    config = CompressionConfig(**options, collective=way)

    def work(net: Transport) -> int:
        reducer = Reducer(from_config(config), config, net)
        generator = torch.Generator().manual_seed(net.rank)
        reducer.reduce_(layout, torch.randn(layout.numel, generator=generator), last=True)
        return reducer.stats.total.bytes_sent

    return run_in_process(world, work)[0]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=8, help="workers of the network (default: 8)")
    parser.add_argument("--out", type=Path, default=Path("results/message_sizes.csv"), help="where to write")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    side, world = 1000, arguments.workers
    layout = BucketLayout(("weight",), (torch.Size([side, side]),))
    ring = 2 * (world - 1) * layout.numel * 4 // world
    about = {"workers": world, "elements": layout.numel, "ring_bytes": ring, **origin()}
    rows = []
    for options in ROWS:
        compressor = from_config(CompressionConfig(**options))
        for way in compressor.collectives:
            nbytes = sent(options, way, world, layout)
            extras = {key: value for key, value in options.items() if key != "compressor"}
            room = compressor.quota(layout.numel)
            message = "" if way == "lowrank" else compressor.codec.nbytes(layout.numel, room)
            row = {
                "compressor": compressor.name,
                "options": " ".join(f"{key}={value}" for key, value in extras.items()),
                "collective": way,
                "entries": room,
                "message_bytes": message,
                "bytes_sent": nbytes,
                "percent_of_ring": f"{100 * nbytes / ring:.2f}",
            }
            rows.append(row | about)
            print(
                "{compressor:<10} {options:<24} {collective:<10} {percent_of_ring:>7} % of a ring".format(
                    **row
                )
            )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
