"""Files that mean harm: archives, checkpoints and configurations that run code, or fill memory or disk."""

from __future__ import annotations

import collections
import gzip
import hashlib
import io
import json
import logging
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import JobFailed, Pool
from torch import Tensor

from compressed_ddp.cli import main
from compressed_ddp.data.archive import ArchiveError, unpack
from compressed_ddp.metrics import CsvTracker, JsonLinesTracker
from compressed_ddp.training import checkpoint
from compressed_ddp.training.checkpoint import CheckpointError, find, read
from compressed_ddp.training.config import TrainConfig
from compressed_ddp.training.folder import choose_folder
from compressed_ddp.training.place import Place
from compressed_ddp.training.reading import state_from
from compressed_ddp.training.records import records_of
from compressed_ddp.training.run import work

# --- archives --------------------------------------------------------------------------------------


def packed(*members: tarfile.TarInfo, kind: int = tarfile.PAX_FORMAT, body: bytes = b"") -> bytes:
    """A .tar.gz of ``members``, each with ``body``."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", format=kind) as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(body))
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, **headers: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.pax_headers = kind, size, headers
    return info


def lying(claimed: int, there: int) -> bytes:
    """a.bin that claims more bytes than follow."""
    out = io.BytesIO()
    out.write(member("a.bin", size=claimed).tobuf(tarfile.USTAR_FORMAT))
    out.write(b"x" * there)
    return gzip.compress(out.getvalue())


PAX = member("x", tarfile.XHDTYPE, size=12).tobuf(tarfile.USTAR_FORMAT) + b"12 path=abc\n".ljust(512, b"\0")
"""A header for the member that follows."""
ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    "a header of 20 MB": (
        lambda: packed(member("a.bin", comment="0" * 20_000_000)),
        "more than 1,048,676 bytes",
    ),
    "a name of 20 MB": (
        lambda: packed(member("a" * 20_000_000), kind=tarfile.GNU_FORMAT),
        "more than 1,048,676",
    ),
    "zeros behind it": (
        lambda: (
            packed(*(member(f"m{n}", size=100) for n in range(3)), body=b"x" * 100)
            + gzip.compress(bytes(30_000_000))
        ),
        "expected a.bin inside",  # a tape ends where it ends: what follows is not unpacked
    ),
    "a character device": (lambda: packed(member("a.bin", tarfile.CHRTYPE)), "is a link or a device"),
    "a block device": (lambda: packed(member("a.bin", tarfile.BLKTYPE)), "is a link or a device"),
    "a file with holes": (
        lambda: packed(member("a.bin", tarfile.GNUTYPE_SPARSE), kind=tarfile.GNU_FORMAT),
        "has holes",
    ),
    "shorter than it claims": (lambda: lying(100, 30), "cannot be unpacked|ends after"),
    "renamed by a header": (lambda: packed(member("a.bin", path="../../a.bin")), "leads out of the folder"),
    "a header behind a header, and so on": (
        lambda: gzip.compress(1200 * PAX + member("a.bin").tobuf() + bytes(1024)),
        "cannot be unpacked",
    ),
    "holes that are no numbers": (
        lambda: packed(member("a.bin", **{"GNU.sparse.map": "1,x"})),
        "cannot be unpacked",
    ),
    "a link by a header": (
        lambda: packed(member("a.bin", tarfile.SYMTYPE, linkpath="/etc/passwd")),
        "is a link or a device",
    ),
}


@pytest.mark.parametrize("attack", ARCHIVES)
def test_archives(tmp_path: Path, attack: str) -> None:
    make, told = ARCHIVES[attack]
    folder, archive = tmp_path / "in" / "out", tmp_path / "x.tar.gz"
    folder.mkdir(parents=True)
    archive.write_bytes(make())
    with pytest.raises(ArchiveError, match=told):
        unpack(archive, folder, ["a.bin"], 100)
    assert sorted(tmp_path.rglob("*")) == sorted([tmp_path / "in", folder, archive])


def test_a_link_where_a_file_shall_be_is_replaced(tmp_path: Path) -> None:
    """And not written through."""
    precious, folder = tmp_path / "precious", tmp_path / "out"
    precious.write_bytes(b"mine")
    folder.mkdir()
    (folder / "a.bin").symlink_to(precious)
    (tmp_path / "x.tar.gz").write_bytes(packed(member("a.bin", size=100), body=b"x" * 100))
    unpack(tmp_path / "x.tar.gz", folder, ["a.bin"], 100)
    assert precious.read_bytes() == b"mine" and not (folder / "a.bin").is_symlink()


# --- states ----------------------------------------------------------------------------------------


def saved(state: object) -> bytes:
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


class Runs:
    """Calls something when it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def changed(data: bytes, name: str, content: bytes | None = None, *, compressed: bool = False) -> bytes:
    """The archive ``data`` with another record, or the same ones packed."""
    out = io.BytesIO()
    how = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", how) as new:
        for record in old.namelist():
            mine = record.endswith(name) and content is not None
            new.writestr(record, content if mine else old.read(record))
    return out.getvalue()


