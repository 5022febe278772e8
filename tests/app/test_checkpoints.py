"""Checkpoints are whole or not there, and are checked when they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import JobFailed, Pool

from compressed_ddp.training import checkpoint
from compressed_ddp.training.checkpoint import CheckpointError, Checkpoints, find, follow, point, read
from compressed_ddp.training.place import Place


def place_of(rank: int, world: int) -> Place:
    return Place(rank, world, rank, torch.device("cpu"), "gloo")


def save_job(
    rank: int, world: int, folder: str, steps: list[int], keep: int, best: list[int], fail: int
) -> None:
    """Write checkpoints of ``steps``; rank ``fail`` cannot write the last one."""
    place, checkpoints = place_of(rank, world), Checkpoints(Path(folder), keep)
    for step in steps:
        mine: dict[str, Any] = {"rank": rank, "x": torch.full((100,), float(step))}
        if rank == fail and step == steps[-1]:
            mine["bad"] = lambda: None  # cannot be saved
        checkpoints.save(step, lambda step=step: {"step": step}, mine, place, best=step in best)


def test_what_is_written_is_read(pool: Pool, tmp_path: Path) -> None:
    pool.run(3, save_job, str(tmp_path / "c"), [5, 10], 2, [], -1)
    newest = find(tmp_path / "c" / "step-00000010")
    assert read(newest, checkpoint.SHARED) == {"step": 10}
    for rank in range(3):
        state = read(newest, checkpoint.rank_file(rank))
        assert state["rank"] == rank and bool((state["x"] == 10).all())
    assert checkpoint.manifest_of(newest)["world_size"] == 3


def test_the_newest_and_the_best_are_kept(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    pool.run(2, save_job, str(folder), [1, 2, 3, 4, 5], 2, [2], -1)
    names = [path.name for path in Checkpoints(folder, 2).all()]
    assert names == ["step-00000002", "step-00000004", "step-00000005"]
    best = Checkpoints(folder, 2).best()
    assert best is not None and read(best, checkpoint.SHARED) == {"step": 2}
    assert find(tmp_path / "run").name == "step-00000005"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_one_rank_cannot_write(pool: Pool, tmp_path: Path) -> None:
    """All ranks raise, nobody waits, and the older checkpoint is the newest still."""
    with pytest.raises(JobFailed) as caught:
        pool.run(3, save_job, str(tmp_path), [1, 2], 2, [], 1)
    assert sorted(caught.value.errors) == [0, 1, 2]
    assert "writing a checkpoint failed on rank 1" in caught.value.errors[0]
    assert [path.name for path in Checkpoints(tmp_path, 2).all()] == ["step-00000001"]
    assert not list(tmp_path.glob(".step*"))


def one(tmp_path: Path, pool: Pool) -> Path:
    pool.run(1, save_job, str(tmp_path / "checkpoints"), [1, 2], 2, [], -1)
    return tmp_path / "checkpoints" / "step-00000002"


def test_damage_is_told_with_the_way_out(pool: Pool, tmp_path: Path) -> None:
    good = one(tmp_path, pool)
    bytes_ = (good / checkpoint.SHARED).read_bytes()

    (good / checkpoint.SHARED).write_bytes(bytes_[:-1])
    with pytest.raises(
        CheckpointError, match=r"shared.pt has [\d,]+ bytes, not [\d,]+; --resume .*step-00000001"
    ):
        read(good, checkpoint.SHARED)
    flipped = bytearray(bytes_)
    flipped[len(flipped) // 2] ^= 1
    (good / checkpoint.SHARED).write_bytes(bytes(flipped))
    with pytest.raises(CheckpointError, match="another SHA-256"):
        read(good, checkpoint.SHARED)
    (good / checkpoint.SHARED).unlink()
    with pytest.raises(CheckpointError, match="has 0 bytes"):
        read(good, checkpoint.SHARED)
    for text in ("{", "[]", '{"format": 9}', '{"format": 1, "files": {}, "world_size": 1}'):
        (good / checkpoint.MANIFEST).write_text(text)
        with pytest.raises(CheckpointError):
            read(good, checkpoint.SHARED)


def test_code_in_a_checkpoint_is_not_run(pool: Pool, tmp_path: Path) -> None:
    """Even one with a right hash: files are data."""
    good = one(tmp_path, pool)
    evil = tmp_path / "evil"
    evil.mkdir()

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"x": Evil()}, good / checkpoint.SHARED)
    manifest = json.loads((good / checkpoint.MANIFEST).read_text())
    import hashlib

    data = (good / checkpoint.SHARED).read_bytes()
    manifest["files"][checkpoint.SHARED] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (good / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="damaged"):
        read(good, checkpoint.SHARED)
    assert not (tmp_path / "ran").exists()


def test_find_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        find(tmp_path / "none")
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        find(tmp_path)


@pytest.mark.parametrize("links", [True, False])
def test_pointers(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``last`` is a symbolic link, or a text file where links cannot be made."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no links here")

    if not links:
        monkeypatch.setattr(Path, "symlink_to", refuse)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        point(tmp_path / "last", name)
        assert (found := follow(tmp_path / "last")) is not None and found.resolve() == tmp_path / name
    (tmp_path / "lost").write_text("../../etc")
    assert follow(tmp_path / "lost") is None
    assert follow(tmp_path / "nothing") is None
    (tmp_path / "odd").write_bytes(b"\xff\xfe\0")
    assert follow(tmp_path / "odd") is None


def test_folders_that_are_no_checkpoints_are_left_alone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for name in ("step-00000007", "step-0abc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    assert [path.name for path in checkpoints.all()] == ["step-00000007"]
    checkpoints.drop_after(3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0abc"]
