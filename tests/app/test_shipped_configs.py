"""Every file of configs/ is trained for two steps, by the application itself, on small data of its kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_data
import yaml

pytest.importorskip("jsonargparse")

from compressed_ddp.cli import main

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# Later flags win. What makes a configuration what it is (model, optimizer, compression) stays.
SHORT = {"limit": 12, "batch_size": 2, "epochs": 1, "max_steps": 2, "workers": 1, "threads": 1, "block": 16}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*")), ids=lambda path: path.name)
def test_every_shipped_config_trains(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_data.write(tmp_path / "data")
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)  # all of the standard library would take minutes
    given = yaml.safe_load(path.read_text())
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SHORT.items()]
    flags += ["--text=text"] if given["dataset"] == "text" else []
    assert main(["train", "--config", str(path), *flags, "--no-tensorboard"]) == 0
    run = Path("runs/last")
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    trained = yaml.safe_load((run / "config.yaml").read_text())
    assert all(trained[key] == value for key, value in (given | SHORT).items())