def huge_claim(data: bytes) -> bytes:
    """The record of a tensor claims four gigabytes less one, in the archive's directory."""
    at = data.index(b"PK\x01\x02")
    while b"data/0" not in data[at : at + 100]:
        at = data.index(b"PK\x01\x02", at + 1)
    return data[: at + 20] + b"\xfe\xff\xff\xff" * 2 + data[at + 28 :]


def two_directories(packed: bytes) -> bytes:
    """``packed`` with a second directory, before its end, in which nothing is packed and all have a byte.

    By its own end the first one counts; for who looks right before the end, the second.
    """
    _, _, _, _, size, offset, _ = struct.unpack("<4H2LH", packed[-18:])
    harmless = bytearray(packed[offset : offset + size])
    at = 0
    while (at := harmless.find(b"PK\x01\x02", at)) >= 0:
        harmless[at + 10 : at + 12], harmless[at + 20 : at + 28] = bytes(2), struct.pack("<2L", 1, 1)
        at += 4
    return packed[:-22] + harmless + packed[-22:]


def with_comment(data: bytes) -> bytes:
    return data[:-2] + struct.pack("<H", 30) + b"a" * 30


def in_64_bits(data: bytes, *sizes: list[int]) -> bytes:
    """The record of the first tensor has its sizes in fields of 64 bits, as one of 4 GB would have."""
    *_, size, offset, _ = struct.unpack("<4H2LH", data[-18:])
    at = data.index(b"archive/data/0", offset)
    name = len(b"archive/data/0")
    extra = b"".join(struct.pack("<2H2Q", 1, 16, *pair) for pair in sizes)
    head = bytearray(data[at - 46 : at])
    head[20:28], head[30:32] = b"\xff" * 8, struct.pack("<H", len(extra))
    end = data[-22:-10] + struct.pack("<L", size + len(extra)) + data[-6:]
    return data[: at - 46] + head + data[at : at + name] + extra + data[at + name : -22] + end


A_LONG_AND_A_SHORT = {"x": torch.zeros(100), "y": torch.zeros(2)}


def as_folder(data: bytes) -> bytes:
    """The record of the first tensor has the attribute of a folder, in the archive's directory."""
    at = data.rindex(b"archive/data/0") - 46 + 38
    return data[:at] + bytes([data[at] | 0x10]) + data[at + 1 :]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def in_itself() -> dict[str, Any]:
    state: dict[str, Any] = {}
    state["again"] = state
    return state


