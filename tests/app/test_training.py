"""The training loop over real processes: exact resume, other numbers of workers, same seed same bits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from comparing import same
from pool import JobFailed, Pool
from torch import Tensor

from compressed_ddp import SyncError
from compressed_ddp.training import checkpoint, run
from compressed_ddp.training.checkpoint import Checkpoints, find, read
from compressed_ddp.training.config import Optimizer, TrainConfig
from compressed_ddp.training.place import Place
from compressed_ddp.training.run import work
from compressed_ddp.types import MEMORIES

QUIET = {"tensorboard": False, "log_every": 1000}
SMALL = {"limit": 120, "batch_size": 8, "epochs": 2, "keep": 9, **QUIET}
"""120 digits, 2 epochs."""


def train_job(rank: int, world: int, settings: dict[str, Any]) -> dict[str, Any]:
    return work(TrainConfig.from_flat(settings), Place(rank, world, rank, torch.device("cpu"), "gloo"))


class Alone(Place):
    """A worker that needs no process group."""

    def gather(self, row: bytes, what: str = "") -> list[bytes]:
        return [row]

    def say(self, text: str) -> str:
        return text


def states(path: Path) -> list[dict[str, Any]]:
    """All files of a checkpoint, without what depends on the clock."""
    names = sorted(checkpoint.manifest_of(path)["files"])
    found = [read(path, name) for name in names]
    for state in found:
        state.pop("config", None)
        state.pop("moved", None)
        for key in ("position", "ledger"):
            for name in ("seconds", "select", "encode", "wait", "decode", "exposed"):
                state.get(key, {}).pop(name, None)
        for epoch in state.get("position", {}).get("history", ()):
            epoch.pop("seconds")
    return found


def test_same_compares_tensors() -> None:
    assert same({"a": [torch.ones(2)]}, {"a": [torch.ones(2)]})
    assert not same({"a": [torch.ones(2)]}, {"a": [torch.zeros(2)]})


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "topk": {"compress": True, "ratio": 0.05, "collective": "allgather"},
    "dgc": {
        **{"compress": True, "ratio": 0.02, "momentum_correction": True, "weight_decay": 0.01},
        **{"clip_norm": 1.0, "ratio_schedule": "warmup", "ratio_warmup": 1.0},
    },
    "sharded": {"compress": True, "ratio": 0.05, "collective": "sharded", "accumulate": 2, "clip_norm": 1.0},
    "adamw": {"compress": True, "optimizer": "adamw", "schedule": "cosine", "warmup": 0.5, "values": "int4"},
    "adamw, clipped": {"compress": True, "optimizer": "adamw", "clip_norm": 1.0, "precision": "fp16"},
    "adam, frozen": {
        **{"compress": True, "optimizer": "adam", "weight_decay": 0.01, "channels_last": True},
        **{"beta1": 0.9, "freeze_after": 3},
    },
    "adamw, behind": {"compress": True, "optimizer": "adamw", "split_optimizer": False},
    "nesterov": {"compress": True, "ratio": 0.05, "nesterov": True, "weight_decay": 0.01},
    "nesterov, dgc": {"compress": True, "ratio": 0.05, "nesterov": True, "momentum_correction": True},
    "rmsprop": {"compress": True, "ratio": 0.05, "optimizer": "rmsprop"},
    "ef21": {"compress": True, "ratio": 0.05, "memory": "ef21", "collective": "sharded"},
    "ef21-sgdm": {
        **{"compress": True, "ratio": 0.05, "memory": "ef21-sgdm", "eta": 0.3, "optimizer": "adamw"},
        **{"precision": "fp16"},
    },
    "fp16": {"compress": True, "ratio": 0.1, "precision": "fp16"},
    "bf16": {"compress": True, "ratio": 0.1, "precision": "bf16", "optimizer": "adam"},
    "batch norm": {"compress": True, "model": "resnet18", "limit": 24, "batch_size": 2, "epochs": 1},
    "channels last": {"compress": True, "ratio": 0.05, "channels_last": True, "adapt_every": 2},
    "local": {"compress": True, "ratio": 0.05, "local_steps": 4},
    "local, adamw": {"local_steps": 2, "optimizer": "adamw", "precision": "fp16", "schedule": "cosine"},
    "gpt": {"compress": True, "model": "gpt", "dataset": "text", "block": 16, "limit": 40, "batch_size": 4},
}


def test_the_ways_have_every_optimizer_and_memory() -> None:
    assert {way.get("optimizer", "sgd") for way in WAYS.values()} == set(get_args(Optimizer))
    assert {way.get("memory", "ef") for way in WAYS.values()} == set(MEMORIES)
    assert any(way.get("nesterov") for way in WAYS.values())


@pytest.mark.parametrize("way", WAYS)
def test_resume_is_exact(pool: Pool, tmp_path: Path, way: str) -> None:
    """Interrupted in the middle of an epoch and gone on: every bit as if nothing had happened."""
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 8)
    settings = SMALL | WAYS[way] | {"checkpoint_every": 3}
    settings |= {"text": str(text)} if settings.get("dataset") == "text" else {}
    pool.run(2, train_job, settings | {"run_dir": str(tmp_path / "whole")})
    whole = Checkpoints(tmp_path / "whole" / "checkpoints", 9).all()
    middle = tmp_path / "whole" / "checkpoints" / "step-00000003"
    assert middle in whole and read(middle, checkpoint.SHARED)["position"]["seen"] > 0
    pool.run(2, train_job, settings | {"run_dir": str(tmp_path / "again"), "resume": str(middle)})
    last = find(tmp_path / "again")
    assert last.name == whole[-1].name != middle.name
    assert same(states(last), states(whole[-1]))


def test_the_same_seed_gives_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    runs = [("a", 1), ("b", 1), ("c", 2)]
    for name, seed in runs:
        settings = SMALL | {"epochs": 1, "compress": True, "seed": seed, "run_dir": str(tmp_path / name)}
        pool.run(3, train_job, settings)
    a, b, c = (states(find(tmp_path / name)) for name, _ in runs)
    assert same(a, b)
    assert not same(a, c)


def owed(path: Path) -> Tensor:
    """What all workers of a checkpoint owe to the mean, over all parameters."""
    from compressed_ddp import reshard_states

    world = checkpoint.manifest_of(path)["world_size"]
    each = [read(path, checkpoint.rank_file(rank))["sync"] for rank in range(world)]
    [alone] = reshard_states(each, 1)  # one worker who owes all of it
    return torch.cat([alone["residuals"][name].flatten() for name in sorted(alone["residuals"])])


@pytest.mark.parametrize("collective", ["allgather", "sharded"])
def test_other_numbers_of_workers(pool: Pool, tmp_path: Path, collective: str) -> None:
    """4, then 3, 4, 1 and 2 workers: nothing that is owed is lost, and the order of examples goes on."""
    settings = SMALL | {"compress": True, "ratio": 0.05, "collective": collective, "checkpoint_every": 1}
    settings |= {"limit": 240, "batch_size": 5}
    seen: list[int] = []
    reloads = ("b", "d", "f", "h")
    before: Path | None = None
    for name, world, steps in (
        *(("a", 4, 3), ("b", 3, 3), ("c", 3, 6), ("d", 4, 6), ("e", 4, 9)),
        *(("f", 1, 9), ("g", 1, 11), ("h", 2, 11), ("i", 2, 12)),
    ):
        # Steps that are done already: resumed, and written again as it was found.
        resume = {} if before is None else {"resume": str(before)}
        settings_now = settings | resume | {"run_dir": str(tmp_path / name), "max_steps": steps}
        if name in reloads:
            pool.run(world, reload_job, settings_now)
        else:
            pool.run(world, train_job, settings_now)
        now = find(tmp_path / name)
        if name in reloads and before is not None:
            was, is_ = owed(before), owed(now)
            assert torch.allclose(was, is_, rtol=1e-5, atol=float(was.abs().max()) * 1e-6)
            assert float(was.abs().max()) > 0 or name == "h"  # a worker alone has sent all of it
        seen.append(read(now, checkpoint.SHARED)["position"]["seen"])
        before = now
    # 105 is not divisible by 4: one example comes again.
    assert seen == [60, 60, 60 + 45, 105, 104 + 60, 164, 164 + 10, 174, 174 + 10]


@pytest.mark.parametrize("way", ["allgather", "sharded"])
def test_other_numbers_of_workers_between_two_meetings(pool: Pool, tmp_path: Path, way: str) -> None:
    """Weights differ then: what each worker did since the last meeting is owed, and so not lost."""
    settings = SMALL | {"compress": True, "ratio": 0.05, "collective": way, "local_steps": 4}
    settings |= {"checkpoint_every": 1, "epochs": 1, "max_steps": 6, "batch_size": 5}
    pool.run(3, train_job, settings | {"run_dir": str(tmp_path / "a")})
    middle = tmp_path / "a" / "checkpoints" / "step-00000005"
    each = [read(middle, checkpoint.rank_file(rank))["sync"]["local"] for rank in range(3)]
    assert [local["since"] for local in each] == [1, 1, 1]
    assert same(each[0]["anchor"], each[2]["anchor"]) and not same(each[0]["weights"], each[2]["weights"])
    for world in (2, 4):
        again = settings | {"resume": str(middle), "run_dir": str(tmp_path / f"{world}"), "max_steps": 5}
        pool.run(world, reload_job, again)
        now = find(tmp_path / f"{world}")
        was, is_ = owed(middle), owed(now)
        assert torch.allclose(was, is_, rtol=1e-5, atol=float(was.abs().max()) * 1e-6) and bool(was.any())
        assert same(read(now, checkpoint.rank_file(world - 1))["sync"]["local"]["anchor"], each[0]["anchor"])
        summaries = pool.run(world, train_job, again | {"max_steps": 8})
        assert summaries[0]["steps"] == 8 and "every 4 steps" in summaries[0]["method"]


def test_a_plain_run_may_go_on_with_local_steps(pool: Pool, tmp_path: Path) -> None:
    """From its own weights. A run with local steps goes on with them alone."""
    pool.run(2, train_job, SMALL | {"epochs": 1, "run_dir": str(tmp_path / "a")})
    more = SMALL | {"resume": str(tmp_path / "a"), "run_dir": str(tmp_path / "b"), "local_steps": 3}
    first, second = pool.run(2, train_job, more)[0]["history"]
    assert second["train_loss"] < first["train_loss"]
    for wrong, told in (
        ({}, "resume it with --compress, or --local-steps"),
        ({"compress": True}, "LocalSync"),
    ):
        with pytest.raises(JobFailed, match=told):
            pool.run(2, train_job, SMALL | wrong | {"resume": str(tmp_path / "b"), "epochs": 3})


def reload_job(rank: int, world: int, settings: dict[str, Any]) -> None:
    """Resume and write a checkpoint at once, without a step."""
    from compressed_ddp.training.loop import Trainer
    from compressed_ddp.training.run import load_data
    from compressed_ddp.training.state import restore

    config = TrainConfig.from_flat(settings)
    place = Place(rank, world, rank, torch.device("cpu"), "gloo")
    trainer = Trainer(config, place, load_data(config))
    trainer.checkpoints = Checkpoints(Path(settings["run_dir"]) / "checkpoints", 9)
    restore(trainer, Path(settings["resume"]))
    trainer.save(best=False)
    trainer.sync.close()


def test_it_learns(pool: Pool, tmp_path: Path) -> None:
    """Real digits, 2 workers: both ways get most of them right, and compressed sends a fraction."""
    found = {}
    for name, more in {"plain": {}, "topk": {"compress": True, "ratio": 0.05}}.items():
        settings = QUIET | more | {"epochs": 6, "keep": 0, "run_dir": str(tmp_path / name)}
        found[name] = pool.run(2, train_job, settings)[0]
        assert found[name]["test_accuracy"] > 90, name
        assert json.loads((tmp_path / name / "summary.json").read_text()) == found[name]
        assert not (tmp_path / name / "checkpoints").exists()
    if found["plain"]["socket_sent"] is not None:  # counted on Linux
        assert found["topk"]["socket_sent"] < 0.1 * found["plain"]["socket_sent"]
        ring = found["plain"]["dense_ring"]
        assert ring <= found["plain"]["socket_sent"]  # what a busy machine sends again is in it
        assert ring <= found["plain"]["socket_received"] < 1.1 * ring


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("keep", [0, 9])
def test_a_run_that_diverges_says_so(pool: Pool, tmp_path: Path, precision: str, keep: int) -> None:
    settings = SMALL | {"lr": 1e30, "run_dir": str(tmp_path / "run"), "precision": precision, "keep": keep}
    with pytest.raises(
        JobFailed, match=r"the loss is (nan|inf) at step \d+: lower --lr|weights are not finite"
    ):
        pool.run(2, train_job, settings)
    assert not Checkpoints(tmp_path / "run" / "checkpoints", 1).all()


def test_it_stops_when_it_is_good_enough(pool: Pool, tmp_path: Path) -> None:
    settings = SMALL | {"epochs": 9, "target_accuracy": 1.0, "run_dir": str(tmp_path / "a")}
    assert pool.run(1, train_job, settings)[0]["epochs"] == 1
    # Asked to go on it knows that it was through.
    assert pool.run(1, train_job, settings | {"resume": "auto"})[0]["epochs"] == 1
    settings = SMALL | {"epochs": 9, "patience": 2, "lr": 1e-12, "run_dir": str(tmp_path / "b")}
    assert pool.run(1, train_job, settings)[0]["epochs"] == 3


def test_what_does_not_fit_is_told(pool: Pool, tmp_path: Path) -> None:
    settings = SMALL | {"epochs": 1, "compress": True, "run_dir": str(tmp_path / "a")}
    pool.run(2, train_job, settings)
    pool.run(2, train_job, settings | {"run_dir": str(tmp_path / "other"), "compress": False})
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    for change, told in (
        ({"run_dir": str(tmp_path / "a")}, "has a run already"),
        ({"resume": "auto"}, "needs --run-dir"),
        (
            {"resume": str(tmp_path / "a"), "model": "resnet18"},
            "is of model 'simple_cnn', this run has 'resnet18'",
        ),
        ({"resume": str(tmp_path / "a"), "compress": False}, "is of a compressed run"),
        (
            {"resume": str(tmp_path / "a"), "optimizer": "adamw"},
            "is of optimizer 'sgd', this run has 'adamw'",
        ),
        ({"resume": str(tmp_path / "a"), "run_dir": str(tmp_path / "other")}, "has a run already"),
        ({"resume": str(tmp_path)}, "has no complete checkpoint"),
        ({"dataset": "mnist", "data_dir": str(tmp_path)}, "compressed-ddp data download mnist"),
        ({"model": "gpt"}, "gpt"),
    ):
        wrong = {key: value for key, value in settings.items() if key != "run_dir"}
        wrong |= {"runs": str(tmp_path / "runs")} | change
        with pytest.raises(JobFailed) as caught:
            pool.run(2, train_job, wrong)
        assert told in caught.value.errors[0], change
        assert sorted(caught.value.errors) == [0, 1]
    # A mistake leaves nothing behind and spoils nothing: no folder, no pointer, no other configuration.
    assert not (tmp_path / "runs").exists()
    assert before == {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}


def test_a_plain_run_may_go_on_compressed(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, train_job, SMALL | {"epochs": 1, "run_dir": str(tmp_path / "a")})
    more = {"resume": str(tmp_path / "a"), "run_dir": str(tmp_path / "b"), "compress": True}
    assert pool.run(2, train_job, SMALL | more)[0]["epochs"] == 2


def scale_job(rank: int, world: int, scales: list[float]) -> list[Tensor]:
    """Gradients divided by their loss scale after each step, and what is owed at the end."""
    from torch.nn.parallel import DistributedDataParallel

    from compressed_ddp import CompressionConfig, attach

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(40, 30))
    sync = attach(model, CompressionConfig(ratio=0.1, min_compress_numel=0))
    torch.manual_seed(rank)
    found = []
    for scale in scales:
        model.zero_grad()
        sync.loss_scale = scale
        (model(torch.randn(8, 40)).square().mean() * scale).backward()  # type: ignore[no-untyped-call]
        found += [parameter.grad / scale for parameter in model.parameters() if parameter.grad is not None]
    found += [residual for _, residual in sorted(sync.state_dict()["residuals"].items())]
    sync.close()
    return found


def test_residuals_do_not_know_the_loss_scale(pool: Pool) -> None:
    """A scale that changes between steps, as GradScaler's does, changes no bit of what is sent or owed."""
    plain = pool.run(2, scale_job, [1.0] * 5)
    scaled = pool.run(2, scale_job, [1024.0, 65536.0, 2.0, 0.5, 4096.0])
    assert same(plain, scaled)


