"""docs/deploy.md and the files it leads to: all commands through the real parsers, and two "hosts" run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from torch.distributed.run import get_args_parser

from compressed_ddp import SyncError
from compressed_ddp.communication.handshake import compare
from compressed_ddp.training import cli
from compressed_ddp.training.checkpoint import CheckpointError, Checkpoints
from compressed_ddp.training.config import TrainConfig
from compressed_ddp.training.flags import make_parser, parse

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy.md"
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
MANIFEST = ROOT / "examples" / "kubernetes" / "pytorchjob.yaml"
DOCKERFILE = ROOT / "examples" / "kubernetes" / "Dockerfile"
BIN = Path(sys.executable).parent
KUBERNETES = "1.33"

# --- commands ----------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """Every command in the code blocks of ``text``, as words, without the variables set before it."""
    for block in re.findall(r"^ *```\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if " by another worker is not here" in line:
                continue  # a message, not a command
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words:
                yield words


def train_flags(arguments: Sequence[str]) -> TrainConfig:
    """The configuration that flags of ``compressed-ddp train`` mean; SystemExit for a wrong one."""
    return parse(make_parser("compressed-ddp train", ""), arguments)[0]


def torchrun_flags(arguments: Sequence[str]) -> tuple[Any, TrainConfig]:
    """What torchrun would take for itself, and the configuration of what it starts."""
    options = get_args_parser().parse_args(list(arguments))
    if options.module:
        assert (options.training_script, options.training_script_args[0]) == ("compressed_ddp", "train")
        return options, train_flags(options.training_script_args[1:])
    assert (ROOT / options.training_script).is_file() and options.training_script.endswith("train.py")
    return options, train_flags(options.training_script_args)


def check(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the real parser of a command read it; fails for a program that nobody checks."""
    match words:
        case ["torchrun", *rest]:
            options, config = torchrun_flags(rest)
            assert options.rdzv_backend == "c10d" and options.rdzv_endpoint and options.rdzv_id
            assert config.running.run_dir, "several hosts: a new folder's name is not found again"
        case ["compressed-ddp", "train", "--model", "list"]:
            pass
        case ["compressed-ddp", "train", *rest] | ["python", "train.py", *rest]:
            train_flags(rest)
        case ["compressed-ddp", "data", *rest]:
            monkeypatch.setattr(cli, "_download", lambda name, folder: folder)
            assert cli.data_command(rest) == 0
        case ["sbatch", *rest]:
            at = rest.index(str(SCRIPT.relative_to(ROOT)))
            assert all(word.startswith("--nodes=") for word in rest[:at])
            train_flags(rest[at + 1 :])
        case ["docker" | "kubectl", *rest]:
            for word in rest:
                assert not word.startswith("examples/") or (ROOT / word).is_file()
        case ["export", variable]:
            assert re.fullmatch(r"(GLOO|NCCL)_SOCKET_IFNAME=\w+", variable)
        case _:
            raise AssertionError(f"nobody checks {shlex.join(words)}")


def test_every_command_of_the_page_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = list(commands(PAGE.read_text()))
    assert {"torchrun", "compressed-ddp", "sbatch", "docker", "kubectl"} <= {words[0] for words in found}
    for words in found:
        check(words, monkeypatch)
    for inline in re.findall(r"`(compressed-ddp [^`]+)`", PAGE.read_text()):
        check(shlex.split(inline), monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nnodes 2 --rdzv-backend c10d --rdvz-id a -m compressed_ddp train --run-dir a",
        "torchrun --nnodes 2 --rdzv-id a --rdzv-endpoint a:1 -m compressed_ddp train --ration 1",
        "compressed-ddp train --schedule nonsense",
        "compressed-ddp train --batch-size 0",
        "compressed-ddp data download mnits",
        "rsync a b",
    ],
)
def test_a_wrong_command_would_be_noticed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((SystemExit, AssertionError)):
        check(shlex.split(line), monkeypatch)


