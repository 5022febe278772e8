"""Every command in README and docs is run, made short, and every table is what its command makes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import experiment
import pytest
import report_fixtures
import tiny_data

from compressed_ddp import data, report
from compressed_ddp.cli import main
from compressed_ddp.lab import missing
from compressed_ddp.report.sections import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OWN_TESTS = {"deploy.md"}  # test_deploy.py runs its commands
# Later flags win: two steps of a tiny piece, by one worker.
SHORT = ["--limit=12", "--batch-size=2", "--epochs=1", "--max-steps=2", "--workers=1", "--no-tensorboard"]
TINY = ["--block=16", "--threads=1"]


def blocks(text: str) -> list[list[str]]:
    """The lines of every fenced block that is not in a language of its own."""
    found: list[list[str]] = []
    language = None
    for line in text.splitlines():
        if line.strip().startswith("```"):
            language = line.strip()[3:] if language is None else None
            found.append([])
        elif language in ("", "sh", "bash"):
            found[-1].append(line)
    return found


def commands() -> list[tuple[str, str]]:
    """Page and command, of everything that stands in a block of its own."""
    lines = [
        (page.name, line.split(" #")[0].strip())
        for page in PAGES
        if page.name not in OWN_TESTS
        for block in blocks(page.read_text())
        for line in block
    ]
    return list(
        dict.fromkeys(it for it in lines if re.match(r"(python|compressed-ddp|torchrun|make|pip) ", it[1]))
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone's files that commands name, and small files in the formats of the real data."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("configs", "examples", "experiments", "results", "train.py"):
        (folder / name).symlink_to(ROOT / name)
    tiny_data.write(folder / "data")
    return folder


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("page", "command"), commands(), ids=lambda value: str(value)[:60])
def test_every_command_runs(page: str, command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the pages: what resumes a run finds the one before it."""
    monkeypatch.chdir(folder)
    program, *arguments = shlex.split(command)
    if program == "make":
        for target in arguments:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    elif program == "pip":
        assert arguments[0] == "install" and arguments[1].startswith(".")
    elif program == "compressed-ddp" and arguments[0] in ("train", "compare"):
        run_application(arguments)
    elif program == "compressed-ddp" and arguments[:2] == ["data", "download"]:
        asked: list[str] = []
        monkeypatch.setattr(data, "download", lambda name, folder, progress: asked.append(name) or folder)
        assert main(arguments) == 0 and asked == [arguments[2]]
    elif program == "compressed-ddp" and arguments[0] == "lab":
        run_lab(arguments, monkeypatch)
    elif program == "compressed-ddp":
        assert main(arguments) == 0
    elif program == "python" and arguments[0] == "train.py":
        run_application(["train", *arguments[1:]])
    elif program == "python":
        assert arguments[0].startswith("experiments/") and (ROOT / arguments[0]).exists()
        run([sys.executable, arguments[0], "--help"])
    else:
        run_torchrun(page, arguments)


def run_application(arguments: list[str]) -> None:
    if "--print-config" in arguments:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code in (0, None)
        return
    if "list" in arguments:
        assert main(arguments) == 0
        return
    if "--resume" in arguments and "auto" not in arguments:
        assert Path("runs/last").exists()
    resumed, several = "--resume" in arguments, "--workers" in arguments
    # A run of one worker that goes on with three is really started; others are, in test_commands.py.
    short = [f for f in SHORT if not (resumed and ("--max-steps" in f or (several and "--workers" in f)))]
    more = ["--seeds=0", "--ratios=0.1", "--threads=1"] if arguments[0] == "compare" else TINY
    assert main([*arguments, *short, *more]) == 0


def run_lab(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes on loopback and a program that is there; a lab where one can be, whatever it carries."""
    monkeypatch.setattr("compressed_ddp.lab.selftest.LEAST", 0.0)
    monkeypatch.setattr("compressed_ddp.lab.selftest.MOST", 10.0)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    flags, program = arguments[:at], arguments[at + 1 :]
    if flags[1] == "run":
        flags += ["--hosts=2", "--loopback"]
        small = ["--elements=2000", "--repeats=1", "--steps=1", "--compute=1ms", "--methods=none,plain,fp16"]
        flags += ["--", "true"] if program else small
        assert main(flags) == 0
    else:
        assert main([*flags, *(["--hosts=2"] if flags[1] == "check" else [])]) == (1 if missing() else 0)


def run_torchrun(page: str, arguments: list[str]) -> None:
    """torchrun's own part with fewer workers; what is about CUDA with what is here."""
    where = next(i for i, argument in enumerate(arguments) if argument.endswith(".py"))
    launcher, script, flags = arguments[:where], arguments[where], arguments[where + 1 :]
    workers = 1 if "training.md" in page else 2
    launcher = ["--standalone", *launcher, f"--nproc-per-node={workers}"]
    if script == "train.py":
        flags = [*flags, *SHORT, *TINY, "--backend=gloo"]
    run([sys.executable, "-m", "torch.distributed.run", *launcher, script, *flags])


def run(command: list[str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr


def test_there_are_commands() -> None:
    found = [command for _, command in commands()]
    for beginning in (
        "make train",
        "python train.py",
        "torchrun",
        "compressed-ddp train --resume",
        "compressed-ddp compare",
        "compressed-ddp lab run",
        "python experiments/scalability_analysis.py",
    ):
        assert any(command.startswith(beginning) for command in found), beginning


def test_the_accuracy_table_is_what_its_command_makes() -> None:
    script = experiment.load("training_accuracy")
    rows = script.read(ROOT / "results" / "training_accuracy.csv")
    assert len(rows) == 4 + 4 + 4 + 3 * (3 + 3 + 3)
    assert script.table(rows) in (ROOT / "README.md").read_text()


def test_the_tables_of_results_are_what_their_command_makes() -> None:
    """And there is a picture for each file that one is made of, and no other."""
    script, block = experiment.load("result_tables"), experiment.load("pages").BLOCK
    found = report.load(ROOT / "results")
    drawn = {path.name: b"" for path in (ROOT / "docs" / "pictures").glob("*.png")}
    made = [picture for section in SECTIONS for picture in section.pictures if picture.source in found]
    assert set(drawn) == {f"{picture.name}.png" for picture in made}
    for page, mark, text in script.parts(found, drawn):
        _, there, after = (ROOT / page).read_text().partition(f"<!-- {mark} -->\n\n")
        stands = re.match(block, after)
        assert there and stands and stands[0].rstrip("\n") == text, f"{page}, {mark}: run {script.__file__}"


def test_claims_are_computed_from_files(tmp_path: Path) -> None:
    """Every claim has a cell without its file, and another one with it."""
    claims = experiment.load("claims")
    found = report.load(report_fixtures.write_all(tmp_path))
    for name, mine in claims.CLAIMS.items():
        without, with_files = (claims.table(each, name) for each in ({}, found))
        assert without.count("not measured yet") == len(mine)
        assert "not measured yet" not in with_files
        assert without.count("\n") == with_files.count("\n") == len(mine) + 1