def differing_job(rank: int, world: int, settings: dict[str, Any]) -> None:
    train_job(rank, world, settings | {"batch_size": 8 + rank})


def test_workers_with_other_settings_are_told(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(JobFailed) as caught:
        pool.run(3, differing_job, SMALL | {"run_dir": str(tmp_path / "a")})
    assert "comparing the configuration failed on rank 1, 2" in caught.value.errors[0]
    assert "batch_size is 9 on rank 1 and 8 on rank 0" in caught.value.errors[1]


def unlike_job(rank: int, world: int, settings: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(run, "__version__", "9.9.9")
        train_job(rank, world, settings)


def test_workers_of_another_release_are_told_also_where_nothing_is_compressed(
    pool: Pool, tmp_path: Path
) -> None:
    with pytest.raises(JobFailed) as caught:
        pool.run(2, unlike_job, SMALL | {"run_dir": str(tmp_path / "a"), "compress": False})
    assert "compressed-ddp is '9.9.9' on rank 1 and " in caught.value.errors[1]


def test_an_older_checkpoint_begins_another_future(pool: Pool, tmp_path: Path) -> None:
    """What came after it is gone, so that nobody goes on with it by mistake."""
    run = {"run_dir": str(tmp_path / "a")}
    settings = SMALL | {"checkpoint_every": 2, "keep": 9, "compress": True}
    pool.run(2, train_job, settings | run)
    old = tmp_path / "a" / "checkpoints" / "step-00000004"
    pool.run(2, train_job, settings | run | {"resume": str(old), "max_steps": 5, "keep": 2})
    names = [path.name for path in Checkpoints(tmp_path / "a" / "checkpoints", 2).all()]
    assert names[-2:] == ["step-00000004", "step-00000005"] and find(tmp_path / "a").name == names[-1]


def test_settings_given_at_resume_count(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, train_job, SMALL | {"epochs": 1, "run_dir": str(tmp_path / "a")})
    more = {
        "resume": str(tmp_path / "a"),
        "run_dir": str(tmp_path / "b"),
        "momentum": 0.5,
        "weight_decay": 0.25,
    }
    pool.run(1, train_job, SMALL | more)
    [group] = read(find(tmp_path / "b"), checkpoint.SHARED)["optimizer"]["param_groups"]
    assert (group["momentum"], group["weight_decay"]) == (0.5, 0.25)


def test_max_steps_in_the_middle_of_an_epoch(pool: Pool, tmp_path: Path) -> None:
    """The epoch that was broken off appears once, with its figures of the whole."""
    run = SMALL | {"run_dir": str(tmp_path / "a")}
    pool.run(1, train_job, run | {"max_steps": 4})
    summary = pool.run(1, train_job, run | {"resume": "auto"})[0]
    assert [(epoch["epoch"], epoch["step"]) for epoch in summary["history"]] == [(1, 15), (2, 30)]
    whole = pool.run(1, train_job, SMALL | {"run_dir": str(tmp_path / "b")})[0]
    assert [e["train_loss"] for e in summary["history"]] == [e["train_loss"] for e in whole["history"]]


@pytest.mark.parametrize("whose", ["a peer", "its own"])
def test_the_error_of_a_run_is_the_first_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, whose: str
) -> None:
    """With its phase, bucket and ranks; a disk that is full as well is logged, and everything is closed."""
    cause: Exception = SyncError("all-gather failed", phase="all-gather", bucket=2, ranks=(5,))
    if whose == "its own":
        cause = ZeroDivisionError("no")
    closed = []

    class Failing:
        def __init__(self, *_: object) -> None:
            self.sync = SimpleNamespace(error=cause, close=lambda: closed.append("sync"))

        def run(self, *_: object) -> None:
            raise RuntimeError(f"torch's words: {cause}")

    class Full:
        def close(self) -> None:
            raise OSError("No space left on device")

    monkeypatch.setattr(run, "Trainer", Failing)
    monkeypatch.setattr(run, "load_data", lambda _: None)
    monkeypatch.setattr(run, "headline", lambda *_: "")
    monkeypatch.setattr(run, "make_tracker", lambda *_: Full())
    config = TrainConfig.from_flat({"runs": str(tmp_path), **SMALL})
    with pytest.raises(SyncError, match=str(cause)) as caught:
        work(config, Alone(0, 1, 0, torch.device("cpu"), "gloo"))
    assert closed == ["sync"] and "No space left on device" in caplog.text
    told = caught.value.phase, caught.value.bucket, caught.value.ranks
    assert told == (("", None, ()) if whose == "its own" else ("all-gather", 2, (5,)))
    with pytest.raises(OSError, match="No space"):
        run.close_all(Full().close, lambda: closed.append("last"))
    assert closed == ["sync", "last"]
