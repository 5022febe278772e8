"""Datasets: what is read, what is refused, and who sees which example when."""

from __future__ import annotations

import gzip
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressed_ddp import data
from compressed_ddp.data import Batches, load, shares
from compressed_ddp.data import idx as idx_module
from compressed_ddp.data import text as text_module
from compressed_ddp.data.images import crop_and_flip


def idx(array: Tensor) -> bytes:
    return struct.pack(f">{array.dim() + 1}I", 0x800 + array.dim(), *array.shape) + bytes(
        array.flatten().tolist()
    )


def random_bytes(*shape: int, high: int = 256, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def write_mnist(folder: Path, train: int = 30, test: int = 10, packed: bool = True) -> dict[str, Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        "train-images-idx3-ubyte": random_bytes(train, 28, 28),
        "train-labels-idx1-ubyte": random_bytes(train, high=10, seed=1),
        "t10k-images-idx3-ubyte": random_bytes(test, 28, 28, seed=2),
        "t10k-labels-idx1-ubyte": random_bytes(test, high=10, seed=3),
    }
    for name, array in arrays.items():
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(idx(array), 1) if packed else idx(array))
    return arrays


def test_mnist_is_not_taken_for_fashion_mnist(tmp_path: Path) -> None:
    write_mnist(tmp_path, test=16, packed=False)
    labels = bytes.fromhex("07020100040104090509000609000105")
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x10" + labels)
    assert len(load("mnist", tmp_path).test) == 16
    with pytest.raises(ValueError, match="these are the files of mnist"):
        load("fashion_mnist", tmp_path)


def write_cifar(folder: Path, batches: int = 5, images: int = 4) -> list[Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for n, name in enumerate([*(f"data_batch_{n}.bin" for n in range(1, batches + 1)), "test_batch.bin"]):
        rows = random_bytes(images, 3073, seed=n)
        rows[:, 0] %= 10
        (folder / name).write_bytes(bytes(rows.flatten().tolist()))
        records.append(rows)
    return records


# What is read


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "where", "mean", "std"),
    [
        ("mnist", "mnist", 0.1307, 0.3081),
        ("mnist", "MNIST/raw", 0.1307, 0.3081),
        ("mnist", ".", 0.1307, 0.3081),
        ("fashion_mnist", "fashion_mnist", 0.2860, 0.3530),
        ("fashion_mnist", "fashion-mnist", 0.2860, 0.3530),
        ("fashion_mnist", "FashionMNIST/raw", 0.2860, 0.3530),
    ],
)
def test_idx_datasets(tmp_path: Path, name: str, where: str, mean: float, std: float, packed: bool) -> None:
    arrays = write_mnist(tmp_path / where, packed=packed)
    dataset = load(name, tmp_path)
    assert (dataset.name, dataset.kind, dataset.shape, dataset.classes) == (name, "image", (1, 28, 28), 10)
    assert "30 training images, 10 test images" in dataset.about
    for split, prefix in ((dataset.train, "train"), (dataset.test, "t10k")):
        indices = torch.tensor([7, 0, 7])
        inputs, targets = split.batch(indices)
        pixels = arrays[f"{prefix}-images-idx3-ubyte"][indices].double() / 255
        assert inputs.dtype == torch.float32 and targets.dtype == torch.int64
        torch.testing.assert_close(inputs, ((pixels - mean) / std).unsqueeze(1).float())
        assert torch.equal(targets, arrays[f"{prefix}-labels-idx1-ubyte"][indices].long())


def test_folders_are_searched_in_order_and_an_incomplete_one_is_passed_over(tmp_path: Path) -> None:
    write_mnist(tmp_path, train=11)
    write_mnist(tmp_path / "MNIST" / "raw", train=12)
    write_mnist(tmp_path / "mnist", train=13)
    assert len(load("mnist", tmp_path).train) == 13
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    assert len(load("mnist", tmp_path).train) == 12


