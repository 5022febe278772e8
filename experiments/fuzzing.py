"""Fuzz every decoder: the C++ kernels by libFuzzer under sanitizers, the Python ones by atheris.

    python experiments/fuzzing.py                       # all targets, as `make fuzz` does: about half an hour
    python experiments/fuzzing.py --targets python_messages --runs 100000

Builds in --work, where corpora stay for the next time, and writes a row a target to fuzz.csv in --out. What
crashes (anything that a target, a sanitizer or a limit of time or memory objects to) is kept there as a file,
and the exit status is 1. A target that cannot run here, or that is interrupted, writes no row, and the exit
status is 2. --table prints the rows as docs/fuzzing.md has them, which says what decoders are held to.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import rows
from origin import origin

ROOT = Path(__file__).resolve().parents[1]
FUZZ = ROOT / "fuzz"
CSRC = ROOT / "csrc"
sys.path.insert(0, str(FUZZ))

TARGETS = {"native_messages": 10_000_000, "native_selection": 500_000, "python_messages": 1_000_000}
"""How many executions each gets."""
INTERRUPTED = 72
"""libFuzzer's exit status after SIGINT or SIGTERM."""
SLICE = 500_000
"""Executions of one process: the next begins with what it kept."""
LENGTH = {"native_messages": 400, "native_selection": 300, "python_messages": 700}
LOOKED_AT = {
    "native_messages": ("reading.h", "codec.cpp", "accumulate.cpp", "loops_one.h", "loops_avx512.h"),
    "native_selection": ("select.cpp", "bracket.cpp", "finish.cpp"),
}
COLUMNS = ("target", "executions", "seconds", "edges", "lines", "crashes")