def test_every_flag_that_the_page_mentions_exists() -> None:
    known = {"--requeue", *make_parser("", "").format_help().replace(",", " ").split()}
    known |= {option for action in get_args_parser()._actions for option in action.option_strings}
    prose = re.sub(r"^ *```\n.*?^ *```", "", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    mentioned = {flag for code in re.findall(r"`([^`]+)`", prose) for flag in re.findall(r"--[a-z-]+", code)}
    assert {"--run-dir", "--rdzv-conf", "--sync-timeout"} <= mentioned <= known


# --- SLURM -------------------------------------------------------------------------------------


def test_the_sbatch_script_is_clean() -> None:
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n", SCRIPT], check=True)
    found = subprocess.run([BIN / "shellcheck", SCRIPT], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_sbatch_lines() -> None:
    """SLURM reads them before the first command, and nothing but long options is in them."""
    lines = SCRIPT.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = {}
    for i, line in enumerate(lines):
        if line.startswith("#SBATCH"):
            assert i < first, f"SLURM ignores {line!r}: it comes after a command"
            name, _, value = line.removeprefix("#SBATCH ").partition("=")
            assert name not in options and re.fullmatch(r"--[a-z-]+", name)
            options[name] = value
    assert options["--ntasks-per-node"] == "1"  # one torchrun a node
    assert int(options["--nodes"]) >= 2 and int(options["--cpus-per-task"]) >= 1
    assert re.fullmatch(r"\d\d:\d\d:\d\d", options["--time"])
    assert re.fullmatch(r"B:USR1@\d+", options["--signal"])  # B: to the script, which has the trap
    assert options["--requeue"] == "" and options["--open-mode"] == "append"
    assert set(options) == {
        *("--job-name", "--nodes", "--ntasks-per-node", "--cpus-per-task", "--time", "--output"),
        *("--open-mode", "--requeue", "--signal"),
    }


def start_script(folder: Path, srun: str, *arguments: str) -> subprocess.Popen[str]:
    """The script, with stand-ins for SLURM's commands that write down how they were called."""
    stand_ins = {
        "srun": f'printf "%s\\0" "$OMP_NUM_THREADS" "$@" > "{folder}/srun"\n{srun}',
        "scontrol": f'echo "$*" >> "{folder}/scontrol"\n[ "$1" != show ] || printf "node7\\nnode9\\n"',
    }
    (folder / "bin").mkdir()
    for name, body in stand_ins.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    slurm = {"JOB_ID": "12345", "JOB_NODELIST": "node[7,9]", "JOB_NUM_NODES": "2", "CPUS_PER_TASK": "8"}
    variables = {f"SLURM_{name}": value for name, value in slurm.items()}
    variables |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "WORKERS_PER_NODE": "2"}
    return subprocess.Popen(
        ["bash", SCRIPT, *arguments],
        env={**os.environ, **variables},
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_what_the_sbatch_script_starts(tmp_path: Path) -> None:
    script = start_script(tmp_path, "exit 3", "--epochs", "7", "--text", "with space")
    assert "unbound" not in script.communicate(timeout=20)[1]
    assert script.returncode == 3, "the job must fail where srun does"
    threads, *words = (tmp_path / "srun").read_text().split("\0")[:-1]
    assert threads == "4"  # 8 cores, 2 workers
    at = words.index("torchrun")
    assert set(words[:at]) == {"--kill-on-bad-exit=1", "--cpus-per-task=8"}
    options, config = torchrun_flags(words[at + 1 :])
    assert (options.nnodes, options.nproc_per_node, options.rdzv_endpoint) == ("2", "2", "node7:22345")
    assert options.rdzv_id == "12345-0" and options.max_restarts == 3
    assert config.compress and config.optimisation.epochs == 7 and config.task.text == "with space"
    assert config.running.resume == "auto" and config.running.run_dir == f"{tmp_path}/runs/slurm-12345"


def test_the_sbatch_script_asks_to_be_queued_again(tmp_path: Path) -> None:
    script = start_script(tmp_path, f'kill -USR1 "$PPID"; exec sleep 30 2> "{tmp_path}/quiet"')
    try:
        script.wait(timeout=20)
        assert script.returncode == 128 + signal.SIGUSR1
        assert (tmp_path / "scontrol").read_text().splitlines()[-1] == "requeue 12345"
    finally:
        script.kill()


# --- Kubernetes --------------------------------------------------------------------------------

_REPLICA = {
    "type": "object",
    "required": ["replicas", "restartPolicy", "template"],
    "additionalProperties": False,
    "properties": {
        "replicas": {"type": "integer", "minimum": 1},
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        "template": {"type": "object"},  # a PodTemplateSpec: checked with Kubernetes' own schema
    },
}
JOB = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}},
        },
        "spec": {
            "type": "object",
            "required": ["pytorchReplicaSpecs"],
            "additionalProperties": False,
            "properties": {
                "nprocPerNode": {"type": "string"},
                "runPolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "cleanPodPolicy": {"enum": ["All", "Running", "None"]},
                        "ttlSecondsAfterFinished": {"type": "integer"},
                        "activeDeadlineSeconds": {"type": "integer"},
                        "backoffLimit": {"type": "integer"},
                        "suspend": {"type": "boolean"},
                    },
                },
                "pytorchReplicaSpecs": {
                    "type": "object",
                    "required": ["Master"],
                    "additionalProperties": False,
                    "properties": {"Master": _REPLICA, "Worker": _REPLICA},
                },
            },
        },
    },
}
"""The part of the operator's PyTorchJob, kubeflow.org/v1, that the manifest may use."""