STATES: dict[str, tuple[Callable[[], bytes], str]] = {
    "a command": (
        lambda: saved({"x": Runs(os.system, "touch ran")}),
        r"more than tensors.*posix.system|nt.system",
    ),
    "eval": (lambda: saved({"x": Runs(eval, "open('ran', 'w')")}), r"more than tensors.*eval"),
    "a bare pickle": (
        lambda: pickle.dumps({"x": Runs(os.system, "touch ran")}),
        "not a file that torch.save wrote",
    ),
    "torch's older format": (
        lambda: (out := io.BytesIO(), torch.save({}, out, _use_new_zipfile_serialization=False))[
            0
        ].getvalue(),
        "not a file that torch.save wrote",
    ),
    "packed": (lambda: changed(saved({"x": torch.zeros(10)}), "", compressed=True), "packed records"),
    "packed, behind another directory": (
        lambda: two_directories(changed(saved({"x": torch.zeros(10**6)}), "", compressed=True)),
        "its directory is not right before its end",
    ),
    "something before it": (lambda: b"PK" + saved({"x": 1}), "not a file that torch.save wrote"),
    "a record that is a folder": (
        lambda: as_folder(saved({"x": torch.zeros(10)})),  # torch would hand out memory as it finds it
        "record b'archive/data/0' is of another kind",
    ),
    "a comment": (lambda: with_comment(saved({"x": 1})), "without a comment"),
    "a size in 64 bits, twice": (
        lambda: in_64_bits(changed(saved({"x": torch.zeros(10)}), ""), [2**32 - 1] * 2, [40, 40]),
        "two sizes",
    ),
    "a claim of 4 GB": (lambda: huge_claim(saved({"x": torch.zeros(10)})), r"claims 4,294,967,294 bytes"),
    "a storage that is not all there": (
        lambda: changed(saved({"x": torch.zeros(10)}), "data/0", bytes(8)),
        "8 bytes for storage '0', a torch FloatStorage of 10",
    ),
    "two storages the other way round": (
        lambda: changed(changed(saved(A_LONG_AND_A_SHORT), "data/0", bytes(8)), "data/1", bytes(400)),
        "8 bytes for storage '0', a torch FloatStorage of 100",
    ),
    "a bytearray of 8 GB": (lambda: saved({"x": Runs(bytearray, 2**33)}), r"asks for \S+\.bytearray"),
    "a tensor of 64 GB": (
        lambda: saved({"x": Runs(Tensor, 2**34)}),
        r"asks for torch\.Tensor|_tensor\.Tensor",
    ),
    "a terabyte in 4 bytes": (
        lambda: saved({"x": torch.zeros(1).expand(2**38)}),
        "would take 1,099,511,627,776",
    ),
    "a sparse tensor": (
        lambda: saved({"x": torch.eye(3).to_sparse()}),
        "asks for torch._utils._rebuild_sparse",
    ),
    "a tensor of nothing": (
        lambda: saved({"x": torch.empty(3, device="meta")}),
        "asks for torch._utils._rebuild_meta",
    ),
    "a parameter": (lambda: saved({"x": torch.nn.Parameter(torch.ones(2))}), "asks for .*_parameter"),
    "too deep": (lambda: saved({"x": nested(100)}), "nested deeper than 32"),
    "in itself": (lambda: saved(in_itself()), "nested deeper than 32"),
    "a key that is none": (lambda: saved({(1, 2): 3}), "a key of type tuple"),
    "a set": (lambda: saved({"x": {1, 2}}), "asks for .*set"),
    "a counter": (lambda: saved({"x": collections.Counter("ab")}), "asks for collections.Counter"),
    "a list": (lambda: saved([1]), "holds a list"),
    "a truncated pickle": (
        lambda: changed(saved({"x": 1}), "data.pkl", b"\x80\x02}q"),
        "cannot read it|more than",
    ),
    "nonsense": (
        lambda: changed(saved({"x": 1}), "data.pkl", b"\x80\x02" + bytes(99)),
        "cannot read it|more than",
    ),
    "nothing": (lambda: b"", "not a file that torch.save wrote"),
}