FLAGS = ["-std=c++20", "-O2", "-g", "-ffp-contract=off", "-Wall", "-Wextra", "-pthread", f"-I{CSRC}"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
UNITS = {name: [] for name in ("select", "bracket", "finish", "accumulate", "codec", "isa")}
LOOPS = {"baseline": ["-DCDDP_LOOPS=baseline_loops"]}
if platform.machine() in ("x86_64", "AMD64", "amd64"):
    FLAGS.append("-DCDDP_HAVE_X86")
    AVX2 = ["-mavx2", "-mbmi", "-mpopcnt"]
    AVX512 = [*AVX2, "-mbmi2", *(f"-mavx512{part}" for part in ("f", "dq", "bw", "vl"))]
    LOOPS["avx2"] = [*AVX2, "-DCDDP_LOOPS=avx2_loops"]
    LOOPS["avx512"] = [*AVX512, "-DCDDP_LOOPS=avx512_loops"]


class Missing(Exception):
    """Something that fuzzing needs is not on this machine."""


class Interrupted(Exception):
    """Someone ended a fuzzer: nothing was found, and what it did is not what was asked for."""


def run(command: Sequence[str | Path], **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload]


def must(command: Sequence[str | Path]) -> str:
    done = run(command)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


# --- the native targets --------------------------------------------------------------------


def find_clang(work: Path) -> str:
    """A clang++ whose libFuzzer links and runs here; raises Missing with what to install."""
    names = [
        os.environ.get("CLANGXX", ""),
        "clang++",
        *(f"clang++-{version}" for version in range(21, 13, -1)),
    ]
    advice = (
        "Debian, Ubuntu: apt-get install clang llvm libclang-rt-dev (or libclang-rt-14-dev); or set CLANGXX"
    )
    found = [name for name in names if name and shutil.which(name)]
    if not found:
        raise Missing(f"no clang++ on the PATH, and libFuzzer is a part of clang. {advice}")
    probe = work / "probe.cpp"
    probe.write_text(
        'extern "C" int LLVMFuzzerTestOneInput(const unsigned char *, unsigned long) { return 0; }\n'
    )
    built = run([found[0], "-fsanitize=fuzzer,address,undefined", probe, "-o", work / "probe"])
    if built.returncode or run([work / "probe", "-runs=1"]).returncode:
        raise Missing(f"{found[0]} makes no fuzzer that runs here: {built.stderr.strip()[-300:]}\n{advice}")
    return found[0]


def build(
    clang: str, target: str, work: Path, instrument: Sequence[str], link: Sequence[str], name: str
) -> Path:
    """``target`` with kernels compiled with ``instrument``; the judge is neither slowed down nor counted."""
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    units = [(CSRC / f"{unit}.cpp", unit, extra) for unit, extra in UNITS.items()]
    units += [(CSRC / "loops.cpp", unit, extra) for unit, extra in LOOPS.items()]
    objects = []
    for source, unit, extra in units:
        objects.append(folder / f"{unit}.o")
        must([clang, *FLAGS, *instrument, *extra, "-c", source, "-o", objects[-1]])
    judge = folder / f"{target}.o"
    must([clang, *FLAGS, "-c", FUZZ / f"{target}.cpp", "-o", judge])
    program = folder / target
    must([clang, *link, "-pthread", judge, *objects, "-o", program])
    return program


def native_lines(clang: str, target: str, work: Path, corpus: Path) -> str:
    """Lines of the kernels that the corpus reaches, by clang's own count; empty where llvm-cov is missing."""
    suffix = re.sub(r"^.*clang\+\+", "", clang)
    cov, merge = (shutil.which(f"{tool}{suffix}") for tool in ("llvm-cov", "llvm-profdata"))
    if cov is None or merge is None:
        return ""
    counted = ["-fprofile-instr-generate", "-fcoverage-mapping"]
    program = build(clang, target, work, counted, ["-fsanitize=fuzzer", *counted], "coverage")
    raw, merged = work / "raw.profraw", work / "merged.profdata"
    done = run([program, "-runs=0", corpus], env={**os.environ, "LLVM_PROFILE_FILE": str(raw)})
    if done.returncode:
        raise RuntimeError(done.stderr)
    must([merge, "merge", "-sparse", raw, "-o", merged])
    told = json.loads(must([cov, "export", "-summary-only", f"-instr-profile={merged}", program]))
    shares = []
    for file in told["data"][0]["files"]:
        name, lines = Path(file["filename"]).name, file["summary"]["lines"]
        if name in LOOKED_AT[target]:
            shares.append(f"{name} {lines['covered']}/{lines['count']}")
    return "; ".join(shares)


# --- the Python target ---------------------------------------------------------------------


def python_lines(corpus: Path) -> str:
    told = json.loads(must([sys.executable, FUZZ / "lines.py", corpus]))
    return "; ".join(
        f"{Path(name).name} {file['lines'] - len(file['missing'])}/{file['lines']}"
        for name, file in told["files"].items()
    )


def check_python() -> None:
    """Raises Missing without atheris, or without the kernels that the torch ones are compared with."""
    if run([sys.executable, "-c", "import atheris"]).returncode:
        raise Missing(
            "no atheris in this environment: pip install '.[fuzz]' (Linux and macOS, Python 3.11 and later)"
        )
    if run([sys.executable, "-c", "import compressed_ddp.kernels._native"]).returncode:
        raise Missing(
            "the C++ kernels are not built in this environment: reinstall the package with a compiler"
        )


# --- both ----------------------------------------------------------------------------------


def fuzz(
    command: Sequence[str | Path], target: str, runs: int, corpus: Path, crashes: Path, jobs: int = 1
) -> tuple[int, str]:
    """Run ``command`` for ``runs`` executions, or until one crashes: how many were, and edges reached."""
    done, edges = 0, 0

    def one_slice(seed: int) -> None:
        nonlocal done, edges
        if any(crashes.iterdir()):
            return
        flags = [
            f"-runs={min(SLICE, runs - SLICE * seed)}",
            f"-max_len={LENGTH[target]}",
            f"-seed={seed + 1}",
        ]
        # Time is wall time: a busy or sleeping machine is not a slow decoder.
        flags += ["-timeout=300", "-report_slow_units=300", f"-artifact_prefix={crashes}/"]
        ended = run([*command, *flags, "-print_final_stats=1", "-reduce_inputs=0", corpus])
        counted = re.search(r"number_of_executed_units: (\d+)", ended.stderr)
        if not any(crashes.iterdir()):
            if ended.returncode in (INTERRUPTED, -signal.SIGTERM, -signal.SIGINT):
                raise Interrupted(f"a signal ended it after {done:,} executions or more; none had crashed")
            if ended.returncode or counted is None:
                (crashes / f"ended-{seed}.txt").write_text(ended.stdout + ended.stderr)
        if ended.returncode:
            print(ended.stderr[-3000:], file=sys.stderr)
        done += int(counted[1]) if counted else 0
        edges = max(edges, *map(int, re.findall(r"cov: (\d+)", ended.stderr)), 0)
        print(
            f"{target}: {done:,} executions, {edges} edges, {len(list(corpus.iterdir())):,} kept", flush=True
        )

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one_slice, range(-(-runs // SLICE))))
    return done, str(edges)


def one_target(target: str, runs: int, work: Path, jobs: int) -> dict[str, object]:
    import seeds

    corpus, crashes = work / f"corpus-{target}", work / f"crashes-{target}"
    crashes.mkdir(parents=True, exist_ok=True)
    for old in crashes.iterdir():
        old.unlink()
    seeds.write(target, corpus)
    clang = ""
    if target.startswith("native"):
        clang = find_clang(work)
        instrument = ["-fsanitize=fuzzer-no-link", *SANITIZERS]
        command: list[str | Path] = [
            build(clang, target, work, instrument, ["-fsanitize=fuzzer", *SANITIZERS], "fuzz")
        ]
    else:
        check_python()
        command = [sys.executable, FUZZ / f"{target}.py"]
    start = time.perf_counter()
    done, edges = fuzz(command, target, runs, corpus, crashes, jobs)
    seconds = time.perf_counter() - start
    found = len(list(crashes.iterdir()))
    lines = "" if found else native_lines(clang, target, work, corpus) if clang else python_lines(corpus)
    return {
        "target": target,
        "executions": done,
        "seconds": round(seconds),
        "edges": edges,
        "lines": lines,
        "crashes": found,
        "date": datetime.date.today().isoformat(),
    }


def table(found: Sequence[Mapping[str, str]]) -> str:
    """The rows of fuzz.csv in Markdown."""
    lines = [
        "| target | executions | seconds | edges | lines reached | crashes | commit | date |",
        "|---" * 8 + "|",
    ]
    for row in sorted(found, key=lambda row: list(TARGETS).index(row["target"])):
        figures = f"{int(row['executions']):,}", f"{int(row['seconds']):,}", row["edges"], row["lines"]
        cells = f"`{row['target']}`", *figures, row["crashes"], row["commit"], row["date"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--runs", type=int, help="executions of each target, instead of the usual number")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at the same time")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "fuzz", help="programs, corpora, crashes"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="where fuzz.csv goes")
    parser.add_argument("--table", action="store_true", help="print what fuzz.csv says, and do nothing else")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if options.table:
        print(table(rows.read(options.out / "fuzz.csv")))
        return 0
    options.work.mkdir(parents=True, exist_ok=True)
    path, where = options.out / "fuzz.csv", origin()
    crashed = missing = False
    for target in options.targets:
        try:
            row = one_target(target, options.runs or TARGETS[target], options.work, options.jobs)
        except (Missing, Interrupted) as what:
            print(f"{target} has no result: {what}", file=sys.stderr)
            missing = True
            continue
        others = [old for old in rows.read(path) if old["target"] != target]
        path.unlink(missing_ok=True)
        rows.append(path, [*COLUMNS, "date", *where], [*others, row | where])
        print(f"{target}: {row['crashes']} crashes; lines reached: {row['lines']}")
        crashed |= bool(row["crashes"])
    return 1 if crashed else 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