def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    claim, job = yaml.safe_load_all(MANIFEST.read_text())
    return claim, job


def validate(job: dict[str, Any]) -> None:
    """Check ``job``, and the pods that the operator will make of it."""
    jsonschema.validate(job, JOB)
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        template = replica["template"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", **template["metadata"]}}
        kubernetes_validate.validate(pod | {"spec": template["spec"]}, KUBERNETES, strict=True)


def test_the_manifest_is_valid() -> None:
    claim, job = manifest()
    kubernetes_validate.validate(claim, KUBERNETES, strict=True)
    validate(job)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    for replica in replicas.values():
        spec = replica["template"]["spec"]
        assert replica["restartPolicy"] == "OnFailure"
        [volume] = spec["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        [container] = spec["containers"]
        assert container["name"] == "pytorch" and container["image"] in PAGE.read_text()
        assert {"name": "OMP_NUM_THREADS", "value": container["resources"]["limits"]["cpu"]} in container[
            "env"
        ]
        [mount] = container["volumeMounts"]
        assert mount["name"] == volume["name"]


def test_a_wrong_manifest_would_be_noticed() -> None:
    for key, place in (("restartPolcy", ()), ("volume", ("template", "spec"))):
        _, job = manifest()
        inner = job["spec"]["pytorchReplicaSpecs"]["Worker"]
        for name in place:
            inner = inner[name]
        inner[key] = []
        with pytest.raises(jsonschema.ValidationError, match=key):
            validate(job)


def container_commands() -> list[list[str]]:
    _, job = manifest()
    pods = [replica["template"]["spec"] for replica in job["spec"]["pytorchReplicaSpecs"].values()]
    return [
        [*each["command"], *each.get("args", ())]
        for spec in pods
        for each in (*spec.get("initContainers", ()), *spec["containers"])
    ]


def test_the_manifests_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    found = container_commands()
    for words in found:
        check(words, monkeypatch)
    master, worker = (train_flags(words[2:]) for words in found if words[1] == "train")
    assert master == worker and master.compress and master.running.resume == "auto"
    [data] = [words for words in found if words[1] == "data"]
    assert data[-1] == master.task.data_dir and data[3] == master.task.dataset
    for folder in (master.running.run_dir, master.task.data_dir):
        assert folder is not None and folder.startswith("/shared/")  # where the claim is mounted


def test_the_dockerfile() -> None:
    known = {"FROM", "ARG", "RUN", "COPY", "WORKDIR", "USER", "CMD", "ENV", "ENTRYPOINT", "LABEL"}
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    assert {name for name, _ in steps} <= known and steps[0][0] == "FROM"
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    for name, rest in steps:
        if name == "COPY" and rest.startswith("--from="):
            assert rest.split()[0].removeprefix("--from=") in stages
        elif name == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), f"COPY {source}: it is not in the repository"
        elif name == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)
        elif name == "CMD":
            assert json.loads(rest)[:2] == ["compressed-ddp", "train"]


