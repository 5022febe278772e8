"""Which lines of the library's decoders a corpus reaches: ``python fuzz/lines.py CORPUS`` prints JSON.

By the interpreter's own trace of the inputs that the fuzzer kept. What only importing runs does not count.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
PACKAGE = HERE.parent / "src" / "compressed_ddp"
DECODERS = {
    "wire/header.py": {"unpack", "check"},
    "wire/indices.py": {"decode", "seeded_indices"},
    "wire/values.py": {"decode", "_split_scales", "_per_entry"},
    "wire/codec.py": {"open", "read", "sum_", "_cuts", "_checksum"},
    "kernels/reference.py": {
        "ef_decode",
        "log_decode",
        "float_decode",
        "sum_coded_",
        "check_room",
        "_add",
        "checksum",
    },
    "kernels/native.py": {"ef_decode", "log_decode", "sum_coded_", "_check_sizes", "_wire_error", "checksum"},
    "communication/packer.py": {"unpack", "sum_", "_add_small"},
    "communication/handshake.py": {"compare", "_read", "_shallow", "_differences"},
    "communication/guard.py": {"straggler", "look", "_judge", "_name_the_first"},
    "error_feedback/state.py": {"from_dict", "check_state", "_check_bucket", "_check_origin", "check_tensor"},
}
"""Functions that read what came from outside."""


def lines_of(path: Path, names: set[str]) -> set[int]:
    """The lines of the functions ``names`` of a file that can be run."""
    found: set[int] = set()

    def walk(code: CodeType, inside: bool) -> None:
        inside = inside or code.co_name in names
        if inside:
            found.update(line for _, _, line in code.co_lines() if line and line != code.co_firstlineno)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                walk(constant, inside)

    walk(compile(path.read_text(), str(path), "exec"), False)
    return found


def main() -> None:
    import torch
    from python_messages import one_input

    torch.set_num_threads(1)
    one_input(b"")
    wanted = {str(PACKAGE / name): lines_of(PACKAGE / name, names) for name, names in DECODERS.items()}
    reached: dict[str, set[int]] = {path: set() for path in wanted}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        mine = reached.get(frame.f_code.co_filename)
        if mine is None:
            return None
        mine.add(frame.f_lineno)
        return trace

    inputs = [path.read_bytes() for path in sorted(Path(sys.argv[1]).iterdir())]
    sys.settrace(trace)
    accepted = sum(one_input(data) for data in inputs)
    sys.settrace(None)
    files = {}
    for path, lines in wanted.items():
        missing = sorted(lines - reached[path])
        files[str(Path(path).relative_to(PACKAGE))] = {"lines": len(lines), "missing": missing}
    print(json.dumps({"inputs": len(inputs), "accepted": accepted, "files": files}))


if __name__ == "__main__":
    main()
