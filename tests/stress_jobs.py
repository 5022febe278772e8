"""What the ranks of tests/distributed/test_soak.py run."""

from __future__ import annotations

import threading
from contextlib import suppress

import torch.distributed as dist

from compressed_ddp.communication import TorchTransport


def close_at_once(rank: int, world: int) -> bool:
    """Two threads close one transport, both of them having seen that it is open; is the world still there?"""
    net, both = TorchTransport(), threading.Barrier(2)
    is_alive = net.alive

    def alive() -> bool:
        found = is_alive()
        with suppress(threading.BrokenBarrierError):  # where only one can be here, it waits for no other
            both.wait(1.0)
        return found

    net.alive = alive  # type: ignore[method-assign]
    threads = [threading.Thread(target=net.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dist.is_initialized() and net.group is None
