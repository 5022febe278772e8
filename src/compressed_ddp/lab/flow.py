"""One end of a TCP flow, for the self-test: ``python flow.py receive|send ADDRESS PORT WARM SECONDS``.

A program of its own that knows the standard library alone, because it starts once for every end of
every flow. It says ``ready`` when the flow is connected, waits for a line on its input, and keeps the
flow busy. The receiver prints how many bytes a second its kernel received in the ``SECONDS`` after the
``WARM`` first ones.
"""

from __future__ import annotations

import signal
import socket
import struct
import sys
import threading
import time

CHUNK = 1 << 18
PATIENCE = 15
BYTES_RECEIVED = 128
"""Where the kernel's ``struct tcp_info`` has tcpi_bytes_received."""


def received(connection: socket.socket) -> int:
    """Bytes that have arrived, whether or not anybody has read them yet.

    A reader that was kept waiting catches up on what had queued, and would see more than the rate.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("<Q" if sys.byteorder == "little" else ">Q", info, BYTES_RECEIVED)[0])


def receive(address: str, port: int, warm: float, seconds: float) -> None:
    with socket.create_server((address, port)) as server:
        connection, _ = server.accept()
    print("ready", flush=True)
    sys.stdin.readline()
    reader = threading.Thread(target=drain, args=(connection,), daemon=True)
    reader.start()
    time.sleep(warm)
    start, before = time.monotonic(), received(connection)
    time.sleep(seconds)
    # The clock last: whoever is kept waiting here must not see more than the rate.
    after, end = received(connection), time.monotonic()
    print((after - before) / (end - start), flush=True)
    reader.join()


def drain(connection: socket.socket) -> None:
    buffer = bytearray(CHUNK)
    while connection.recv_into(buffer):
        pass


def send(address: str, port: int, warm: float, seconds: float) -> None:
    connection = connect(address, port)
    print("ready", flush=True)
    sys.stdin.readline()
    chunk = bytes(CHUNK)
    # A little longer than anybody measures, so that no flow is measured while another has ended.
    end = time.monotonic() + warm + seconds + 0.15
    while time.monotonic() < end:
        connection.send(chunk)
    connection.shutdown(socket.SHUT_WR)


def connect(address: str, port: int) -> socket.socket:
    """A connection to a receiver that may not be there yet."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((address, port), timeout=PATIENCE)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    signal.alarm(2 * PATIENCE + int(float(sys.argv[5])))
    {"receive": receive, "send": send}[sys.argv[1]](
        sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])
    )