@pytest.mark.parametrize("where", ["cifar10", "cifar-10-batches-bin", "."])
@pytest.mark.parametrize("batches", [1, 5])
def test_cifar10(tmp_path: Path, where: str, batches: int) -> None:
    *train, test = write_cifar(tmp_path / where, batches)
    dataset = load("cifar10", tmp_path)
    assert dataset.shape == (3, 32, 32)
    expected = f"CIFAR-10, {4 * batches} training images ({batches} of 5 batches), 4 test images"
    assert dataset.about == expected
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
    std = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
    for split, rows in ((dataset.train, torch.cat(train)), (dataset.test, test)):
        inputs, targets = split.batch(torch.arange(len(split)))
        torch.testing.assert_close(inputs, (rows[:, 1:].reshape(-1, 3, 32, 32) / 255 - mean) / std)
        assert torch.equal(targets, rows[:, 0].long())


def test_augmentation_is_for_training_alone(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    dataset = load("cifar10", tmp_path)
    everything = torch.arange(4)
    for split, augmented in ((dataset.train, True), (dataset.test, False)):
        plain, _ = split.batch(everything)
        drawn, _ = split.batch(everything, torch.Generator().manual_seed(3))
        again, _ = split.batch(everything, torch.Generator().manual_seed(3))
        assert torch.equal(plain, drawn) is not augmented
        assert torch.equal(drawn, again)


def test_crop_and_flip_equals_one_image_at_a_time() -> None:
    images = random_bytes(200, 3, 32, 32)
    fast = crop_and_flip(images, torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    down, right = torch.randint(0, 9, (2, 200), generator=generator).tolist()
    flips = torch.randint(0, 2, (200,), generator=generator).tolist()
    assert set(down) == set(right) == set(range(9)) and set(flips) == {0, 1}
    for image, y, x, flip, got in zip(images, down, right, flips, fast, strict=True):
        canvas = torch.zeros(3, 40, 40, dtype=torch.uint8)
        canvas[:, 4:36, 4:36] = image
        crop = canvas[:, y : y + 32, x : x + 32]
        assert torch.equal(got, crop.flip(2) if flip else crop)


def test_digits() -> None:
    pytest.importorskip("sklearn")
    dataset = load("digits", "no such folder")
    assert (len(dataset.train), len(dataset.test), dataset.shape) == (1437, 360, (1, 8, 8))
    inputs, targets = dataset.train.batch(torch.arange(1437))
    assert abs(float(inputs.mean())) < 0.02 and abs(float(inputs.std()) - 1) < 0.02
    assert targets.bincount().min() > 120
    assert torch.equal(load("digits").train.batch(torch.arange(9))[0], inputs[:9])


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'compressed-ddp\[train\]'"):
        load("digits")


def test_text_file(tmp_path: Path) -> None:
    content = bytes(random_bytes(1005).tolist())
    path = tmp_path / "book"
    path.write_bytes(content)
    dataset = load("text", text=path, block=10)
    assert (dataset.kind, dataset.shape, dataset.classes) == ("text", (10,), 256)
    # 904 training bytes: 90 windows need 901; 101 test bytes: 10 windows need all of them.
    assert (len(dataset.train), len(dataset.test)) == (90, 10)
    inputs, targets = dataset.train.batch(torch.tensor([89, 0]))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [list(content[890:900]), list(content[:10])]
    assert targets.tolist() == [list(content[891:901]), list(content[1:11])]
    assert dataset.test.batch(torch.tensor([9]))[1].tolist() == [list(content[995:1005])]


def test_text_folder(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "z.txt").write_bytes(b"z" * 100)
    (tmp_path / "a.md").write_bytes(b"a" * 100)
    (tmp_path / "b" / "c.py").write_bytes(b"c" * 100)
    (tmp_path / "picture.png").write_bytes(b"p" * 100)
    (tmp_path / ".hidden" / "h.txt").write_bytes(b"h" * 100)
    (tmp_path / "link.txt").symlink_to(tmp_path / "picture.png")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    dataset = load("text", text=tmp_path, block=1)
    inputs, _ = dataset.train.batch(torch.arange(len(dataset.train)))
    assert bytes(inputs.flatten().tolist()) == b"a" * 100 + b"z" * 100 + b"c" * 69


@pytest.mark.parametrize("name", ["b.txt", "b"], ids=["a file", "a folder"])
def test_text_that_may_not_be_read_is_an_error(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out, this host would train on other text than those that can read it."""
    (tmp_path / "a.txt").write_bytes(b"a" * 100)
    (tmp_path / "b").mkdir()
    (tmp_path / "b.txt").write_bytes(b"b" * 100)
    refused = str(tmp_path / name)

    def refuse(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if str(path) == refused:
                raise PermissionError(13, "Permission denied", refused)
            return real(path, *args, **kwargs)

        return call

    monkeypatch.setattr(text_module.os, "scandir", refuse(os.scandir))  # root may read everything
    monkeypatch.setattr(Path, "open", refuse(Path.open))
    with pytest.raises(ValueError, match=rf"{refused}: cannot be read \(Permission denied\)"):
        load("text", text=tmp_path, block=1)


def test_the_standard_library_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "LIBRARY_BYTES", 300_000)
    dataset = load("text")
    assert "standard library: 270,000 training bytes, 30,000 test bytes" in dataset.about
    tokens, _ = dataset.train.batch(torch.arange(len(dataset.train)))
    assert b"import " in bytes(tokens.flatten().tolist())


def test_text_that_is_too_large_or_missing_or_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 1000)
    with pytest.raises(ValueError, match=r"at least 1290 bytes.*found 1000.*smaller block"):
        load("text", text=path)
    with pytest.raises(FileNotFoundError, match=r"no text at .*nowhere: give a file or a folder"):
        load("text", text=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no text files in this folder"):
        load("text", text=tmp_path / "empty")
    monkeypatch.setattr(text_module, "MAX_BYTES", 999)
    for source in (path, tmp_path):
        with pytest.raises(ValueError, match="more than 999"):
            load("text", text=source)


# What is refused


@pytest.mark.parametrize("shape", [(1, 2**14, 2**14), (2**18, 28, 28)], ids=["large images", "many images"])
def test_a_small_file_is_not_unpacked_to_much(
    tmp_path: Path, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header that none of these datasets has: zeros, packed a thousand times, stay packed."""
    write_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(struct.pack(">4I", 0x803, *shape) + bytes(2**22)))
    taken = 0

    class Watched(gzip.GzipFile):
        def read(self, size: int | None = -1) -> bytes:
            nonlocal taken
            data = super().read(size)
            taken += len(data)
            return data

    monkeypatch.setattr(idx_module.gzip, "GzipFile", Watched)
    with pytest.raises(ValueError, match=r"claims 262144 x 28 x 28|28 x 28, found"):
        load("mnist", tmp_path)
    assert taken < 1000  # headers and the labels


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda old: b"", "idx header of 16 bytes, found 0"),
        (lambda old: old[:9], "idx header of 16 bytes, found 9"),
        (lambda old: b"\x00\x00\x08\x01" + old[4:], "expected idx magic 0x00000803.*found 0x00000801"),
        (lambda old: old[:-1], "30 x 28 x 28 = 23520 bytes after the header, found only 23519"),
        (lambda old: old + b"\x00", "23520 bytes after the header, found more"),
        (lambda old: old[:4] + struct.pack(">I", 2**31) + old[8:], "claims 2147483648 x 28 x 28"),
        (lambda old: old[:4] + struct.pack(">I", 0) + old[8:], "claims 0 x 28 x 28"),
        (lambda old: old[:4] + struct.pack(">I", 60_001) + old[8:], "claims 60001 x 28 x 28"),
        (lambda old: old[:4] + struct.pack(">3I", 30, 14, 56) + old[16:], r"28 x 28, found \(14, 56\)"),
        (lambda old: old[:4] + struct.pack(">I", 29) + old[8:-784], "29 images, but .* has 30 labels"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_damaged_idx(tmp_path: Path, packed: bool, change: Callable[[bytes], bytes], message: str) -> None:
    write_mnist(tmp_path, packed=packed)
    path = tmp_path / ("train-images-idx3-ubyte.gz" if packed else "train-images-idx3-ubyte")
    damage(path, (lambda old: gzip.compress(change(gzip.decompress(old)))) if packed else change)
    with pytest.raises(ValueError, match=message) as caught:
        load("mnist", tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda old: old[: len(old) // 2],
        lambda old: old[:-8] + bytes(4) + old[-4:],  # the checksum
        lambda old: old[:3] + b"\xff" * 20 + old[23:],
        lambda old: old[:500] + bytes(500) + old[1000:],
    ],
)
def test_damaged_gzip(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    damage(path, change)
    with pytest.raises(ValueError, match="damaged gzip") as caught:
        load("mnist", tmp_path)
    assert str(path) in str(caught.value)


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is asked of the decompressor than the header promises, and a byte."""
    write_mnist(tmp_path)
    path = tmp_path / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(struct.pack(">2I", 0x801, 10) + bytes(5_000_000), 1))
    asked = []

    class Watched(gzip.GzipFile):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(size)
            return super().read(size)

    monkeypatch.setattr(idx_module.gzip, "GzipFile", Watched)
    with pytest.raises(ValueError, match="10 = 10 bytes after the header, found more"):
        load("mnist", tmp_path)
    assert asked[-2:] == [8, 11]


def test_labels_out_of_range(tmp_path: Path) -> None:
    write_mnist(tmp_path, packed=False)
    damage(tmp_path / "t10k-labels-idx1-ubyte", lambda old: old[:-1] + b"\x0a")
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte: expected labels 0 to 9, found 10"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda old: old[:-1], "records of 3073 bytes.*found 12,291 bytes"),
        (lambda old: old + b"\x00", "found 12,293 bytes"),
        (lambda old: b"", "found 0 bytes"),
        (lambda old: b"\xff" + old[1:], "labels 0 to 9, found 255"),
    ],
)
@pytest.mark.parametrize("name", ["data_batch_3.bin", "test_batch.bin"])
def test_damaged_cifar(tmp_path: Path, name: str, change: Callable[[bytes], bytes], message: str) -> None:
    write_cifar(tmp_path / "cifar10")
    damage(tmp_path / "cifar10" / name, change)
    with pytest.raises(ValueError, match=message) as caught:
        load("cifar10", tmp_path)
    assert str(tmp_path / "cifar10" / name) in str(caught.value)


@pytest.mark.parametrize("name", [name for name, info in data.DATASETS.items() if info.files])
def test_missing_files_say_where_and_how(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        load(name, tmp_path)
    message = str(caught.value)
    assert f"`compressed-ddp data download {name}`" in message
    for folder in data.DATASETS[name].folders:
        assert f"{tmp_path / folder}:" in message
    for file in data.DATASETS[name].files:
        assert file in message


def test_a_folder_that_lacks_some_files_is_told_which(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar10")
    (tmp_path / "cifar10" / "test_batch.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"cifar10: lacks test_batch\.bin\n"):
        load("cifar10", tmp_path)


def test_table_says_what_is_here(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar10", batches=2)
    lines = {line.split()[0]: line for line in data.table(tmp_path).splitlines()}
    assert set(lines) == set(data.DATASETS)
    assert f"3 of 6 files in {tmp_path / 'cifar10'}" in lines["cifar10"]
    assert "compressed-ddp data download mnist" in lines["mnist"]
    assert "needs no files" in lines["text"]


# Which part


def rows_of(split: data.Split) -> set[bytes]:
    inputs, _ = split.batch(torch.arange(len(split)))
    return {bytes(row.contiguous().view(torch.uint8).flatten().tolist()) for row in inputs}


def test_validation_and_limit_are_disjoint_parts_of_training(tmp_path: Path) -> None:
    write_mnist(tmp_path, train=30)
    whole = load("mnist", tmp_path)
    part = load("mnist", tmp_path, validation=8, limit=12)
    assert (len(part.train), len(part.test)) == (12, 8)
    train, held = rows_of(part.train), rows_of(part.test)
    assert len(train) == 12 and len(held) == 8 and not train & held
    assert train | held < rows_of(whole.train)
    assert not held & rows_of(whole.test)
    assert "trained on 12 examples, tested on 8 held out" in part.about
    torch.manual_seed(99)
    assert rows_of(load("mnist", tmp_path, validation=8).test) == held
    everything = load("mnist", tmp_path, validation=8)
    assert train < rows_of(everything.train) and rows_of(everything.train) | held == rows_of(whole.train)
    limited = load("mnist", tmp_path, limit=12)
    assert len(limited.train) == 12 and rows_of(limited.test) == rows_of(whole.test)


def test_text_holds_out_the_last_training_windows(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(bytes(random_bytes(2000).tolist()))
    whole = load("text", text=path, block=10)
    part = load("text", text=path, block=10, validation=20, limit=50)
    last = torch.arange(len(whole.train) - 20, len(whole.train))
    assert torch.equal(part.test.batch(torch.arange(20))[0], whole.train.batch(last)[0])
    assert len(part.train) == 50 and not rows_of(part.train) & rows_of(part.test)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": -1}, "validation must be 0 .* got -1"),
        ({"validation": 30}, "to 29, got 30: mnist has 30 training examples"),
        ({"limit": 0}, "limit must be 1 to 30, got 0.*leave it out"),
        ({"limit": 26, "validation": 5}, "limit must be 1 to 25, got 26"),
        ({"text": "x"}, "goes with dataset 'text', not with 'mnist'"),
    ],
)
def test_bad_parts(tmp_path: Path, options: dict[str, object], message: str) -> None:
    write_mnist(tmp_path, train=30)
    with pytest.raises(ValueError, match=message):
        load("mnist", tmp_path, **options)  # type: ignore[arg-type]


def test_bad_names_and_blocks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown dataset 'cifar'; did you mean 'cifar10'"):
        load("cifar", tmp_path)
    with pytest.raises(ValueError, match="block must be at least 1 token, got 0"):
        load("text", block=0)


# Who sees which example when


class Numbers:
    """Example i is the number i; with a generator, the target is a draw."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        drawn = torch.zeros_like(indices)
        if generator is not None:
            drawn = torch.randint(0, 2**40, indices.shape, generator=generator)
        return indices.clone(), drawn


Told = list[tuple[list[int], list[int], int]]


def told(n: int, size: int, rank: int, world: int, epoch: int = 0, seen: int = 0, seed: int = 7) -> Told:
    batches = Batches(Numbers(n), size, rank=rank, world_size=world, seed=seed)
    result = [(x.tolist(), y.tolist(), after) for x, y, after in batches.epoch(epoch, seen)]
    assert len(result) == batches.steps(seen)
    return result


def order(n: int, epoch: int, seed: int = 7) -> list[int]:
    """What DistributedSampler promises: a permutation seeded with seed + epoch."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


@pytest.mark.parametrize(("n", "size", "world"), [(103, 8, 4), (96, 8, 3), (5, 8, 4), (7, 2, 1), (2, 3, 5)])
def test_all_workers_together_see_everything(n: int, size: int, world: int) -> None:
    runs = [told(n, size, rank, world, epoch=2) for rank in range(world)]
    shapes = [[(len(x), after) for x, _, after in run] for run in runs]
    assert all(shape == shapes[0] for shape in shapes)
    assert all(length == size for length, _ in shapes[0][:-1])
    share = -(-n // world)
    assert shapes[0][-1][1] == share * world
    flat = [[i for x, _, _ in run for i in x] for run in runs]
    dealt = [i for row in zip(*flat, strict=True) for i in row]
    assert dealt[:n] == order(n, 2)
    assert len(dealt) == share * world


def test_epochs_and_seeds_differ() -> None:
    first = told(50, 50, 0, 1)
    assert first == told(50, 50, 0, 1)
    for other in (told(50, 50, 0, 1, epoch=1), told(50, 50, 0, 1, seed=100)):
        assert other[0][0] != first[0][0] and other[0][1] != first[0][1]


def test_draws_differ_between_batches_and_workers() -> None:
    draws = [tuple(y) for rank in range(4) for _, y, _ in told(64, 4, rank, 4)]
    assert len(set(draws)) == len(draws) == 16


@pytest.mark.parametrize("rank", range(4))
def test_resuming_gives_the_remaining_batches(rank: int) -> None:
    whole = told(103, 8, rank, 4, epoch=1)
    for done, (_, _, seen) in enumerate(whole, start=1):
        assert told(103, 8, rank, 4, epoch=1, seen=seen) == whole[done:]


@pytest.mark.parametrize(("steps", "seen"), [(1, 32), (2, 64), (3, 96)])
def test_resuming_with_fewer_workers_continues_the_same_order(steps: int, seen: int) -> None:
    before = [told(200, 8, rank, 4)[:steps] for rank in range(4)]
    assert {run[-1][2] for run in before} == {seen}
    flat = [[i for x, _, _ in told(200, 8, rank, 3, seen=seen) for i in x] for rank in range(3)]
    after = [i for row in zip(*flat, strict=True) for i in row]
    start = seen // 3 * 3  # up to two come again
    assert after[: 200 - start] == order(200, 0)[start:]
    already = {i for run in before for x, _, _ in run for i in x}
    assert already | set(after) == set(range(200)) and len(already & set(after[: 200 - start])) == seen % 3


def test_a_finished_epoch_stays_finished() -> None:
    for n, before, after in ((10, 4, 3), (10, 2, 3), (10, 3, 4), (10, 5, 1)):
        seen = told(n, 4, 0, before)[-1][2]
        assert told(n, 4, 0, after, seen=seen) == []


@pytest.mark.parametrize(("n", "size", "world"), [(103, 8, 4), (96, 8, 3), (3, 2, 5), (0, 2, 2)])
def test_evaluation_sees_each_example_once(n: int, size: int, world: int) -> None:
    rows = [[x.tolist() for x, _ in shares(Numbers(n), size, rank, world)] for rank in range(world)]
    for rank, row in enumerate(rows):
        assert [i for x in row for i in x] == list(range(rank, n, world))
        assert all(len(x) == size for x in row[:-1]) and all(row)
    assert all(drawn.sum() == 0 for _, drawn in shares(Numbers(5), 5, 0, 1))


def test_bad_shares() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        Batches(Numbers(3), 0, rank=0, world_size=1, seed=0)
    with pytest.raises(ValueError, match="rank must be 0 to world_size - 1 = 1, got 2"):
        shares(Numbers(3), 1, 2, 2)
    with pytest.raises(ValueError, match="empty"):
        Batches(Numbers(0), 1, rank=0, world_size=1, seed=0)
    batches = Batches(Numbers(3), 1, rank=0, world_size=1, seed=0)
    with pytest.raises(ValueError, match="got -3; 0 begins it"):
        batches.epoch(0, -3)
    with pytest.raises(ValueError, match="epochs count from 0, got -1"):
        batches.epoch(-1)