@pytest.mark.parametrize("attack", STATES)
def test_states(tmp_path: Path, attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, told = STATES[attack]
    data = make()
    with pytest.raises(ValueError, match=told) as caught:
        state_from(data)
    assert "weights_only" not in str(caught.value), "torch's advice is to run it"
    assert not (tmp_path / "ran").exists()


def test_two_records_of_one_name() -> None:
    data = saved({"x": torch.zeros(10)})
    out = io.BytesIO(data)
    with zipfile.ZipFile(out, "a") as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr(name, b"another")
    with pytest.raises(ValueError, match="two records of one name"):
        state_from(out.getvalue())


def test_sizes_in_64_bits_are_read() -> None:
    """A record of 4 GB is too large for a test, its directory is not; torch takes it too."""
    whole = {"x": torch.arange(10.0)}
    found = state_from(in_64_bits(changed(saved(whole), ""), [40, 40]))
    assert torch.equal(found["x"], whole["x"])


def test_every_kind_of_tensor_is_read() -> None:
    """Kinds of numbers, views, and tensors that share their memory."""
    kinds = [kind for kind in vars(torch).values() if isinstance(kind, torch.dtype) and kind.itemsize <= 8]
    plain = [kind for kind in kinds if kind in INTEGERS or kind.is_floating_point * kind.itemsize > 1]
    whole = {str(kind): torch.arange(6).to(kind) for kind in {*plain, torch.bool, torch.float8_e4m3fn}}
    base = torch.arange(12.0)
    whole |= {
        "turned": base.view(3, 4).T,
        "part": base[2:5],
        "none": torch.empty(0),
        "one": torch.tensor(1.0),
    }
    found = state_from(saved(whole))
    for name, tensor in whole.items():
        assert found[name].dtype == tensor.dtype and found[name].tolist() == tensor.tolist(), name
    assert found["turned"].data_ptr() == found["part"].data_ptr() - 8


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64)


def test_any_damage_is_a_named_error() -> None:
    """Every byte of a small file in turn, and every length: a ValueError, or what was saved.

    But for what is in a record: torch does not compare its checksums, so another number is another state.
    The manifest has a hash for that.
    """
    state = {"x": torch.arange(3.0), "n": [1, "two"]}
    whole = saved(state)
    records = [bytes(record) for record in records_of(whole).values()]
    inside = {
        at for record in records for at in range(whole.index(record), whole.index(record) + len(record))
    }
    taken = 0
    for at in range(len(whole)):
        for data in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]):
            try:
                found = state_from(data)
            except ValueError:
                continue
            if at not in inside:
                assert repr(found) == repr(state), f"byte {at}"
                taken += 1
            assert len(data) == len(whole), "a part of a file was taken for all of it"
    assert taken > 0  # padding, dates, versions and checksums


def test_any_damage_to_a_checkpoint_is_found(tmp_path: Path) -> None:
    """Every byte and every length once more, against the manifest."""
    whole = saved({"x": torch.arange(3.0)})
    hashed = {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    files = {SHARED: hashed, checkpoint.rank_file(0): hashed}
    manifest = {"format": checkpoint.FORMAT, "files": files, "world_size": 1}
    (tmp_path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    (tmp_path / SHARED).write_bytes(whole)
    assert read(tmp_path, SHARED)["x"].tolist() == [0, 1, 2]
    for at in range(len(whole)):
        for data in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]):
            (tmp_path / SHARED).write_bytes(data)
            with pytest.raises(CheckpointError, match="is damaged"):
                read(tmp_path, SHARED)


# --- checkpoints in a run -----------------------------------------------------------------------------


def resume_job(rank: int, world: int, settings: dict[str, Any]) -> int:
    place = Place(rank, world, rank, torch.device("cpu"), "gloo")
    return int(work(TrainConfig.from_flat(settings), place)["steps"])


