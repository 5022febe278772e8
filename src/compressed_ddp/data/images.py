"""The image datasets: digits, MNIST, Fashion-MNIST, CIFAR-10. Kept as bytes, made floats by the batch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from .catalogue import DATASETS, locate
from .dataset import Dataset
from .idx import MAX_BYTES, read_idx

PAD = 4
"""Pixels of black around an image before a crop of the old size is taken."""

_STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "digits": ((0.3053,), (0.3760,)),
}
"""Mean and standard deviation of the training pixels, by channel, with white at 1."""

_FIRST_LABELS = {
    "mnist": "07020100040104090509000609000105",
    "fashion_mnist": "09020101060104060507040507030401",
}
"""Of the test sets: their files have the same names, and somebody may have put them together."""


@dataclass(frozen=True)
class ImageSplit:
    """Images (n, channels, height, width) uint8 and labels (n,) int64."""

    images: Tensor
    labels: Tensor
    mean: Tensor
    """By channel, in the units of ``images``."""
    std: Tensor
    augment: bool = False

    def __len__(self) -> int:
        return self.labels.numel()

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        images = self.images[indices]
        if self.augment and generator is not None:
            images = crop_and_flip(images, generator)
        inputs = images.float().sub_(self.mean.view(-1, 1, 1)).div_(self.std.view(-1, 1, 1))
        return inputs, self.labels[indices]


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by up to ``PAD`` pixels either way, black where it left, and mirrored or not.

    Returns a new tensor. Draws: all offsets (down, then right), then all flips.
    """
    n, channels, height, width = images.shape
    down, right = torch.randint(0, 2 * PAD + 1, (2, n), generator=generator).unbind()
    flip = torch.randint(0, 2, (n,), generator=generator).bool()
    x = torch.arange(width)
    columns = right[:, None] + torch.where(flip[:, None], width - 1 - x, x)
    rows = down[:, None] + torch.arange(height)
    at = rows[:, :, None] * (width + 2 * PAD) + columns[:, None, :]
    padded = pad(images, (PAD, PAD, PAD, PAD)).flatten(2)
    return padded.gather(2, at.view(n, 1, -1).expand(-1, channels, -1)).view_as(images)


def digits() -> Dataset:
    """scikit-learn's digits. Their order is by writer, so a fixed permutation comes before the cut."""
    try:
        source = import_module("sklearn.datasets")
    except ImportError as error:
        raise ImportError(
            "dataset 'digits' is part of scikit-learn, which is not installed: "
            "pip install 'compressed-ddp[train]', or take another dataset"
        ) from error
    bunch = source.load_digits()
    images = torch.as_tensor(bunch.images).to(torch.uint8).unsqueeze(1)
    labels = torch.as_tensor(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    cut = len(labels) * 4 // 5
    return _dataset("digits", (images[:cut], labels[:cut]), (images[cut:], labels[cut:]), white=16)


def idx_images(name: str, data_dir: str | Path) -> Dataset:
    """MNIST or Fashion-MNIST from the four idx files."""
    files = locate(name, data_dir)
    train_images, train_labels, test_images, test_labels = (files[file] for file in DATASETS[name].files)
    train, test = _idx_pair(train_images, train_labels), _idx_pair(test_images, test_labels)
    first = bytes(test[1][:16].tolist()).hex()
    for other, labels in _FIRST_LABELS.items():
        if other != name and first == labels:
            raise ValueError(
                f"{test_labels}: these are the files of {other}, whose names are those of {name}'s too; "
                f"--dataset {other}, or another --data-dir"
            )
    return _dataset(name, train, test)


def _idx_pair(images_path: Path, labels_path: Path) -> tuple[Tensor, Tensor]:
    labels, images = read_idx(labels_path), read_idx(images_path, (28, 28))
    if len(images) != len(labels):
        raise ValueError(
            f"{images_path} has {len(images)} images, but {labels_path} has {len(labels)} labels; "
            "they are not of the same set"
        )
    _check_labels(labels_path, labels)
    return images.unsqueeze(1), labels.long()


def cifar10(data_dir: str | Path) -> Dataset:
    """CIFAR-10, binary version, from as many of the five training batches as there are."""
    *batches, test = DATASETS["cifar10"].files
    files = locate("cifar10", data_dir)
    parts = [_cifar_batch(files[batch]) for batch in batches if batch in files]
    train = torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])
    part = f" ({len(parts)} of {len(batches)} batches)"
    return _dataset("cifar10", train, _cifar_batch(files[test]), part=part, augment=True)


def _cifar_batch(path: Path) -> tuple[Tensor, Tensor]:
    record = 1 + 3 * 32 * 32
    size = path.stat().st_size
    if size == 0 or size % record or size > MAX_BYTES:
        raise ValueError(
            f"{path}: expected whole records of {record} bytes (a label and 3 x 32 x 32 pixels), "
            f"30,730,000 bytes when complete; found {size:,} bytes. Delete it and fetch it again"
        )
    data = bytearray(size)
    with path.open("rb") as file:
        if (got := file.readinto(data)) != size:
            raise ValueError(f"{path}: expected {size:,} bytes, found {got:,}; is it still being written?")
    rows = torch.frombuffer(data, dtype=torch.uint8).view(-1, record)
    labels = rows[:, 0]
    _check_labels(path, labels)
    return rows[:, 1:].reshape(-1, 3, 32, 32), labels.long()


def _check_labels(path: Path, labels: Tensor) -> None:
    if (worst := int(labels.max())) > 9:
        raise ValueError(f"{path}: expected labels 0 to 9, found {worst}; delete it and fetch it again")


def _dataset(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    white: int = 255,
    part: str = "",
    augment: bool = False,
) -> Dataset:
    counts = f"{len(train[1]):,} training images{part}, {len(test[1]):,} test images"
    mean, std = (torch.tensor(values) * white for values in _STATISTICS[name])
    return Dataset(
        name=name,
        kind="image",
        shape=tuple(train[0].shape[1:]),
        classes=10,
        train=ImageSplit(*train, mean, std, augment),
        test=ImageSplit(*test, mean, std),
        about=f"{DATASETS[name].title}, {counts}",
    )
