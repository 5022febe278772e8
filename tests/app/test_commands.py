"""The program as its users start it: whole processes, from the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from compressed_ddp.cli import main
from compressed_ddp.training import checkpoint, compare
from compressed_ddp.training.checkpoint import Checkpoints, find, read
from compressed_ddp.training.config import Compress, LocalSteps, TrainConfig
from compressed_ddp.training.folder import choose_folder, new_folder, place_folder

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "-m", "compressed_ddp"]
SHORT = ["--limit=96", "--batch-size=8", "--epochs=2", "--log-every=2"]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def program(*arguments: str, folder: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run ``compressed-ddp`` in ``folder``; its exit status must be ``status``."""
    done = subprocess.run(
        [*PROGRAM, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of two workers in ``runs``, and what it printed in ``out``."""
    folder = tmp_path_factory.mktemp("trained")
    done = program(
        "train", "--workers=2", "--compress", "--ratio=0.05", "--log-json", "--seed=3", *SHORT, folder=folder
    )
    (folder / "out").write_text(done.stdout)
    return folder


def test_a_run_leaves_everything_behind(trained: Path) -> None:
    run = trained / "runs" / "last"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["workers"] == 2 and summary["steps"] == 12 and summary["epochs"] == 2
    assert 0 < summary["payload_sent"] < 0.2 * summary["dense_ring"]
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["ratio"] == 0.05 and config["compress"] is True and config["lr"] == 0.05
    assert len((run / "metrics.csv").read_text().splitlines()) > 12
    for line in (run / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["step"] <= 12
    assert find(run).name == "step-00000012"


def test_progress_as_json(trained: Path) -> None:
    events = [json.loads(line) for line in (trained / "out").read_text().splitlines()]
    assert [event["event"] for event in events].count("epoch") == 2
    assert events[-1]["event"] == "summary" and events[-1]["workers"] == 2


def test_tensorboards_own_reader_finds_the_tags(trained: Path) -> None:
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(trained / "runs" / "last" / "tensorboard"))
    reader.Reload()
    tags = reader.Tags()
    wanted = {"train/loss", "train/accuracy", "train/lr", "test/loss", "test/accuracy"}
    wanted |= {"sync/bytes_sent", "sync/bytes_received", "sync/ratio", "sync/residual_norm", "time/step"}
    wanted |= {"sync/residual_age"}
    wanted |= {f"time/{phase}" for phase in ("select", "encode", "wait", "decode", "exposed")}
    assert wanted <= set(tags["scalars"])
    assert {"gradients", "residuals"} <= set(tags["histograms"])
    assert [event.step for event in reader.Scalars("train/loss")] == [2, 4, 6, 8, 10, 12]


def test_resume_goes_on_with_the_runs_own_configuration(trained: Path) -> None:
    """The ratio, the seed and the workers are the run's; only what is given now is new."""
    before = find(trained / "runs" / "last")
    done = program("train", "--resume", "runs/last", "--epochs=3", "--no-log-json", folder=trained)
    assert f"resumed from {before.relative_to(trained)}" in done.stderr
    run = trained / "runs" / "last"
    summary = json.loads((run / "summary.json").read_text())
    assert (
        summary["steps"] == 18
        and summary["workers"] == 2
        and summary["method"].startswith("topk, ratio 0.05")
    )
    assert len(summary["history"]) == 3
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and steps[-1] == 18


def test_a_run_that_is_at_its_end_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trial of few steps has left its max_steps behind: the real run must not end as if it were done."""
    again = ["train", "--run-dir=a", "--resume=auto", "--limit=12", "--batch-size=2", "--epochs=1"]
    again += ["--no-tensorboard"]
    in_process([*again, "--max-steps=2"], 0, tmp_path, monkeypatch, capsys)
    assert "step 2 of max_steps 2; --max-steps null" in in_process(again, 0, tmp_path, monkeypatch, capsys)
    further = in_process([*again, "--max-steps=null"], 0, tmp_path, monkeypatch, capsys)
    assert "nothing to train" not in further
    assert "all 1 epochs of this run are done" in in_process(again, 0, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("flag", ["--runs=file", "--run-dir=file", "--run-dir=file/inside"])
def test_a_folder_that_cannot_be_made_is_told(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    told = in_process(["train", flag, "--limit=12", "--max-steps=1"], 1, tmp_path, monkeypatch, capsys)
    assert "file" in told and "--run-dir" in told and "Errno" not in told
    assert (tmp_path / "file").read_text() == "mine"


def test_a_damaged_checkpoint_is_told_in_a_line(trained: Path) -> None:
    newest = find(trained / "runs" / "last")
    path = newest / checkpoint.rank_file(1)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    try:
        done = program("train", "--resume", "runs/last", "--epochs=9", folder=trained, status=1)
    finally:
        path.write_bytes(whole)
    assert f"rank-0001.pt has 1,000 bytes, not {len(whole):,}" in done.stderr
    assert "is an older one" in done.stderr and "Traceback" not in done.stderr
    assert find(trained / "runs" / "last") == newest


def in_process(
    arguments: list[str],
    status: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """What a command prints that starts no workers."""
    monkeypatch.chdir(folder)
    assert main(arguments) == status
    printed = capsys.readouterr()
    return printed.out + printed.err


def test_wrong_data_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    told = in_process(["train", "--dataset=mnist", "--workers=2"], 1, tmp_path, monkeypatch, capsys)
    assert "compressed-ddp data download mnist" in told
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / "data" / "mnist" / f"{name}-ubyte").write_bytes(b"not an image at all")
    told = in_process(["train", "--dataset=mnist", "--workers=2"], 1, tmp_path, monkeypatch, capsys)
    assert "train-labels-idx1-ubyte: expected idx magic" in told
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--compressor=nonsense", "unknown compressor 'nonsense'"),
        ("--memory=ef21 --momentum-correction", "add --no-momentum-masking, or use --memory ef"),
        ("--memory=ef21 --compressor=terngrad", "its error can exceed the signal"),
        ("--collective=nonsense", "unknown collective 'nonsense'"),
    ],
)
def test_compression_that_cannot_be_is_told_before_workers_start(
    flags: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["train", "--workers=2", "--compress", *flags.split()])
    assert caught.value.code == 2 and capsys.readouterr().err.count(told) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_here_is_told_before_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = in_process(["train", "--device=cuda", "--workers=2"], 1, tmp_path, monkeypatch, capsys)
    assert "no CUDA device is usable here" in told and told.count("\n") == 1
    told = in_process(["train", "--backend=nccl", "--workers=2"], 1, tmp_path, monkeypatch, capsys)
    assert "nccl needs CUDA" in told and not list(tmp_path.iterdir())


def test_a_restart_finds_its_folder_not_the_pointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``runs/last`` leads to the same job file; taken for the folder it would lead to itself."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for n in range(20):
        config = TrainConfig.from_flat({"runs": str(tmp_path / f"runs{n}")})
        folder = new_folder(config)
        place_folder(config, folder)
        assert choose_folder(config) == folder


def test_runs_that_begin_in_the_same_second(tmp_path: Path) -> None:
    config = TrainConfig.from_flat({"runs": str(tmp_path)})
    assert len({new_folder(config) for _ in range(5)}) == 5


def test_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train", "compare"):
        assert "resnet50" in in_process([command, "--model", "list"], 0, tmp_path, monkeypatch, capsys)
    assert not list(tmp_path.iterdir())
    assert "fashion_mnist" in in_process(["data", "list"], 0, tmp_path, monkeypatch, capsys)
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(command in text for command in ("train", "compare", "data", "info"))


def test_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--limit=96", "--epochs=1", "--keep=0", "--ratios=1,0.1", "--out=cmp", "--no-tensorboard"]
    done = program("compare", *arguments, folder=tmp_path)
    assert "dense" in done.stdout and "topk, ratio 0.1" in done.stdout
    assert {path.name for path in (tmp_path / "cmp").iterdir() if path.is_file()} == {
        *("compare.csv", "curves.csv", "accuracy_over_epochs.png", "accuracy_over_bytes.png")
    }
    csv = (tmp_path / "cmp" / "compare.csv").read_text()
    again = in_process(["compare", *arguments], 0, tmp_path, monkeypatch, capsys)
    assert (
        "dense" in again and (tmp_path / "cmp" / "compare.csv").read_text() == csv
    )  # nothing was trained again
    more = in_process(["compare", *arguments, "--lr=0.1"], 1, tmp_path, monkeypatch, capsys)
    assert "has a run with other settings" in more
    alone = in_process(["compare", "--workers=1"], 1, tmp_path, monkeypatch, capsys)
    assert "one worker alone sends nothing" in alone
    for wrong, told in (("1,zero", "ratios must be numbers"), ("1,2", "ratio must be in (0, 1], got 2.0")):
        assert told in in_process(["compare", f"--ratios={wrong}"], 1, tmp_path, monkeypatch, capsys)


def test_a_comparison_without_data_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong, told in (
        ("--dataset=mnist", "compressed-ddp data download mnist"),
        ("--model=resnet81", "unknown model 'resnet81'"),
    ):
        found = in_process(["compare", wrong], 1, tmp_path, monkeypatch, capsys)
        assert found.count(told) == 1 and "==" not in found
    assert not list(tmp_path.iterdir())


def planned(
    arguments: str, monkeypatch: pytest.MonkeyPatch, status: int = 1
) -> list[tuple[TrainConfig, Path]]:
    """The runs of a comparison, none of which is started."""
    asked: list[tuple[TrainConfig, Path]] = []
    monkeypatch.setattr(compare, "run", lambda config, folder: asked.append((config, folder)) or status)
    assert main(["compare", *arguments.split()]) == status
    return asked


@pytest.mark.parametrize(
    "flags",
    [
        "--optimizer=adamw --split-optimizer=true",
        "--compress --optimizer=adamw --freeze-after=9",
        "--momentum-correction --no-momentum-masking --ratio-schedule=warmup --ratio-warmup=1",
        "--local-steps=4 --outer-lr=0.5 --outer-momentum=0.5",
    ],
)
def test_what_is_compared_is_compressed_and_dense_is_not(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (dense, _), (compressed, _) = planned(f"{flags} --ratios=1,0.01", monkeypatch)
    assert not dense.compress and dense.switch == Compress() and dense.meetings == LocalSteps()
    assert compressed.compress and compressed.compression.ratio == 0.01
    assert compressed.switch != Compress(compress=True) or compressed.meetings != LocalSteps()


def test_an_interrupted_comparison_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run that was cut off goes on from its checkpoint, with the same command."""
    arguments = ["--limit=64", "--batch-size=16", "--epochs=2", "--ratios=0.1", "--out=cmp"]
    arguments += ["--no-tensorboard"]
    folder = tmp_path / "cmp" / "ratio-0.1-seed-0"
    program("compare", *arguments, folder=tmp_path)
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    other = in_process(["compare", *arguments, "--lr=0.1"], 1, tmp_path, monkeypatch, capsys)
    assert "has a run with other settings" in other
    done = program("compare", *arguments, folder=tmp_path)
    assert "resumed from cmp/ratio-0.1-seed-0/checkpoints/step-00000002" in done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 4 and len(summary["history"]) == 2


def workers_of(launcher: int) -> list[int]:
    """The processes that torchrun has started."""
    listed = subprocess.run(
        ["pgrep", "-P", str(launcher)], capture_output=True, text=True, check=False
    ).stdout
    return [int(pid) for pid in listed.split()]


LONGER = ["--compress", "--ratio=0.05", "--limit=160", "--batch-size=4", "--epochs=2", "--keep=99"]
LONGER += ["--checkpoint-every=4", "--no-tensorboard"]
# torchrun gives workers 30 s to end before it kills them, and one that is stopped takes all of it.
TORCHRUN = """
import signal
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.run import main
LocalElasticAgent._shutdown.__defaults__ = (signal.SIGTERM, 2)
main()
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers from its beginning to its end."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    program("train", "--workers=2", *LONGER, "--run-dir=whole", folder=folder)
    return folder / "whole"


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes with pgrep")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_kill_and_restart_under_torchrun(tmp_path: Path, uninterrupted: Path, how: signal.Signals) -> None:
    """One worker is killed, or says nothing any more: torchrun starts all again from the last checkpoint,
    and the run ends as if nothing had happened."""
    torchrun = [sys.executable, "-c", TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    command = [*torchrun, str(ROOT / "train.py"), *LONGER, "--sync-timeout=8"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while not list(tmp_path.glob("runs/*/checkpoints/step-*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(workers_of(process.pid)[-1], how)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "resumed from" in errors
    if how == signal.SIGSTOP:
        assert "failed on rank 0 of 2: rank 1 is silent" in errors
    [run] = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    killed, whole = find(run), find(uninterrupted)
    assert killed.name == whole.name == "step-00000040"
    for file, part in ((checkpoint.SHARED, "model"), (checkpoint.rank_file(1), "sync")):
        a, b = (read(path, file)[part] for path in (killed, whole))
        a, b = (state if part == "model" else state["residuals"] for state in (a, b))
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 2 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root on Linux, for a small tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_leaves_the_last_good_state(small_disk: Path) -> None:
    """Checkpoints of 0.5 MB on a disk of 2 MB, all to be kept: one of them finds it full."""
    arguments = ["--compress", "--keep=99", "--checkpoint-every=1", "--no-tensorboard", "--workers=2", *SHORT]
    done = program("train", *arguments, folder=small_disk, status=1)
    assert "No space left on device" in done.stderr and "the last complete one is" in done.stderr
    assert "Traceback" not in done.stderr
    run = small_disk / "runs" / "last"
    left = Checkpoints((small_disk / "runs" / os.readlink(run)) / "checkpoints", 99).all()
    assert len(left) >= 2
    for path in left:
        for file in (checkpoint.SHARED, checkpoint.rank_file(0), checkpoint.rank_file(1)):
            read(path, file)
    assert not list((run / "checkpoints").glob(".step*"))
