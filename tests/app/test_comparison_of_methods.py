"""The comparison of methods: its plan, its rows, its table and picture; and the write-up's residual."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import experiment
import pytest
import torch
from pool import Pool
from torch import Tensor

from compressed_ddp import CompressionConfig
from compressed_ddp.communication import Reducer, run_in_process
from compressed_ddp.communication.choices import resolve
from compressed_ddp.compression.factory import from_config
from compressed_ddp.layout import BucketLayout
from compressed_ddp.training.config import TrainConfig
from compressed_ddp.types import Transport

ROOT = Path(__file__).resolve().parents[2]


def load() -> Any:
    return experiment.load("methods")


@pytest.fixture
def script() -> Any:
    return load()


def row(script: Any, run: Any, score: float, failed: str = "") -> dict[str, Any]:
    share = 1.0 if run.ratio == 1 else 1.3 * run.ratio
    return (
        dict.fromkeys(script.COLUMNS, "")
        | run._asdict()
        | {
            **{
                "test_accuracy": score,
                "test_loss": 100 - score,
                "socket_sent": 1e6 * share,
                "failed": failed,
                "settings": script.fingerprint(run),
            },
        }
    )


def test_every_run_is_one_that_the_application_takes(script: Any, tmp_path: Path) -> None:
    runs = [
        run
        for workers in (2, 4, 8)
        for run in script.planned(list(script.TASKS), tmp_path / "none.csv", workers)
    ]
    assert len(set(runs)) == len(runs) and {run.task for run in runs} == set(script.TASKS)
    for run in runs:
        config = TrainConfig.from_flat(script.settings(run, "data"))
        assert config.compress == (not run.method.startswith("dense"))
        assert bool(config.task.validation) == (run.purpose == "tune")
        if config.compress:
            resolve(config.compression, from_config(config.compression))  # raises where workers would
    for task in ("mnist", "fashion", "text", "cifar10"):
        tests = [run for run in runs if (run.task, run.purpose) == (task, "test")]
        methods = script.TASKS[task].methods
        dense = sum(method.dense for method in methods.values())
        assert len(tests) == 3 * (dense + 3 * (len(methods) - dense))
        tuned = [run for run in runs if (run.task, run.purpose) == (task, "tune")]
        assert len(tuned) == len(methods) * len(script.TASKS[task].rates), "every method alike"


def test_a_run_may_be_scored_on_some_of_the_test_set_from_end_to_end(script: Any) -> None:
    about = '{"dataset": "digits"}'
    whole, some = script.loaded(about, None).test, script.loaded(about, 7).test
    assert len(some) == 7 < len(whole)
    at = torch.arange(7) * len(whole) // 7
    assert len(set(at.tolist())) == 7 and at[-1] >= len(whole) * 6 // 7
    for found, wanted in zip(some.batch(torch.arange(7)), whole.batch(at), strict=True):
        assert torch.equal(found, wanted)
    assert len(script.loaded(about, 10**6).test) == len(whole)


def test_rates_are_chosen_and_what_is_done_is_not_done_again(script: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    best = {"dense": 0.05, "error feedback": 0.1, "DGC": 0.02, "EF21-SGDM": 1.0, "local steps": 0.004}
    for run in script.planned(["mnist"], out):
        if run.purpose == "test":
            assert run.lr == best.get(run.method, 0.02), run
        score = 99.0 if run.lr == best.get(run.method) else 90.0 + run.seed % 3
        script.append(out, script.COLUMNS, [row(script, run, score)])
    again = list(script.planned(["mnist"], out))
    assert set(again) == set(map(script.key, script.valid(script.read(out))))
    assert not any(run.seed == 101 for run in again)
    others = list(script.planned(["fashion_8"], out, 8))
    assert others and list(script.planned(["fashion_8"], out, 4)) == []


def test_a_second_seed_decides_between_the_two_best_rates(script: Any, tmp_path: Path) -> None:
    """A rate that diverges with one of them is not chosen, however well it did with the other."""
    out, rates = tmp_path / "out.csv", script.TASKS["fashion"].rates
    first = dict(zip(rates, (80.0, 85.0, 88.0, 90.0), strict=True))
    tuned = []
    for run in script.planned(["fashion"], out):
        if run.method == "dense" and run.purpose == "tune":
            tuned.append((run.seed, run.lr))
            failed = "the loss is nan" if tuned[-1] == (101, rates[3]) else ""
            script.append(out, script.COLUMNS, [row(script, run, first[run.lr] - run.seed % 2, failed)])
        elif run.method == "dense":
            assert run.lr == rates[2]
    assert tuned == [*((100, rate) for rate in rates), (101, rates[3]), (101, rates[2])]


def test_rows_of_other_settings_do_not_count(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = script.Run("mnist", "error feedback", "test", 0.01, 0, 0.02)
    old = [{k: str(v) for k, v in row(script, run, 98.0).items()}]
    assert script.valid(old) == old
    task = script.TASKS["mnist"]
    monkeypatch.setitem(script.TASKS, "mnist", task._replace(flags=task.flags | {"epochs": 4}))
    assert script.valid(old) == []
    gone = {name: each for name, each in task.methods.items() if name != run.method}
    monkeypatch.setitem(script.TASKS, "mnist", task._replace(methods=gone))
    assert script.valid(old) == []


def test_other_rates_do_not_join_a_mean(script: Any) -> None:
    """Rates are tried anew, another does better: what was tested with the old one is of no use."""
    runs = [script.Run("mnist", "dense", "test", 1.0, 0, lr) for lr in (0.02, 0.05)]
    runs += [script.Run("mnist", "dense", "tune", 1.0, 100, lr) for lr in (0.02, 0.05)]
    rows = [{k: str(v) for k, v in row(script, run, 90 + 100 * run.lr).items()} for run in runs]
    text = script.method_tables.table(rows, "mnist", script.TASKS["mnist"])
    assert "| dense |  | 0.05 | 95.00 (1 of 3 runs) |" in text


def test_who_sends_more_is_not_the_best(script: Any) -> None:
    rows = []
    for method, score, share in (("dense", 99.0, 1.0), ("error feedback", 98.0, 0.01), ("DGC", 98.5, 0.03)):
        run = script.Run("mnist", method, "test", 1.0 if method == "dense" else 0.01, 0, 0.02)
        rows.append(row(script, run, score) | {"socket_sent": 1e6 * share})
    line = "| mnist | 1.0% | error feedback | 98.00 (1 of 3 runs) | -1.00 points | 1.00% |"
    assert line in script.method_tables.best(rows, script.TASKS)


def test_who_clips_is_held_against_dense_that_clips_too(script: Any) -> None:
    rows = []
    for method, ratio, score in (
        ("dense", 1.0, 90.0),
        ("dense, clipped", 1.0, 91.0),
        ("error feedback", 0.01, 89.5),
        ("DGC, no warm-up", 0.01, 90.5),
    ):
        rows.append(row(script, script.Run("fashion", method, "test", ratio, 0, 0.02), score))
    text = script.method_tables.table(rows, "fashion", script.TASKS["fashion"])
    assert "| dense, clipped |  | 0.02 | 91.00 (1 of 3 runs) | +1.00 points | 100.00% |" in text
    assert "| DGC, no warm-up | 1.0% | 0.02 | 90.50 (1 of 3 runs) | +0.50 points (-0.50 points) |" in text
    assert "| error feedback | 1.0% | 0.02 | 89.50 (1 of 3 runs) | -0.50 points | 1.30% |" in text


def test_tables_by_optimizer_and_by_number_of_workers(script: Any) -> None:
    rows = []
    for task, lr in (("fashion", 0.02), ("fashion_8", 0.02), ("rmsprop", 0.0005)):
        for method, ratio, score in (("dense", 1.0, 90.0), ("error feedback", 0.01, 89.0)):
            rows.append(row(script, script.Run(task, method, "test", ratio, 0, lr), score))
    tables, one = script.method_tables, "(1 of 3 runs)"
    text = tables.by_workers(rows, script.TASKS)
    assert "| method | ratio | 2 workers | 4 workers | 8 workers |" in text
    assert f"| error feedback | 1.0% | - | 89.00 {one}, -1.00 points | 89.00 {one}, -1.00 points |" in text
    text = tables.by_optimizer(rows, script.TASKS)
    assert f"| sgd, momentum 0.9 | 90.00 {one} | error feedback | 89.00 {one} | -1.00 points |" in text
    assert f"| rmsprop | 90.00 {one} | error feedback | 89.00 {one} | -1.00 points |" in text
    assert "nesterov" not in text.lower(), "not measured yet"


def test_a_rate_that_diverged_is_not_chosen(script: Any) -> None:
    rows = [
        row(script, script.Run("mnist", "DGC", "tune", 0.01, 100, lr), 50.0 + lr, "nan" if lr == 0.1 else "")
        for lr in (0.02, 0.05, 0.1)
    ]
    assert sys.modules["method_plan"].chosen(rows, "mnist", "DGC") == 0.05


def test_of_two_rates_that_score_alike_the_smaller_loss_decides(script: Any) -> None:
    rows = [
        row(script, script.Run("mnist", "DGC", "tune", 0.01, 100, lr), 98.0) | {"test_loss": loss}
        for lr, loss in ((0.02, 0.3), (0.05, 0.2), (0.1, 0.25))
    ]
    assert sys.modules["method_plan"].chosen(rows, "mnist", "DGC") == 0.05


def test_a_rate_is_chosen_by_the_mean_of_its_seeds(script: Any) -> None:
    scores = {(0.01, 100): 40.0, (0.01, 101): 41.0, (0.02, 100): 43.0, (0.02, 101): 37.0, (0.05, 100): 50.0}
    rows = [
        row(script, script.Run("cifar10", "dense", "tune", 1.0, seed, lr), score)
        for (lr, seed), score in scores.items()
    ]
    rows.append(row(script, script.Run("cifar10", "dense", "tune", 1.0, 101, 0.05), 0.0, "the loss is nan"))
    assert sys.modules["method_plan"].chosen(rows, "cifar10", "dense") == 0.01


def test_a_rate_that_is_not_tried_any_more_is_not_chosen(script: Any) -> None:
    rows = [
        row(script, script.Run("mnist", "DGC", "tune", 0.01, 100, lr), 90.0 + lr) for lr in (0.02, 0.05, 0.3)
    ]
    assert sys.modules["method_plan"].chosen(rows, "mnist", "DGC") == 0.05


def test_who_chose_a_rate_at_an_end_is_told(script: Any) -> None:
    def tuned(task: str, best: dict[str, float]) -> list[dict[str, Any]]:
        return [
            row(
                script,
                script.Run(task, method, "tune", 1.0 if method == "dense" else 0.01, 100, lr),
                98.0 - abs(lr - wanted),
            )
            for method, wanted in best.items()
            for lr in script.TASKS[task].rates
        ]

    tables, tasks = script.method_tables, script.TASKS
    assert tables.by_rate([], tasks) == ""
    least, middle, most = tasks["mnist"].rates[0], tasks["mnist"].rates[1], tasks["mnist"].rates[-1]
    rows = tuned("mnist", {"dense": most, "DGC": most, "adaptive": most, "error feedback": least})
    rows += tuned("cifar10", {"dense": tasks["cifar10"].rates[-1]})
    rows += tuned("sgd", {"dense": tasks["sgd"].rates[0], "error feedback": tasks["sgd"].rates[1]})
    rows += tuned("nesterov", {"dense": middle, "error feedback": most})
    lines = tables.by_rate(rows, tasks).splitlines()[2:]
    wanted = {
        "mnist": "error feedback | all but error feedback",
        "cifar10": "none | all",
        "sgd": "dense | none",
        "nesterov": "none | error feedback",
    }
    assert lines == [
        f"| {name} | {', '.join(map('{:g}'.format, tasks[name].rates))} | 1 | {chose} |"
        for name, chose in wanted.items()
    ]


def some_rows(script: Any) -> list[dict[str, str]]:
    """MNIST: dense and error feedback with all seeds, DGC diverged once and is not run again yet."""
    rows = []
    for seed in range(3):
        for method, ratio, score in (("dense", 1.0, 99.0), ("error feedback", 0.01, 98.5 + 0.1 * seed)):
            run = script.Run("mnist", method, "test", ratio, seed, 0.02)
            rows.append({k: str(v) for k, v in row(script, run, score).items()})
    failed = script.Run("mnist", "DGC", "test", 0.1, 0, 0.02)
    rows.append({k: str(v) for k, v in row(script, failed, 0.0, "the loss is nan").items()})
    return rows


def test_tables_and_picture(script: Any, tmp_path: Path) -> None:
    rows, tables = some_rows(script), script.method_tables
    text = tables.table(rows, "mnist", script.TASKS["mnist"])
    assert "| dense |  | 0.02 | 99.00 ± 0.00 |  | 100.00% |" in text
    assert "| error feedback | 1.0% | 0.02 | 98.60 ± 0.10 | -0.40 points | 1.30% |" in text
    assert "| DGC | 10.0% | 0.02 | - (1 diverged, 1 of 3 runs) | - | - |" in text
    assert tables.plot(rows, script.TASKS, tmp_path / "methods.png")
    assert (tmp_path / "methods.png").stat().st_size > 10_000
    assert (
        "| mnist | 1.0% | error feedback | 98.60 ± 0.10 | -0.40 points | 1.30% | -0.40 points |"
        in tables.best(rows, script.TASKS)
    )
    assert "| mnist | 1.0% | error feedback | -0.1 points | -0.40 points | no |" in tables.aims(
        rows, script.TASKS
    )


def test_advice_is_about_what_is_planned(script: Any) -> None:
    guide = script.method_tables.method_guide
    for advice in guide.GUIDE:
        for name in advice.tasks:
            task = script.TASKS[name]
            for of in filter(None, (advice.this, advice.instead)):
                assert of.ratio in task.ratios_of(of.on(task)), (name, of)
    assert guide.table([], script.TASKS) == ""
    rows = [
        {k: str(v) for k, v in row(script, script.Run("mnist", name, "test", ratio, 0, 0.02), score).items()}
        for name, ratio, score in (
            ("dense", 1.0, 99.0),
            ("error feedback", 0.1, 98.5),
            ("DGC, no warm-up", 0.1, 98.25),
        )
    ]
    found = guide.table(rows, script.TASKS).splitlines()
    assert len(found) == 3, "the advice for which something was measured"
    assert (
        "| mnist -0.50 points, 13.00% sent | DGC, no warm-up, 10.0% | mnist -0.75 points, 13.00% sent |"
        in found[2]
    )


@pytest.mark.parametrize("end", range(8))
def test_tables_and_picture_of_what_is_there(script: Any, tmp_path: Path, end: int) -> None:
    """From nothing on, row by row, and in whatever order: also where dense is not there yet."""
    tables = script.method_tables
    for rows in (some_rows(script)[:end], some_rows(script)[7 - end :]):
        path = tmp_path / f"{end}.png"
        path.unlink(missing_ok=True)
        scored = any(not each["failed"] for each in rows)
        assert tables.plot(rows, script.TASKS, path) == path.exists() == scored
        found = dict(tables.parts(rows, script.TASKS))
        assert found["methods-fashion"].count("not measured yet") == 1
        assert ("not measured yet" in found["methods-mnist"]) == (not rows)
        assert "| yes |" not in found["methods-aims"]


def test_aims_are_reached_with_all_seeds_only(script: Any) -> None:
    rows = []
    for seed in range(3):
        assert "| yes |" not in script.method_tables.aims(rows, script.TASKS)
        for method, ratio, score in (("dense", 1.0, 90.0), ("Adam in two halves", 0.01, 89.3)):
            run = script.Run("fashion_adamw", method, "test", ratio, seed, 0.0005)
            rows.append({k: str(v) for k, v in row(script, run, score).items()})
    line = "| fashion_adamw | 1.0% | Adam in two halves (best) | -1 points | -0.70 points | yes |"
    assert line in script.method_tables.aims(rows, script.TASKS)
    losses = script.TASKS["text"]
    rows = [each | {"task": "text", "lr": str(losses.rates[0])} for each in rows]
    assert "-0.7" not in script.method_tables.table(rows, "text", losses), "a loss is compared by its ratio"
    assert "| 10.7000 ± 0.0000 | +7.00% |" in script.method_tables.table(rows, "text", losses)


def test_the_page_has_a_place_for_every_table(script: Any) -> None:
    """And what stands there is what the rows in results/ make of it."""
    rows, page = script.valid(script.read(script.OUT)), (ROOT / script.method_tables.PAGE).read_text()
    picture = "../results/methods.png" if script.OUT.with_suffix(".png").exists() else ""
    for mark, text in script.method_tables.parts(rows, script.TASKS, picture):
        _, there, after = page.partition(f"<!-- {mark} -->\n\n")
        stands = re.match(r"(?:(?:\||!\[).*\n)*", after)
        told = f"{mark}: run python experiments/methods.py --only-plot"
        assert there and stands and stands[0].rstrip("\n") == text, told


def methods_job(rank: int, world: int, out: str) -> dict[str, Any]:
    from compressed_ddp.training.place import Place

    script = load()
    small = {"model": "simple_cnn", "dataset": "digits", "limit": 64, "batch_size": 16, "epochs": 1}
    script.TASKS["mnist"] = script.TASKS["mnist"]._replace(flags=small, held_out=32)
    place = Place(rank, world, rank, torch.device("cpu"), "gloo")
    found = {}
    for method in ("dense", "write-up's error", "DGC", "EF21-SGDM", "adaptive", "local steps"):
        run = script.Run("mnist", method, "tune", 1.0 if method == "dense" else 0.01, 0, 0.01)
        found[method] = script.train(run, place, "data")
    return found


def test_real_workers_train_by_all_kinds_of_methods(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, methods_job, str(tmp_path))
    for method, mine in first.items():
        assert mine["method"] == method and mine["workers"] == 2 and mine["steps"] == 2
        assert mine["test_loss"] == second[method]["test_loss"] < 5
        assert method == "dense" or mine["payload_sent"] < 0.3 * first["dense"]["payload_sent"]


def test_the_write_ups_residual_breaks_the_law(script: Any) -> None:
    """e' = e + g - mean: what a worker sent itself stays owed, but for its share of the mean."""
    layout = BucketLayout(("w",), (torch.Size([400]),))

    def gradient(rank: int) -> Tensor:
        return torch.randn(400, generator=torch.Generator().manual_seed(rank))

    def work(net: Transport) -> tuple[Tensor, Tensor]:
        config = CompressionConfig(compressor=sys.modules["legacy"].NAME, ratio=0.1, values="fp32")
        sync, bucket = Reducer(from_config(config), config, net), gradient(net.rank)
        sync.reduce_(layout, bucket, last=True)
        return bucket, sync.state_dict()["residuals"]["w"]

    for rank, (mean, residual) in enumerate(run_in_process(3, work)):
        assert torch.equal(residual, gradient(rank) - mean)
        assert mean.count_nonzero() > 40
