"""Flags, YAML and defaults are one configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

pytest.importorskip("jsonargparse")

from compressed_ddp import SplitAdam
from compressed_ddp.cli import main
from compressed_ddp.training.checkpoint import MANIFEST
from compressed_ddp.training.config import TrainConfig, flat_fields
from compressed_ddp.training.flags import make_parser, parse
from compressed_ddp.training.folder import place_folder
from compressed_ddp.training.optimise import make_optimizer

ROOT = Path(__file__).resolve().parents[2]


def config_of(*arguments: str) -> TrainConfig:
    return parse(make_parser("train", "about"), arguments)[0]


def run_with_checkpoint(folder: Path, config: TrainConfig) -> Path:
    """The folder of a run that looks as if it could go on."""
    place_folder(config, folder)
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000001" / MANIFEST).write_text("{}")
    return folder


def test_nothing_given_is_the_default() -> None:
    assert config_of() == TrainConfig()
    assert config_of().task.dataset == "digits"
    assert not config_of().compress


def test_flags_win_over_yaml_and_yaml_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("epochs: 7\nbatch_size: 9\ncompress: true\nratio: 0.5\n")
    config = config_of("--config", str(file), "--batch-size", "3", "--ratio=0.25", "--no-tensorboard")
    assert config.optimisation.epochs == 7
    assert config.optimisation.batch_size == 3
    assert config.compress and config.compression.ratio == 0.25
    assert not config.running.tensorboard


def test_flags_win_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("compress: true\nratio: 0.5\nepochs: 7\n")
    (tmp_path / "b.yaml").write_text("epochs: 8\n")
    for arguments in (
        ["--ratio", "0.1", "--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")],
        [f"--config={tmp_path / 'a.yaml'}", "--ratio=0.1", f"--config={tmp_path / 'b.yaml'}"],
    ):
        config = config_of(*arguments)
        assert (config.compression.ratio, config.optimisation.epochs) == (0.1, 8)


def test_the_write_ups_flags() -> None:
    text = "--model simple_cnn --dataset mnist --epochs 10 --compress --ratio 0.01 --backend gloo"
    config = config_of(*text.split())
    assert (config.task.model, config.task.dataset, config.compression.ratio) == ("simple_cnn", "mnist", 0.01)


def test_the_runs_seed_is_the_compressors_too() -> None:
    assert config_of("--seed", "5").compression.seed == 5


@pytest.mark.parametrize(
    ("flags", "split"),
    [
        ("--compress --optimizer adamw", True),
        ("--compress --optimizer adam --ratio 0.1", True),
        ("--compress --optimizer adamw --split-optimizer false", False),
        ("--compress --optimizer adamw --ratio 1", False),
        ("--compress --optimizer adamw --error-feedback false", False),
        ("--compress --optimizer adamw --compressor qsgd", False),
        ("--compress --optimizer adamw --compressor fp16", False),
        ("--compress --optimizer sgd", False),
        ("--compress --optimizer sgd --momentum-correction", True),
        ("--compress --optimizer adamw --local-steps 10", False),
        ("--optimizer adamw", False),
    ],
)
def test_what_is_split(flags: str, split: bool) -> None:
    assert config_of(*flags.split()).split is split


@pytest.mark.parametrize(
    "settings", [{"optimizer": "adamw"}, {"compress": True, "optimizer": "sgd"}], ids=str
)
def test_only_a_compressed_adam_can_be_split(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="split_optimizer needs compress and optimizer adam"):
        TrainConfig.from_flat(settings | {"split_optimizer": True})


@pytest.mark.parametrize(
    "flags",
    [
        "--optimizer adamw",
        "--compress --optimizer sgd --momentum-correction",
        "--compress --optimizer adamw --split-optimizer false",
        "--compress --optimizer adamw --ratio 1",
        "--compress --optimizer adamw --local-steps 10",
    ],
)
def test_only_a_split_adam_freezes(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_of(*flags.split(), "--freeze-after", "100")
    assert "freeze_after 100 is for SplitAdam" in capsys.readouterr().err


def optimizer_of(flags: str) -> Any:
    config = config_of(*flags.split())
    options = {"split": config.split, "freeze": config.switch.freeze_after}
    return make_optimizer(config.optimisation, nn.Linear(2, 2), **options)


def test_first_moments() -> None:
    """torch's own has one unless told otherwise, SplitAdam none."""
    for name, kind in (("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)):
        for flags, beta1 in (("", 0.9), (" --beta1 0", 0.0), (" --beta1 0.5", 0.5)):
            whole = optimizer_of(f"--optimizer {name}{flags}")
            assert type(whole) is kind and whole.defaults["betas"] == (beta1, 0.999)
        for flags, beta1 in (("", 0.0), (" --beta1 0", 0.0), (" --beta1 0.5", 0.5)):
            half = optimizer_of(f"--optimizer {name} --compress{flags}")
            assert type(half) is SplitAdam and half.beta1 == beta1 and half.freeze is None
    half = optimizer_of("--optimizer adamw --compress --beta1 0.9 --freeze-after 100")
    assert (half.beta1, half.freeze, half.memories) == (0.9, 100, ("square", "momentum"))


def test_adams_weight_decay_is_a_penalty_and_adamws_is_not() -> None:
    """Compressed as well."""
    for name, decoupled in (("adam", False), ("adamw", True)):
        half = optimizer_of(f"--optimizer {name} --weight-decay 0.1 --compress")
        assert half.decoupled_weight_decay is decoupled
        assert half.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("settings", [{"optimizer": "adamw"}, {"momentum": 0.0}], ids=str)
def test_only_momentum_can_be_corrected(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="momentum_correction needs optimizer sgd and a momentum above 0"):
        TrainConfig.from_flat(settings | {"momentum_correction": True, "compress": True})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"ratio_schedule": "warmup"}, "a schedule needs its epochs"),
        ({"ratio_warmup": 1.0}, "epochs need ratio_schedule warmup or step"),
        ({"ratio_warmup": -1.0}, "ratio_warmup must be 0 or more, got -1.0"),
        (
            {"compress": True, "compressor": "sign", "ratio_schedule": "step", "ratio_warmup": 1.0},
            "compressor sign, which sends every entry",
        ),
    ],
    ids=str,
)
def test_schedules_of_the_ratio_that_cannot_be(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TrainConfig.from_flat(settings)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--ratio-schedule warmup --ratio-warmup 1", "ratio_schedule warmup needs compress"),
        ("--compress --no-momentum-masking", "momentum_masking false needs momentum_correction"),
        ("--momentum-correction", "momentum_correction needs compress"),
        ("--outer-lr 0.5", "outer_lr 0.5 needs local_steps"),
        ("--outer-momentum 0.5", "outer_momentum 0.5 needs local_steps"),
        ("--compress --eta 0.3", "eta 0.3 needs memory ef21-sgdm, and that is ef"),
        ("--compress --memory ef21 --eta 0.3", "eta 0.3 needs memory ef21-sgdm, and that is ef21"),
    ],
)
def test_what_would_do_nothing_is_told(flags: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        config_of(*flags.split())
    assert caught.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        "--compress --ratio-schedule warmup --ratio-warmup 1",
        "--compress --momentum-correction --no-momentum-masking",
        "--local-steps 4 --outer-lr 0.5 --outer-momentum 0.5",
        "--compress --memory ef21-sgdm --eta 0.3",
    ],
)
def test_what_does_something_is_taken(flags: str) -> None:
    config = config_of(*flags.split())
    assert TrainConfig.from_flat(config.flat()) == config


