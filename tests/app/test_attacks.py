"""Files that mean harm: archives, checkpoints and configurations that run code, or fill memory or disk."""

from __future__ import annotations

import collections
import gzip
import hashlib
import io
import json
import os
import pickle
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
from compressed_ddp.training import checkpoint
from compressed_ddp.training.checkpoint import CheckpointError, find, read
from compressed_ddp.training.config import TrainConfig
from compressed_ddp.training.place import Place
from compressed_ddp.training.reading import state_from
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
    "a claim of 4 GB": (lambda: huge_claim(saved({"x": torch.zeros(10)})), r"claim 4,294,\d+,\d+ bytes"),
    "a terabyte in 4 bytes": (
        lambda: saved({"x": torch.zeros(1).expand(2**38)}),
        "would take 1,099,511,627,776",
    ),
    "a sparse tensor": (lambda: saved({"x": torch.eye(3).to_sparse()}), "not a plain one"),
    "a tensor of nothing": (
        lambda: saved({"x": torch.empty(3, device="meta")}),
        "not a plain one|cannot read it",
    ),
    "a parameter": (lambda: saved({"x": torch.nn.Parameter(torch.ones(2))}), "not a plain one"),
    "too deep": (lambda: saved({"x": nested(100)}), "nested deeper than 32"),
    "in itself": (lambda: saved(in_itself()), "nested deeper than 32"),
    "a key that is none": (lambda: saved({(1, 2): 3}), "a key of type tuple"),
    "a set": (lambda: saved({"x": {1, 2}}), "it holds a set"),
    "a counter": (lambda: saved({"x": collections.Counter("ab")}), "it holds a Counter"),
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


def test_any_damage_is_a_named_error() -> None:
    """Every byte of a small file in turn, and every length: a ValueError, or a dictionary."""
    whole = saved({"x": torch.arange(3.0), "n": [1, "two"]})
    taken = 0
    for at in range(len(whole)):
        for data in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]):
            try:
                taken += isinstance(state_from(data), dict)
            except ValueError:
                pass
    assert taken < len(whole)  # bytes between records, dates and checksums that torch does not read


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