def rewrite(path: Path, file: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what ``file`` of a checkpoint holds, and let its manifest agree."""
    state = read(path, file)
    change(state)
    data = saved(state)
    (path / file).write_bytes(data)
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    manifest["files"][file] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))


def first_(tensors: dict[str, Tensor], change: Callable[[Tensor], Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name] = change(tensors[name])


def momentum(state: dict[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = state["optimizer"]["state"][0]
    return found


SHARED, RANK = checkpoint.SHARED, checkpoint.rank_file(1)
MISFITS: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "dtype": (SHARED, lambda s: first_(s["model"], Tensor.double), "is torch.float64"),
    "integers": (SHARED, lambda s: first_(s["model"], Tensor.int), "is torch.int32"),
    "shape": (SHARED, lambda s: first_(s["model"], lambda t: t[:1].clone()), "in this run"),
    "a name more": (SHARED, lambda s: s["model"].update(evil=torch.ones(1)), "'evil' on one side alone"),
    "no model": (SHARED, lambda s: s.pop("model"), "has no 'model'"),
    "momentum's shape": (SHARED, lambda s: first_(momentum(s), lambda t: t.new_zeros(7)), "of parameter 0"),
    "momentum's dtype": (SHARED, lambda s: first_(momentum(s), Tensor.long), "of parameter 0"),
    "one parameter more": (
        SHARED,
        lambda s: s["optimizer"]["state"].update({99: {}}),
        "state for parameter 99",
    ),
    "other groups": (SHARED, lambda s: s["optimizer"]["param_groups"].pop(), "groups of"),
    "a step back": (SHARED, lambda s: s["position"].update(step=-1), "step is -1"),
    "a step in words": (SHARED, lambda s: s["position"].update(step="3"), "step is '3'"),
    "another field": (SHARED, lambda s: s["position"].update(evil=1), "'evil' on one side alone"),
    "no residuals": (RANK, lambda s: s.update(sync=[]), "sync is a list"),
    "residual's dtype": (
        RANK,
        lambda s: first_(s["sync"]["residuals"], Tensor.int),
        "not a floating point tensor",
    ),
    "residual's shape": (
        RANK,
        lambda s: first_(s["sync"]["residuals"], lambda t: t[:1].clone()),
        "has shape",
    ),
    "a residual of NaN": (
        RANK,
        lambda s: first_(s["sync"]["residuals"], lambda t: t.fill_(torch.nan)),
        "NaN or infinite",
    ),
    "random state": (
        RANK,
        lambda s: s["random"].update(cpu=torch.zeros(3, dtype=torch.uint8)),
        "another length",
    ),
    "random state of the right length": (
        RANK,
        lambda s: s["random"]["cpu"].fill_(255),
        "random state 'cpu' is none of torch's",
    ),
    "the ledger": (RANK, lambda s: s["ledger"].update(steps="many"), "ledger is not"),
    "sums": (RANK, lambda s: s.update(sums=[1.0]), "sums is not a list of 3"),
}


@pytest.fixture(scope="module")
def run(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of a short run of two workers that has ended."""
    settings: dict[str, Any] = {"limit": 64, "batch_size": 8, "epochs": 1, "compress": True, "momentum": 0.9}
    settings |= {"tensorboard": False, "run_dir": str(tmp_path_factory.mktemp("attacked") / "run")}
    pool.run(2, resume_job, settings)
    return settings


@pytest.mark.parametrize("attack", MISFITS)
def test_what_does_not_fit_changes_nothing(pool: Pool, run: dict[str, Any], attack: str) -> None:
    """With right hashes: all workers say what is wrong, and none goes on."""
    file, change, told = MISFITS[attack]
    path = find(Path(run["run_dir"]))
    before = {name: (path / name).read_bytes() for name in (file, checkpoint.MANIFEST)}
    rewrite(path, file, change)
    try:
        with pytest.raises(JobFailed) as caught:
            pool.run(2, resume_job, run | {"resume": "auto", "epochs": 2})
    finally:
        for name, data in before.items():
            (path / name).write_bytes(data)
    assert sorted(caught.value.errors) == [0, 1]
    assert told in caught.value.errors[0] + caught.value.errors[1]


def test_and_what_fits_goes_on(pool: Pool, run: dict[str, Any]) -> None:
    path = find(Path(run["run_dir"]))
    rewrite(path, SHARED, lambda state: None)
    rewrite(path, RANK, lambda state: None)
    assert pool.run(2, resume_job, run | {"resume": "auto", "epochs": 2}) == [8, 8]


# --- damage ---------------------------------------------------------------------------------------------


class Heard(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def heard_job(
    rank: int, world: int, settings: dict[str, Any], restarted: int = 0
) -> tuple[int, list[int], list[str]]:
    """A run's steps, those of each line of its epochs, and what was logged."""
    heard, logger = Heard(), logging.getLogger("compressed_ddp")
    logger.addHandler(heard)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarted)
    place = Place(rank, world, rank, torch.device("cpu"), "gloo")
    try:
        summary = work(TrainConfig.from_flat(settings), place)
        return summary["steps"], [epoch["step"] for epoch in summary["history"]], heard.told
    finally:
        del os.environ["TORCHELASTIC_RESTART_COUNT"]
        logger.removeHandler(heard)


@pytest.fixture
def three(pool: Pool, tmp_path: Path) -> dict[str, Any]:
    """The settings of a run with three checkpoints, of steps 4, 8 and 12."""
    settings: dict[str, Any] = {"limit": 64, "batch_size": 8, "epochs": 3, "compress": True, "keep": 9}
    settings |= {"tensorboard": False, "run_dir": str(tmp_path / "run")}
    pool.run(2, resume_job, settings)
    return settings


def damage(run: dict[str, Any], step: int, file: str) -> Path:
    path = Path(run["run_dir"]) / "checkpoints" / f"step-{step:08d}" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    return path.parent


@pytest.mark.parametrize("restarted", [0, 1], ids=["auto", "a restart"])
@pytest.mark.parametrize("file", [RANK, SHARED, checkpoint.MANIFEST])
def test_a_damaged_newest_checkpoint_does_not_end_a_run(
    pool: Pool, three: dict[str, Any], file: str, restarted: int
) -> None:
    """All workers go back to the one before it, and one of them says why."""
    newest = damage(three, 12, file)
    if file == checkpoint.MANIFEST:
        (newest / file).write_text("{")
    older = damage(three, 8, checkpoint.rank_file(0))
    settings = three | {"epochs": 4} | ({} if restarted else {"resume": "auto"})
    found = pool.run(2, heard_job, settings, restarted)
    assert [steps for steps, _, _ in found] == [16, 16]
    told = [text for _, _, texts in found for text in texts if "is damaged" in text]
    assert len(told) == 2, told
    assert str(newest) in told[0] + told[1] and str(older) in told[0] + told[1]
    assert any(text.endswith(f"going on from {older.with_name('step-00000004')}") for text in told)
    for name in (SHARED, RANK):
        read(newest, name)  # written anew


def test_nothing_is_left_to_go_back_to(pool: Pool, three: dict[str, Any]) -> None:
    for step in (4, 8, 12):
        damage(three, step, SHARED)
    with pytest.raises(JobFailed) as caught:
        pool.run(2, heard_job, three | {"epochs": 4, "resume": "auto"})
    assert all("step-00000004 is damaged" in error for error in caught.value.errors.values())


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(pool: Pool, three: dict[str, Any]) -> None:
    newest = damage(three, 12, RANK)
    for resume in (newest, Path(three["run_dir"])):
        with pytest.raises(JobFailed, match=f"checkpoint {newest} is damaged"):
            pool.run(2, heard_job, three | {"epochs": 4, "resume": str(resume)})
    assert newest.exists()


@pytest.mark.parametrize("text", ["[]", "{", "3", '{"job": []}', "[" * 100_000, "\udcff"])
def test_a_stray_job_file_is_not_ours(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    (tmp_path / "aaa").mkdir()
    (tmp_path / "aaa" / "job.json").write_bytes(text.encode(errors="surrogateescape"))
    folder = choose_folder(TrainConfig.from_flat({"runs": str(tmp_path)}))
    assert folder.is_dir() and folder.name != "aaa"


@pytest.mark.parametrize(
    "text",
    [
        '{"format": 1, "files": {}, "world_size": -3}',
        '{"format": 1, "files": {}, "world_size": 1e9}',
        '{"format": 1, "files": {"shared.pt": {"bytes": 1}}, "world_size": 1}',
        '{"format": 1, "files": {"shared.pt": {"bytes": true, "sha256": ""}}, "world_size": 1}',
        "[" * 100_000,
        " " * (2**24 + 1),
    ],
    ids=["few workers", "many workers", "no hash", "no size", "deep", "large"],
)
def test_manifests(tmp_path: Path, text: str) -> None:
    (tmp_path / checkpoint.MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        read(tmp_path, SHARED)


# --- links in a run's folder --------------------------------------------------------------------------


@pytest.fixture
def copied(run: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The settings of a run that came from somebody, and that goes on."""
    shutil.copytree(run["run_dir"], tmp_path / "run", symlinks=True)
    return run | {"run_dir": str(tmp_path / "run"), "resume": "auto", "epochs": 3}


def test_nothing_is_written_through_links(pool: Pool, copied: dict[str, Any], tmp_path: Path) -> None:
    """To each name under which a run writes something new."""
    names = [
        ".config.yaml-new",
        ".job.json-new",
        ".summary.json-new",
        "config.yaml",
        "job.json",
        "summary.json",
    ]
    names += ["metrics.csv.partial", "metrics.jsonl.partial"]
    for name in names:
        (tmp_path / f"precious{name}").write_text("mine")
        (tmp_path / "run" / name).unlink(missing_ok=True)
        (tmp_path / "run" / name).symlink_to(tmp_path / f"precious{name}")
    pool.run(2, resume_job, copied)
    assert {name: (tmp_path / f"precious{name}").read_text() for name in names} == dict.fromkeys(
        names, "mine"
    )
    assert not [path for path in (tmp_path / "run").iterdir() if path.is_symlink()]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 12


@pytest.mark.parametrize("name", ["metrics.csv", "metrics.jsonl", "checkpoints", "tensorboard"])
def test_what_is_gone_on_with_is_no_link(
    pool: Pool, copied: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """Nothing is changed on either side of it."""
    here, there = tmp_path / "run" / name, tmp_path / "elsewhere"
    if here.exists():
        here.rename(there)
    else:
        there.mkdir()
    here.symlink_to(there)
    before = contents(there)
    with pytest.raises(JobFailed, match=f"{name} is a symbolic link"):
        pool.run(2, resume_job, copied)
    assert contents(there) == before and here.is_symlink()


def contents(path: Path) -> dict[Path, bytes]:
    return {each: each.read_bytes() for each in [path, *path.rglob("*")] if each.is_file()}


@pytest.mark.parametrize("tracker", [CsvTracker, JsonLinesTracker])
@pytest.mark.parametrize("resume_at", [None, 1])
def test_trackers_refuse_links(
    tmp_path: Path, tracker: type[CsvTracker] | type[JsonLinesTracker], resume_at: int | None
) -> None:
    (tmp_path / "precious").write_text(tracker.header)
    (tmp_path / "metrics").symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match="is a symbolic link"):
        tracker(tmp_path / "metrics", resume_at=resume_at)
    assert (tmp_path / "precious").read_text() == tracker.header


# --- configurations -----------------------------------------------------------------------------------

TAGS = [
    "ratio: !!python/object/apply:os.system ['touch ran']",
    "model: !!python/object/new:pathlib.Path.touch [ran]",
    "text: !!python/name:os.system",
    "data_dir: {class_path: subprocess.Popen, init_args: {args: [touch, ran]}}",
]


@pytest.mark.parametrize("line", TAGS)
def test_a_configuration_runs_nothing(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.yaml").write_text(line + "\n")
    with pytest.raises(SystemExit) as caught:
        main(["train", "--config", "evil.yaml"])
    assert caught.value.code == 2
    assert not Path("ran").exists() and not Path("runs").exists()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("line", TAGS)
def test_nor_does_one_of_a_run_that_is_resumed(
    run: dict[str, Any], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Path(run["run_dir"]) / "config.yaml"
    before = config.read_text()
    name = line.split(":")[0]
    others = [kept for kept in before.splitlines() if not kept.startswith(f"{name}:")]
    config.write_text("\n".join([*others, line, ""]))
    monkeypatch.chdir(tmp_path)
    try:
        with pytest.raises(SystemExit) as caught:
            main(["train", "--resume", run["run_dir"], "--workers=1"])
    finally:
        config.write_text(before)
    assert caught.value.code == 2 and not Path("ran").exists()


def test_the_examples_here_would_do_harm(tmp_path: Path) -> None:
    """Read carelessly, that is: an attack that does nothing proves nothing."""
    (tmp_path / "x").write_bytes(saved({"x": Runs(os.system, "touch ran")}))
    program = "import torch; torch.load('x', weights_only=False)"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
    program = f"import yaml; yaml.unsafe_load({TAGS[0]!r})"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert (tmp_path / "ran").exists()