def test_flat_and_back() -> None:
    config = config_of(
        "--compress", "--ratio", "0.1", "--clip-norm", "1", "--optimizer", "adamw", "--seed", "3"
    )
    assert TrainConfig.from_flat(config.flat()) == config
    assert TrainConfig.from_flat(yaml.safe_load(yaml.safe_dump(config.flat()))) == config
    assert config.but(ratio=0.2).compression.ratio == 0.2
    assert set(config.flat()) == set(flat_fields())


def test_the_learning_rate_follows_the_optimizer() -> None:
    assert config_of().optimisation.rate == 0.05
    assert config_of("--optimizer", "adamw").optimisation.rate == 0.001
    assert config_of("--optimizer", "adamw", "--lr", "0.3").optimisation.rate == 0.3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--batch-sise", "3"], "did you mean --batch-size"),
        (["--batch-size", "many"], "batch_size must be a whole number; got 'many'"),
        (["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["--compress", "--ratio", "2"], "ratio must be in (0, 1], got 2"),
        (["--compress", "--scope", "buckets"], "did you mean 'bucket'"),
        (["--optimizer", "sdg"], "unknown optimizer 'sdg'; did you mean 'sgd'?"),
        (["--ratio", "abc"], "ratio must be a number; got 'abc'"),
        (["--max-steps", "x"], "max_steps must be a whole number, or null for none; got 'x'"),
        (["--split-optimizer", "maybe"], "split_optimizer must be true or false, or null for none"),
        (["--compress", "true"], "arguments: true; settings are flags"),
        (["mnist"], "arguments: mnist; settings are flags, as in --dataset mnist"),
        (["--ratio", "0.01"], "nothing says that they are: add --compress"),
        (["--compressor=topkk"], "--compressor says how gradients are compressed"),
        (["--backend", "mpi"], "unknown backend 'mpi'"),
        (["--target-accuracy", "200"], "at most 100"),
        (["--nesterov", "--momentum", "0"], "nesterov needs"),
        ("--optimizer sgd --beta1 0.9".split(), "beta1 0.9 is of adam and adamw; sgd has momentum"),
        ("--optimizer adam --beta1 1".split(), "beta1 must be in [0, 1), got 1"),
        ("--compress --optimizer adam --freeze-after 0".split(), "freeze_after must be at least 1, got 0"),
        (["--local-steps", "0"], "local_steps must be at least 1, got 0"),
        (["--local-steps", "5", "--outer-lr", "0"], "outer_lr must be a positive number"),
        (["--outer-momentum", "1"], "outer_momentum must be in [0, 1), got 1"),
        (
            "--compress --optimizer adam --local-steps 5 --split-optimizer true".split(),
            "leave one of them out",
        ),
        (["--resume", "nowhere"], "nowhere does not exist"),
        (["--resume", __file__], "test_config.py is a file: nothing to resume from"),
        ("--optimizer adam --lr 0".split(), "got 0.0; leave it out for adam's own"),
        (["--clip-norm", "0"], "got 0.0; leave it out for none"),
        (["--seed", "99999999999999999999999"], "seed must fit in 64 bits"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_wrong_flags_are_told(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        config_of(*arguments)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"epochs: [3\n", "is damaged, or not YAML"),
        (b"\xff\xfe\x00\x81", "is damaged, or not YAML"),
        (b"", "is not a configuration: it is empty"),
        (b"hello\n", "is not a configuration: found str"),
    ],
    ids=["broken", "binary", "empty", "a word"],
)
def test_a_file_that_is_no_configuration_is_named(
    content: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_with_checkpoint(tmp_path / "run", TrainConfig()) / "config.yaml"
    file.write_bytes(content)
    for arguments in (["--config", str(file)], [f"--config={file}"], ["--resume", str(tmp_path / "run")]):
        with pytest.raises(SystemExit) as caught:
            config_of(*arguments)
        assert caught.value.code == 2 and f"{file} {told}" in capsys.readouterr().err


def test_settings_of_compression_may_stay_where_it_is_turned_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By whoever it is; and time limits have nothing to do with it."""
    file = tmp_path / "a.yaml"
    file.write_text("compress: true\nratio: 0.1\n")
    plain = config_of("--config", str(file), "--no-compress")
    assert not plain.compress and plain.compression.ratio == 0.1
    run_with_checkpoint(tmp_path / "run", plain)
    assert config_of("--resume", str(tmp_path / "run")).compression.ratio == 0.1
    assert config_of("--sync-timeout", "5", "--guard-every", "7").compression.guard_every == 7
    assert config_of("--data-dir", "./values").task.data_dir == "./values"
    for text in ("ratio: 0.1\n", "values: int4\n"):
        file.write_text(text)
        assert config_of("--config", str(file), "--compress").compress
        with pytest.raises(SystemExit):
            config_of("--config", str(file))
        assert "nothing says that they are" in capsys.readouterr().err


def test_wrong_keys_of_a_run_that_goes_on_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_with_checkpoint(tmp_path / "run", TrainConfig()) / "config.yaml"
    assert config_of("--resume", str(tmp_path / "run")).optimisation.epochs == 5
    file.write_text(file.read_text() + "batchsize: 3\n")
    with pytest.raises(SystemExit) as caught:
        config_of("--resume", str(tmp_path / "run"))
    assert caught.value.code == 2
    assert f"{file} has an unknown setting 'batchsize'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "meant"),
    [("batchsize: 3\n", "batch_size"), ("compression:\n  ratio: 0.1\n", "ratio")],
    ids=["misspelt", "inside of another"],
)
def test_wrong_keys_are_told_with_the_nearest(
    content: str, meant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(content)
    with pytest.raises(SystemExit):
        config_of("--config", str(file))
    assert f"did you mean {meant}?" in capsys.readouterr().err
    with pytest.raises(ValueError, match="did you mean 'ratio'"):
        TrainConfig.from_flat({"ratoi": 1})


def test_print_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--ratio", "0.2", "--compress", "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["ratio"] == 0.2 and printed["compress"] is True
    assert printed["lr"] == 0.05  # not null: what would run
    assert set(printed) == set(flat_fields())


def test_print_config_of_a_run_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own settings are the defaults; and what was printed, given back, is the same run."""
    config = config_of(*"--compress --optimizer adamw --lr 0.002 --ratio 0.03".split())
    run = run_with_checkpoint(tmp_path / "run", config)
    assert main(["train", "--resume", str(run), "--epochs=9", "--print-config"]) == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    again = config_of("--config", str(file))
    assert again.optimisation.optimizer == "adamw" and again.optimisation.lr == 0.002
    assert again.compression.ratio == 0.03 and again.optimisation.epochs == 9
    assert again == config_of("--resume", str(run), "--epochs=9")


def test_print_config_of_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--ratios=1,0.5", "--seeds=3,4", "--epochs=2", "--print-config"]) == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert main(["compare", "--config", str(file), "--print-config"]) == 0
    assert capsys.readouterr().out == file.read_text()
    printed = yaml.safe_load(file.read_text())
    assert (printed["ratios"], printed["seeds"], printed["epochs"]) == ("1,0.5", "3,4", 2)


def test_what_could_not_run_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--compress", "--ratio=5", "--print-config"])
    assert caught.value.code == 2
    assert main(["compare", "--ratios=5", "--print-config"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("ratio must be in (0, 1]") == 2


def test_every_setting_has_help() -> None:
    about = {action.dest: action.help for action in make_parser("train", "about")._actions}
    for name in flat_fields():
        assert about[name], f"--{name} has no help: give its field a docstring"
    assert about["ratio"] == "Share of the entries that a sparse compressor sends, in (0, 1]."


def test_the_help_names_every_compressor() -> None:
    from compressed_ddp.compression import COMPRESSORS

    about = {action.dest: action.help or "" for action in make_parser("train", "about")._actions}
    assert all(name in about["compressor"] for name in COMPRESSORS)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_is_one(path: Path) -> None:
    config = config_of("--config", str(path))
    assert config.task.model in ("simple_cnn", "resnet18", "resnet50", "gpt")
