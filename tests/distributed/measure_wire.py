"""Count loopback bytes of plain DDP and of ours, in this process's network namespace; JSON to stdout."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jobs
from pool import Pool

GET_FLAGS, SET_FLAGS, IFF_UP = 0x8913, 0x8914, 1


def raise_loopback() -> None:
    """A new network namespace begins with its loopback interface down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(handle, GET_FLAGS, request))[1]
        if not flags & IFF_UP:
            fcntl.ioctl(handle, SET_FLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def main() -> None:
    raise_loopback()
    steps = int(sys.argv[1])
    pool = Pool(4)
    plain = pool.run(4, jobs.wire_bytes, None, steps=steps)
    ours = pool.run(4, jobs.wire_bytes, {"ratio": 0.01, "collective": "sharded"}, steps=steps)
    pool.close()
    json.dump([plain, ours], sys.stdout)


if __name__ == "__main__":
    main()
