"""The house itself: which room may know which, what importing does, and that papers agree."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import experiment
import pytest

import compressed_ddp

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "compressed_ddp"

# Every room, and the rooms it may import from. A wrong arrow is an error, and so is a new room
# that nobody thought about.
ARROWS: dict[str, set[str]] = {
    "version": set(),
    "types": {"layout"},  # for annotations only
    "layout": set(),
    "files": set(),
    "kernels": {"types", "layout"},
    "wire": {"types", "version", "layout", "kernels"},
    "compression": {"types", "layout", "kernels", "wire"},
    "error_feedback": {"types", "layout"},
    "metrics": {"types", "files"},
    "communication": {
        "types",
        "version",
        "layout",
        "kernels",
        "wire",
        "compression",
        "error_feedback",
        "metrics",
        "optim",
    },
    "optim": {"types", "layout", "kernels"},
    "schedules": {"types"},
    "models": {"types"},
    "data": {"types", "files"},
    "training": {
        "types",
        "version",
        "files",
        "communication",
        "compression",
        "error_feedback",
        "metrics",
        "models",
        "data",
        "optim",
        "schedules",
    },
    "lab": {"types", "communication", "metrics", "models"},
    "report": {"version", "metrics", "lab"},
    "cli": {"version", "kernels", "compression", "training", "lab", "report"},
    "__main__": {"cli"},
    "__init__": {"communication", "compression", "error_feedback", "optim", "types", "version"},
}


def rooms_imported(path: Path) -> set[str]:
    """Which rooms a file's relative imports lead to."""
    room = path.relative_to(PACKAGE).with_suffix("").parts[0]
    depth = len(path.relative_to(PACKAGE).parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {name.split(".")[0] for name in names}
    return found - {room}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_dependencies_point_one_way(path: Path) -> None:
    room = path.relative_to(PACKAGE).with_suffix("").parts[0]
    assert room in ARROWS, f"{room} is a new room: say in ARROWS what it may know"
    assert rooms_imported(path) <= ARROWS[room]


# What rooms may import besides torch and the standard library; all of it is in the extra `train` or `plots`.
OTHERS: dict[str, set[str]] = {
    "data": {"numpy", "sklearn"},
    "metrics": {"tensorboard"},
    "report": {"matplotlib"},
    "training": {"docstring_parser", "jsonargparse", "matplotlib", "tqdm", "yaml"},
}


@pytest.mark.parametrize("room", sorted(ARROWS))
def test_the_core_needs_torch_alone(room: str) -> None:
    """Third-party imports: torch, and what the training application needs besides."""
    third_party = set()
    for path in [*PACKAGE.glob(f"{room}.py"), *(PACKAGE / room).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                third_party |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                third_party.add((node.module or "").split(".")[0])
    assert third_party - sys.stdlib_module_names <= {"torch"} | OTHERS.get(room, set())


CORE = ("types", "layout", "kernels", "compression", "wire", "error_feedback", "communication", "optim")
FLOATING = {"empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}
WHOLE = {"arange", "randint", "randperm"}


@pytest.mark.parametrize("room", CORE)
def test_the_core_leaves_nothing_to_torchs_defaults(room: str) -> None:
    """The default dtype and device are the user's: a tensor of ours says what it is and where it lies."""
    for path in [*PACKAGE.glob(f"{room}.py"), *(PACKAGE / room).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if not isinstance(called, ast.Attribute) or ast.unparse(called.value) != "torch":
                continue
            if called.attr not in FLOATING | WHOLE:
                continue
            wanted = {"dtype", "device"} if called.attr in FLOATING else {"device"}
            missing = wanted - {keyword.arg for keyword in node.keywords}
            assert not missing, f"{path.name}:{node.lineno}: torch.{called.attr} without {missing}"


def test_importing_does_no_work() -> None:
    """No thread, no logging configuration, no environment variable read by us."""
    program = (
        "import logging, os, threading, torch, torch.distributed\n"
        "reads = []\n"
        "class Watched(type(os.environ)):\n"
        "    def __getitem__(self, key):\n"
        "        reads.append(key)\n"
        "        return super().__getitem__(key)\n"
        "os.environ.__class__ = Watched\n"
        "handlers = list(logging.getLogger().handlers)\n"
        "import compressed_ddp\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert logging.getLogger().handlers == handlers\n"
        "print([key for key in reads if 'COMPRESSED' in key])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_public_names_exist_where_the_write_up_has_them() -> None:
    from compressed_ddp import communication, compression, error_feedback

    assert sorted(compressed_ddp.__all__) == sorted(set(compressed_ddp.__all__))
    for name in compressed_ddp.__all__:
        assert getattr(compressed_ddp, name) is not None
    assert compression.get_compressor is compressed_ddp.get_compressor
    assert compression.TopKCompressorGPU is compressed_ddp.TopKCompressorGPU
    assert compression.TopKCompressorCPU is compressed_ddp.TopKCompressorCPU
    assert compression.CompressStats is compressed_ddp.CompressStats
    assert error_feedback.ErrorFeedbackBuffer is compressed_ddp.ErrorFeedbackBuffer
    assert communication.DistributedBackend is compressed_ddp.DistributedBackend


def test_public_names_have_docstrings() -> None:
    for name in compressed_ddp.__all__:
        thing = getattr(compressed_ddp, name)
        assert name == "__version__" or (thing.__doc__ or "").strip(), f"{name} has no docstring"


def test_changelog_begins_with_the_version() -> None:
    entries = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0] == compressed_ddp.__version__


def test_readme_names_every_compressor() -> None:
    from compressed_ddp.compression import COMPRESSORS

    readme = (ROOT / "README.md").read_text()
    for name in COMPRESSORS:
        assert f"`{name}`" in readme, f"README's table has no row for {name}"


def test_readme_code_is_code() -> None:
    """Every Python block parses, and imports only what exists."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "compressed_ddp":
                assert {alias.name for alias in node.names} <= set(compressed_ddp.__all__)


def test_every_test_file_has_a_name_of_its_own() -> None:
    """Modules of the same name cannot be loaded together, as a plain ``pytest`` does."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_make_test_reaches_every_test() -> None:
    """Each line of the target as make itself would run it; a path that it names may be a folder or a file."""
    program = shutil.which("make")
    if program is None:
        pytest.skip("make is not here: its own words cannot be asked for")
    told = subprocess.run(
        [program, "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    lines = [shlex.split(line, comments=True) for line in told.splitlines() if "-m pytest" in line]
    named = [
        (ROOT / match).relative_to(ROOT)
        for words in lines
        if not any(word.startswith("COMPRESSED_DDP_KERNELS=") for word in words)  # some of them a second time
        for word in words
        if word.startswith("tests/")
        for match in ROOT.glob(word)
    ]
    files = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(files) > 40
    missed = [str(file) for file in sorted(files) if not any(file.is_relative_to(one) for one in named)]
    assert not missed, f"`make test` never runs {', '.join(missed)}: name them in the Makefile"


DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("path", sorted(DOCUMENTS), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}, which does not exist"


def test_readme_figures_come_from_results() -> None:
    """Every percentage in the README's table of compressors is in the CSV that a command made."""
    import csv

    with (ROOT / "results" / "message_sizes.csv").open() as file:
        rows = list(csv.DictReader(file))
    best: dict[str, set[str]] = {}
    for name, options in {(row["compressor"], row["options"]) for row in rows}:
        shares = [
            row["percent_of_ring"] for row in rows if (row["compressor"], row["options"]) == (name, options)
        ]
        best.setdefault(name, set()).add(min(shares, key=float))
    table = re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(table) == len(best)
    for name, cell in table:
        figures = re.findall(r"\b\d+\.\d\d\b(?!\d)", re.sub(r"`[^`]*`| at [\d.]+", "", cell))
        assert figures and set(figures) <= best[name], f"{name}: {figures} not in {best[name]}"
    measure = experiment.load("message_sizes")
    side = int(float(rows[0]["elements"]) ** 0.5)
    layout = measure.BucketLayout(("weight",), (measure.torch.Size([side, side]),))
    for options in ({"ratio": 0.01, "values": "int8"}, {"ratio": 0.001, "values": "fp16"}):
        named = " ".join(f"{key}={value}" for key, value in options.items())
        for way in ("allgather", "sharded"):
            (row,) = [
                r for r in rows if (r["compressor"], r["options"], r["collective"]) == ("topk", named, way)
            ]
            sent = measure.sent({"compressor": "topk", **options}, way, int(row["workers"]), layout)
            assert sent == int(row["bytes_sent"]), (
                "what is sent has changed: python experiments/message_sizes.py"
            )


def test_kernel_figures_come_from_results() -> None:
    """docs/kernels.md has the tables that its command makes of the CSV files."""
    made = experiment.load("kernel_tables").tables()
    page = (ROOT / "docs" / "kernels.md").read_text()
    stand = dict(re.findall(r"<!-- (\w+) -->\n\n((?:\|.*\n)+)", page))
    assert {mark: table.rstrip("\n") for mark, table in stand.items()} == made
    assert "`take_` in place" in made["targets"] and "| reached |" in made["targets"]
