"""Which datasets there are, the files they need, and where those are looked for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ..types import unknown_name

_IDX = (
    ("train-images-idx3-ubyte.gz",),
    ("train-labels-idx1-ubyte.gz",),
    ("t10k-images-idx3-ubyte.gz",),
    ("t10k-labels-idx1-ubyte.gz",),
)


@dataclass(frozen=True)
class DatasetInfo:
    """A row of the catalogue."""

    title: str
    about: str
    needed: tuple[tuple[str, ...], ...] = ()
    """Groups of files; one of each group is enough. Empty for what needs no download."""
    folders: tuple[str, ...] = ()
    """Where the files may lie, relative to the data folder; the first is where a download puts them."""
    note: str = ""
    """What else the files may be."""

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(chain.from_iterable(self.needed))


DATASETS: dict[str, DatasetInfo] = {
    "digits": DatasetInfo(
        "Digits", "1,797 handwritten digits, 8x8 grey; part of scikit-learn, nothing to download"
    ),
    "mnist": DatasetInfo(
        "MNIST",
        "70,000 handwritten digits, 28x28 grey",
        _IDX,
        ("mnist", "MNIST/raw", "."),
        "unpacked files (without .gz) do as well",
    ),
    "fashion_mnist": DatasetInfo(
        "Fashion-MNIST",
        "70,000 pieces of clothing, 28x28 grey",
        _IDX,
        ("fashion_mnist", "fashion-mnist", "FashionMNIST/raw", "."),
        "unpacked files (without .gz) do as well",
    ),
    "cifar10": DatasetInfo(
        "CIFAR-10",
        "60,000 photographs of ten kinds, 32x32 colour; the binary version",
        (tuple(f"data_batch_{n}.bin" for n in range(1, 6)), ("test_batch.bin",)),
        ("cifar10", "cifar-10-batches-bin", "."),
        "one training batch and the test batch are enough to begin",
    ),
    "text": DatasetInfo(
        "Text", "bytes of a file or folder of yours, or of the Python standard library's sources"
    ),
}


def describe(name: str) -> DatasetInfo:
    """The row for ``name``; ValueError with the nearest name where there is none."""
    if name not in DATASETS:
        raise unknown_name("dataset", name, DATASETS)
    return DATASETS[name]


def by_hand(name: str, data_dir: str | Path) -> str:
    """How to put the files of ``name`` where they are looked for, in words."""
    info = DATASETS[name]
    note = f" ({info.note})" if info.note else ""
    return f"put {', '.join(info.files)}{note} into {Path(data_dir) / info.folders[0]}"


def _present(folder: Path, file: str) -> Path | None:
    """``file`` in ``folder``, unpacked or not; None where it is neither."""
    for name in (file.removesuffix(".gz"), file):
        if (folder / name).is_file():
            return folder / name
    return None


def locate(name: str, data_dir: str | Path) -> dict[str, Path]:
    """The files of ``name`` that exist, in the first folder that has one of each group.

    FileNotFoundError, where no folder does, says what each of them lacks and what to do.
    """
    info = DATASETS[name]
    looked = []
    for relative in info.folders:
        folder = Path(data_dir) / relative
        found = {file: path for file in info.files if (path := _present(folder, file))}
        lacking = [" or ".join(group) for group in info.needed if not any(file in found for file in group)]
        if not lacking:
            return found
        looked.append(f"  {folder}: " + (f"lacks {', '.join(lacking)}" if found else "none of the files"))
    raise FileNotFoundError(
        f"no {info.title} files. Looked in\n"
        + "\n".join(looked)
        + f"\nRun `compressed-ddp data download {name}`, or {by_hand(name, data_dir)}."
    )


def table(data_dir: str | Path) -> str:
    """All datasets, a line each: the name, where it is under ``data_dir`` or how to get it, what it is."""
    rows = []
    for name, info in DATASETS.items():
        where = "needs no files"
        if info.files:
            try:
                files = locate(name, data_dir)
                where = f"{len(files)} of {len(info.files)} files in {next(iter(files.values())).parent}"
            except FileNotFoundError:
                where = f"compressed-ddp data download {name}"
        rows.append((name, where, info.about))
    widths = [max(len(row[column]) for row in rows) + 2 for column in range(2)]
    return "\n".join(f"{name:<{widths[0]}}{where:<{widths[1]}}{about}" for name, where, about in rows)
