"""Every command in README and docs is run, made short, and every table is what its command makes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import experiment
import pytest
import report_fixtures
import tiny_data
import tomllib
from torch.distributed.run import get_args_parser

from compressed_ddp import data, report
from compressed_ddp.cli import main
from compressed_ddp.kernels import describe
from compressed_ddp.lab import missing
from compressed_ddp.report.sections import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "adr").glob("*.md"))]
OWN_TESTS = {"deploy.md"}  # test_deploy.py runs the commands in its blocks
PROGRAM = re.compile(r"(python|compressed-ddp|torchrun|make|pip)( |$)")
# Later flags win: two steps of a tiny piece, by one worker.
SHORT = ["--limit=12", "--batch-size=2", "--epochs=1", "--max-steps=2", "--workers=1", "--no-tensorboard"]
TINY = ["--block=16", "--threads=1"]
# An experiment that is quick runs, as a program. Flags of the others are read by their own parsers here; in
# short forms they run in unit/test_experiments.py, test_benchmark_training.py, test_comparison_of_methods.py,
# test_notebooks.py, test_quick_validation.py, lab/test_scalability.py and distributed/test_faults.py.
SHORT_FORMS = {"cost_model": ["--out=short"]}


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
    return ["\n".join(block).replace("\\\n", " ").splitlines() for block in found]


def inline(text: str) -> list[str]:
    """What stands between single backticks, outside of blocks; it may go on in the next line."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", prose)]


def commands() -> list[tuple[str, str]]:
    """Page and command: of everything that stands in a block, then of sentences what no block has."""
    lines = [
        (page.name, line.split(" #")[0].strip())
        for page in PAGES
        if page.name not in OWN_TESTS
        for block in blocks(page.read_text())
        for line in block
    ]
    known = {command for _, command in lines}
    for page in PAGES:
        for words in inline(page.read_text()):
            if words not in known:
                known.add(words)
                lines.append((page.name, words))
    return list(dict.fromkeys(it for it in lines if PROGRAM.match(it[1])))


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
        if shutil.which("make") is None:
            pytest.skip("make is not here")
        run(["make", "-C", str(ROOT), "-n", *arguments])
    elif program == "pip":
        check_pip(arguments)
    elif "--help" in arguments:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert program == "compressed-ddp" and caught.value.code == 0
    elif program == "compressed-ddp" and arguments[0] in ("train", "compare"):
        run_application(arguments)
    elif program == "compressed-ddp" and arguments[:2] == ["data", "download"]:
        asked: list[str] = []
        monkeypatch.setattr(data, "download", lambda name, folder, progress: asked.append(name) or folder)
        assert main(arguments) == 0 and asked == [arguments[2]]
    elif program == "compressed-ddp" and arguments[0] == "lab":
        run_lab(arguments, monkeypatch)
    elif program == "compressed-ddp":
        wanted = 0 if "--expect-native" not in arguments or describe().startswith("native") else 1
        assert main(arguments) == wanted
    elif program == "python" and arguments[0] == "train.py":
        run_application(["train", *arguments[1:]])
    elif program == "python":
        run_experiment(*arguments)
    else:
        run_torchrun(page, arguments)


def check_pip(arguments: list[str]) -> None:
    """Nothing is installed: extras that are asked for exist."""
    assert arguments[0] in ("install", "wheel")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for what in arguments[1:]:
        asked = re.fullmatch(r"\.(?:\[([\w,]+)\])?", what)
        assert asked, what
        assert set((asked[1] or "dev").split(",")) <= set(project["optional-dependencies"]), what


def parse_experiment(script: str, flags: list[str]) -> str:
    """An experiment's name, after its own parser has read ``flags``; fails for those it would not take."""
    path = Path(script)
    assert path.parent == Path("experiments") and (ROOT / path).exists(), f"{script} is no experiment"
    if path.stem == "benchmark_compression":
        pytest.importorskip("compressed_ddp.kernels._native", reason="it compares the extension")
    environment = dict(os.environ)
    try:
        experiment.load(path.stem).parse(flags)
    except SystemExit as error:
        pytest.fail(f"{script} does not take {shlex.join(flags)}: exit status {error.code}")
    finally:  # programs set variables for themselves alone
        os.environ.clear()
        os.environ.update(environment)
    return path.stem


def run_experiment(script: str, *flags: str) -> None:
    name = parse_experiment(script, list(flags))
    if name in SHORT_FORMS:
        run([sys.executable, script, *flags, *SHORT_FORMS[name]])


def run_application(arguments: list[str]) -> None:
    if "--print-config" in arguments or "list" in arguments:
        assert main(arguments) == 0
        return
    if "--resume" in arguments and "auto" not in arguments:
        assert Path("runs/last").exists()
    resumed, several = "--resume" in arguments, "--workers" in arguments
    # A run of one worker that goes on with three is really started; others are, in test_commands.py.
    short = [f for f in SHORT if not (resumed and ("--max-steps" in f or (several and "--workers" in f)))]
    more = TINY
    if arguments[0] == "compare":
        more = ["--seeds=0", "--ratios=0.1", "--threads=1", "--workers=2"]
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
    if script.startswith("experiments/"):
        get_args_parser().parse_args(arguments)
        parse_experiment(script, flags)
        return
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
        "python experiments/message_sizes.py",  # in a sentence
        "compressed-ddp train --compress --memory",
    ):
        assert any(command.startswith(beginning) for command in found), beginning


def test_wrong_commands_are_found() -> None:
    with pytest.raises(pytest.fail.Exception, match="does not take --hots 2"):
        parse_experiment("experiments/scalability_analysis.py", ["--hots", "2"])
    with pytest.raises(AssertionError, match="no experiment"):
        parse_experiment("experiments/nothing.py", [])
    with pytest.raises(AssertionError, match="No rule"):
        run(["make", "-C", str(ROOT), "-n", "no-such-target"])
    with pytest.raises(AssertionError, match="trian"):
        check_pip(["install", ".[trian]"])
    assert inline("a `make\nx`\n```\n`make y`\n```\n`b`") == ["make x", "b"]


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


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")
@pytest.mark.parametrize("user", [0, 1000])
def test_the_demo_of_the_lab_asks_for_root_before_anything_else(user: int, tmp_path: Path) -> None:
    (tmp_path / "id").write_text(f"#!/bin/sh\necho {user}\n")
    (tmp_path / "id").chmod(0o755)
    settings = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["make", "-C", str(ROOT), "needs-root"]
    done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
    assert (done.returncode == 0) == (user == 0)
    assert ('sudo env "PATH=$PATH" make lab-demo' in done.stderr) == (user != 0)
    dry = subprocess.run([*command[:-1], "-n", "lab-demo"], capture_output=True, text=True, check=True)
    recipe = [line for line in dry.stdout.splitlines() if not line.startswith("make")]
    assert recipe[0].startswith('test "$(id -u)" = 0')
