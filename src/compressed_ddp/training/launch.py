"""Starting workers on this machine, by torch's own launcher."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch

from .config import Running


def set_threads(running: Running) -> None:
    """Let this worker use its share of the machine: as asked for, OMP_NUM_THREADS, or cores by workers."""
    threads = running.threads
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if threads is not None:
        torch.set_num_threads(threads)


def launch(running: Running, arguments: Sequence[str]) -> int:
    """Run ``python -m compressed_ddp`` with ``arguments`` in ``running.workers`` processes; the exit status.

    When one dies all are ended, and started again as often as ``max_restarts`` says.
    """
    threads = running.threads or max(1, (os.cpu_count() or 1) // running.workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("LOGLEVEL", "CRITICAL")  # torchrun's own; what matters is said below
    if sys.platform == "linux":  # workers of one machine need no address of the outside
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Imported late: they read the environment.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    options = [
        "--standalone",
        f"--nproc-per-node={running.workers}",
        f"--max-restarts={running.max_restarts}",
    ]
    try:
        start: Any = run
        start(get_args_parser().parse_args([*options, "-m", "compressed_ddp", *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        again = f" ({running.max_restarts} restarts used up)" if running.max_restarts else ""
        print(f"compressed-ddp: worker {rank} {how}{again}; its message is above", file=sys.stderr)
        return 1
    except (SignalException, KeyboardInterrupt):
        print("compressed-ddp: interrupted; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0