# --- what is really run ------------------------------------------------------------------------


def run_together(each: Sequence[tuple[list[str], dict[str, str]]], folder: Path) -> list[str]:
    """Run commands side by side, with variables of their own, over loopback; their outputs."""
    alike = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    started = [
        subprocess.Popen(
            words,
            env={**os.environ, **alike, **own},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for words, own in each
    ]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in started]
    finally:
        for process in started:
            process.terminate()  # torchrun ends its workers then
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


SHORT = ["--max-steps", "5", "--epochs", "1", "--no-tensorboard"]

needs_lo = pytest.mark.skipif(sys.platform != "linux", reason="loopback has another name here")


@needs_lo
def test_two_hosts_by_torchrun(tmp_path: Path) -> None:
    """The page's commands for node0 and node1, with both of them here."""
    found = [words for words in commands(PAGE.read_text()) if words[0] == "torchrun"]
    both = [next(words for words in found if name in words) for name in ("node0", "node1")]
    here = {"node0:29400": f"localhost:{free_port()}", "node0": "localhost", "node1": "localhost"}
    here["/shared/runs/first"] = str(tmp_path / "run")
    outputs = run_together([([here.get(w, w) for w in words] + SHORT, {}) for words in both], tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["workers"], summary["steps"]) == (2, 5)
    assert any("2 workers on cpu, gloo" in output for output in outputs)
    [checkpoint] = Checkpoints(tmp_path / "run" / "checkpoints", 1).all()
    assert (checkpoint / "rank-0001.pt").is_file()


@needs_lo
def test_two_pods(tmp_path: Path) -> None:
    """The manifest's command with the variables that the operator sets, and no torchrun."""
    words = next(words for words in container_commands() if words[1] == "train")
    words = [word.replace("/shared", str(tmp_path)) for word in words] + ["--dataset", "digits", *SHORT]
    alike = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    run_together([(words, alike | {"RANK": rank}) for rank in "01"], tmp_path)
    summary = json.loads((tmp_path / "runs" / "mnist" / "summary.json").read_text())
    assert (summary["workers"], summary["steps"]) == (2, 5)


def test_the_page_quotes_what_is_said(tmp_path: Path) -> None:
    """The message for a folder that is not shared, as checkpoint.py words it."""
    entry = {"files": {"rank-0001.pt": {"bytes": 1}}}
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path, 1)._publish(tmp_path / ".step", tmp_path / "step", entry)
    _, _, message = str(caught.value).partition("rank-0001.pt ")
    assert message and message in PAGE.read_text()
    source = "".join(path.read_text() for path in (ROOT / "src" / "compressed_ddp").rglob("*.py"))
    for words in ("a peer is gone or silent ", "has a run already; --resume auto"):
        assert words in source and words in PAGE.read_text()
    with pytest.raises(SyncError) as unlike:
        compare([b'{"ratio": 1}', b'{"ratio": 2}'])
    assert str(unlike.value).startswith("rank 1 differs from rank 0 in ratio")
    assert "rank 1 differs from rank 0 in" in PAGE.read_text()
