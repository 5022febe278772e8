"""What must not be in the source: ways for a file, an archive or a peer to run code or write elsewhere."""

from __future__ import annotations

import ast
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compressed_ddp import CompressionConfig, SyncError
from compressed_ddp.communication import run_in_process
from compressed_ddp.communication.handshake import _LIMIT, fingerprint, handshake
from compressed_ddp.error_feedback.state import check_tensor
from compressed_ddp.types import Transport

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    *(ROOT / "src").rglob("*.py"),
    *(ROOT / "experiments").glob("*.py"),
    *(ROOT / "examples").rglob("*.py"),
]

FORBIDDEN = {
    "eval": "runs text",
    "exec": "runs text",
    "pickle.load": "runs what it reads",
    "pickle.loads": "runs what it reads",
    "pickle.Unpickler": "runs what it reads",
    "yaml.load": "safe_load",
    "yaml.unsafe_load": "safe_load",
    "yaml.full_load": "safe_load",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "subprocess.getoutput": "runs a shell",
    "ssl._create_unverified_context": "trusts anybody",
    "tempfile.mktemp": "somebody else may make it first",
    "urllib.request.urlopen": "follows a redirect to http; data/download.py does not",
    "numpy.load": "may unpickle",
    "np.load": "may unpickle",
}
OBJECTS = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "recv_object_list",
)
ENDS = {".extractall": "data/archive.py", ".extract": "data/archive.py", ".unpack_archive": "data/archive.py"}
ENDS |= {f".{name}": "unpickles what peers send" for name in OBJECTS}


def wrong(source: str) -> Iterator[str]:
    """What is forbidden in ``source``, with its line and the reason."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "CERT_NONE":
            yield f"line {node.lineno}: CERT_NONE trusts anybody"
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        reason = FORBIDDEN.get(name) or next((why for end, why in ENDS.items() if name.endswith(end)), None)
        if reason:
            yield f"line {node.lineno}: {name}: {reason}"
        if name == "torch.load" and given.get("weights_only") != "True":
            yield f"line {node.lineno}: torch.load without weights_only=True runs what it reads"
        if given.get("shell", "False") != "False":
            yield f"line {node.lineno}: a shell reads more into a command than stands there"
        if given.get("check_hostname") == "False" or given.get("verify") == "False":
            yield f"line {node.lineno}: trusts anybody"


@pytest.mark.parametrize("path", sorted(SOURCES), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_from_outside_is_run(path: Path) -> None:
    assert list(wrong(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "pickle.loads(data)",
        "yaml.load(text, Loader=yaml.Loader)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "tar.extractall(folder)",
        "dist.all_gather_object(out, mine)",
        "context.verify_mode = ssl.CERT_NONE",
    ],
)
def test_the_test_finds_it(source: str) -> None:
    assert len(list(wrong(source))) == 1


def test_a_tensor_that_is_larger_than_its_memory_is_not_looked_at() -> None:
    huge = torch.zeros(1).expand(2**50)  # a petabyte
    with pytest.raises(ValueError, match="repeats a few entries"):
        check_tensor("it", huge)
    with pytest.raises(ValueError, match="has shape"):
        check_tensor("it", huge, torch.Size([3]))
    check_tensor("it", torch.zeros(3), torch.Size([3]))


def test_a_peer_cannot_ask_for_much_memory() -> None:
    """Rank 1 says that its description has 32 MB: rank 0 makes no room for it."""

    def work(net: Transport) -> str:
        with pytest.raises(SyncError) as caught:
            if net.rank == 0:
                handshake(net, {"model": {}}, torch.device("cpu"))
            else:
                sizes, length = torch.empty((2, 8), dtype=torch.uint8), (2**25).to_bytes(8, "little")
                net.all_gather(sizes, torch.tensor(list(length), dtype=torch.uint8))
                raise SyncError("the one that spoke")
        return str(caught.value)

    assert "description of its model has 33,554,432 bytes" in run_in_process(2, work)[0]


def test_a_very_large_model_can_be_described() -> None:
    """As many tensors as a mixture of 256 experts in 60 layers has, with names of 100 letters."""
    names = [f"model.layers.{n:05d}.".ljust(93, "x") + ".weight" for n in range(50_000)]
    one = torch.empty(4096, 14336, device="meta")
    text = json.dumps(fingerprint(CompressionConfig(), dict.fromkeys(names, one)))
    assert 10**7 < len(text) < _LIMIT


def test_a_description_is_read_without_a_list_of_its_bytes() -> None:
    """Which would take eight bytes for each."""
    size = 2**22

    def work(net: Transport) -> int:
        tracemalloc.start()
        try:
            handshake(net, {"model": "x" * size}, torch.device("cpu"))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert run_in_process(1, work)[0] < 8 * size


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"no JSON", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[" * 50_000, "cannot be read"),
        (b"[1, 2]", "is a list"),
        (b"{}", "differs from rank 0 in model"),
    ],
    ids=["words", "bytes", "deep", "a list", "nothing"],
)
def test_what_a_peer_says_at_first_is_only_compared(said: bytes, told: str) -> None:
    """Rank 1 says something else than a description of its model."""

    def work(net: Transport) -> str:
        with pytest.raises(SyncError) as caught:
            if net.rank == 0:
                handshake(net, {"model": {"w": [1, 2]}}, torch.device("cpu"))
            else:
                sizes, length = torch.empty((2, 8), dtype=torch.uint8), len(said).to_bytes(8, "little")
                net.all_gather(sizes, torch.tensor(list(length), dtype=torch.uint8))
                longest = max(int.from_bytes(bytes(row.tolist()), "little") for row in sizes)
                width = -(-longest // 8) * 8
                texts = torch.empty((2, width), dtype=torch.uint8)
                net.all_gather(texts, torch.tensor(list(said.ljust(width)), dtype=torch.uint8))
                raise SyncError("the one that spoke")
        return str(caught.value)

    assert told in run_in_process(2, work)[0]
