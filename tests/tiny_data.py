"""Small files of random bytes in the formats of the real datasets."""

from __future__ import annotations

import gzip
from pathlib import Path

import torch


def write(folder: Path) -> None:
    """MNIST and Fashion-MNIST of 40 and 10 images, CIFAR-10 of 20 and 20."""
    generator = torch.Generator().manual_seed(0)

    def write(path: Path, head: bytes, size: int, most: int = 255) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        body = torch.randint(0, most + 1, (size,), generator=generator, dtype=torch.uint8)
        path.write_bytes(gzip.compress(head + bytes(body.tolist())))

    for name in ("mnist", "fashion_mnist"):
        for part, count in (("train", 40), ("t10k", 10)):
            head = count.to_bytes(4, "big")
            images = b"\0\0\x08\x03" + head + (28).to_bytes(4, "big") * 2
            write(folder / name / f"{part}-images-idx3-ubyte.gz", images, count * 784)
            write(folder / name / f"{part}-labels-idx1-ubyte.gz", b"\0\0\x08\x01" + head, count, 9)
    (folder / "cifar10").mkdir(parents=True, exist_ok=True)
    for name in ("data_batch_1.bin", "test_batch.bin"):
        (folder / "cifar10" / name).write_bytes((bytes([3]) + bytes(3072)) * 20)
