"""The package as pip builds it: with the kernels where there is a compiler, without them where not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path, **environment: str) -> tuple[zipfile.ZipFile, int]:
    """The wheel that ``pip wheel .`` makes, in an isolated build, of a copy of the sources."""
    sources = folder / "sources"
    keep = shutil.ignore_patterns(".*", "__pycache__", "tests", "results", "runs", "*.so", "*.pyd")
    shutil.copytree(ROOT, sources, ignore=keep)
    command = [sys.executable, "-m", "pip", "wheel", str(sources), "--no-deps", "--wheel-dir", str(folder)]
    result = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if "No matching distribution found" in result.stderr:
        pytest.skip("the build tools cannot be fetched here: is this machine offline?")
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel), wheel.stat().st_size


def extensions(wheel: zipfile.ZipFile) -> list[str]:
    return [name for name in wheel.namelist() if "/_native." in name and not name.endswith(".pyi")]


@pytest.mark.timeout(300)
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))), reason="no C++ compiler")
def test_with_a_compiler(tmp_path: Path) -> None:
    wheel, size = build(tmp_path)
    assert len(extensions(wheel)) == 1
    assert size < 1_000_000
    assert "compressed_ddp/py.typed" in wheel.namelist()


@pytest.mark.timeout(300)
def test_without_a_compiler(tmp_path: Path) -> None:
    """The installation succeeds; test_kernels.py has what it says when it runs."""
    wheel, _ = build(tmp_path, CXX=str(tmp_path / "no-compiler"), CC=str(tmp_path / "no-compiler"))
    assert extensions(wheel) == []
    assert wheel.filename is not None and wheel.filename.endswith("py3-none-any.whl")
    assert "compressed_ddp/kernels/reference.py" in wheel.namelist()


def test_torch_is_no_build_requirement() -> None:
    """An isolated build would fetch a torch of its own, gigabytes of it."""
    requires = (ROOT / "pyproject.toml").read_text().split("requires = ", 1)[1].split("\n", 1)[0]
    assert "nanobind" in requires and "torch" not in requires
