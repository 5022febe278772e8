"""The C++ kernels by themselves, under the compiler's sanitizers.

``tests/native/selftest.cpp`` compares every function with naive code, on buffers that end exactly
where their allocation ends. Here it is built with AddressSanitizer and UndefinedBehaviorSanitizer,
which see what no comparison of results does: a byte read beyond the end, a shift too far. Then again
with ThreadSanitizer, for what threads share.

The native fuzz targets (``fuzz/``) run on the first build too, with a driver that changes seeds at random:
the short version of ``make fuzz``, which needs clang.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
SELFTEST = ROOT / "tests" / "native" / "selftest.cpp"
FUZZ = ROOT / "fuzz"
SEED = "1"
WORKERS = max(2, os.cpu_count() or 1)

FLAGS = ["-std=c++20", "-O1", "-g", "-ffp-contract=off", "-Wall", "-Wextra", "-pthread", f"-I{CSRC}"]
AVX2 = ["-mavx2", "-mbmi", "-mpopcnt"]
AVX512 = [*AVX2, "-mbmi2", *(f"-mavx512{part}" for part in ("f", "dq", "bw", "vl"))]
# Sources, and what each is compiled with besides, as in CMakeLists.txt.
UNITS = {
    "selftest": (SELFTEST, ["-fno-sanitize=undefined"]),  # the judge is not on trial: twice as fast to build
    "select": (CSRC / "select.cpp", []),
    "bracket": (CSRC / "bracket.cpp", []),
    "finish": (CSRC / "finish.cpp", []),
    "accumulate": (CSRC / "accumulate.cpp", []),
    "codec": (CSRC / "codec.cpp", []),
    "isa": (CSRC / "isa.cpp", []),
    "baseline": (CSRC / "loops.cpp", ["-DCDDP_LOOPS=baseline_loops"]),
}
if platform.machine() in ("x86_64", "AMD64", "amd64"):
    FLAGS.append("-DCDDP_HAVE_X86")
    UNITS["avx2"] = (CSRC / "loops.cpp", [*AVX2, "-DCDDP_LOOPS=avx2_loops"])
    # What GCC 12 weaves in to watch threads spoils AVX-512's mask registers: twenty lines that compress a
    # vector give wrong results with it. Lists and buffers are shared by what calls these loops.
    UNITS["avx512"] = (CSRC / "loops.cpp", [*AVX512, "-DCDDP_LOOPS=avx512_loops", "-fno-sanitize=thread"])

# What to build with, what to run (rounds, and which cases), and how many inputs each fuzz target gets.
RUNS = {
    "memory": (
        ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
        [("1000", "short"), ("6", "long")],
        {"native_messages": "40000", "native_selection": "5000"},
    ),
    "threads": (["-fsanitize=thread"], [("3", "long"), ("40", "callers")], {}),
}


def run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def must(command: Sequence[str | Path]) -> str:
    done = run(command)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def find_compiler() -> list[str]:
    """The compiler and its own arguments; skips the test where there is none."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    pytest.skip("no C++ compiler: set CXX, or put c++, g++ or clang++ on the PATH")


def seeds(target: str, folder: Path) -> list[Path]:
    """What ``make fuzz`` begins with."""
    program = f"import seeds, pathlib; seeds.write({target!r}, pathlib.Path({str(folder)!r}))"
    must([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(FUZZ)!r}); {program}"])
    return sorted(folder.iterdir())


@pytest.mark.skipif(
    os.environ.get("COMPRESSED_DDP_KERNELS") == "reference", reason="this run is about the torch kernels"
)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("about", RUNS)
def test_kernels_under_sanitizers(about: str, tmp_path: Path) -> None:
    sanitizers, programs, targets = RUNS[about]
    compiler = find_compiler()

    # A compiler may know the flag and lack the library, or the library may not run on this kernel.
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    built = run([*compiler, *sanitizers, "-pthread", probe, "-o", tmp_path / "probe"])
    if built.returncode or run([tmp_path / "probe"]).returncode:
        pytest.skip(f"{shlex.join(compiler)} makes no program that runs with {sanitizers[0]}")

    def build(name: str) -> Path:
        source, extra = UNITS[name] if name in UNITS else (FUZZ / f"{name}.cpp", ["-fno-sanitize=all"])
        target = tmp_path / f"{name}.o"
        must([*compiler, *FLAGS, *sanitizers, *extra, "-c", source, "-o", target])
        return target

    selftest = tmp_path / "selftest"
    with ThreadPoolExecutor(WORKERS) as workers:
        objects = list(workers.map(build, [*UNITS, *(["driver", *targets] if targets else [])]))
        kernels = objects[1 : len(UNITS)]
        must([*compiler, *FLAGS, *sanitizers, objects[0], *kernels, "-o", selftest])
        reports = list(workers.map(lambda program: must([selftest, SEED, *program]), programs))

        def fuzz(name: str) -> str:
            judge, driver = tmp_path / f"{name}.o", tmp_path / "driver.o"
            must([*compiler, *sanitizers, "-pthread", judge, driver, *kernels, "-o", tmp_path / name])
            return must([tmp_path / name, SEED, targets[name], *seeds(name, tmp_path / f"seeds-{name}")])

        fuzzed = list(workers.map(fuzz, targets))
    for report in reports:
        summary = re.search(r"^selftest: (\d+) cases as they should be", report, re.MULTILINE)
        assert summary, report
        assert int(summary[1]) > 0
    for report, inputs in zip(fuzzed, targets.values(), strict=True):
        assert report == f"driver: {inputs} inputs as they should be\n"
