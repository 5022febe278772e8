"""SocketMeter: the kernel's own count of what sockets moved, to the byte."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from tcp import resent, resent_by_this_process

from compressed_ddp.metrics import SocketMeter, Traffic, sockets

linux = pytest.mark.skipif(SocketMeter().source is None, reason="this system has no counts to read")


def connected(family: socket.AddressFamily) -> tuple[socket.socket, socket.socket]:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as server:
        client = socket.socket(family, socket.SOCK_STREAM)
        client.connect(server.getsockname())
        return client, server.accept()[0]


@pytest.fixture(params=["IPv4", "IPv6"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection over loopback."""
    try:
        ends = connected(socket.AF_INET if request.param == "IPv4" else socket.AF_INET6)
    except OSError:
        pytest.skip(f"no {request.param} here")
    yield ends
    for end in ends:
        end.close()


def carry(source: socket.socket, target: socket.socket, nbytes: int) -> None:
    """Send ``nbytes`` and take them in."""
    sender = threading.Thread(target=source.sendall, args=(b"x" * nbytes,))
    sender.start()
    while nbytes:
        nbytes -= len(target.recv(min(nbytes, 1 << 16)))
    sender.join()


@linux
def test_bytes_are_exact(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    carry(left, right, 12_345)  # before the meter: not its business
    meter = SocketMeter()
    again = resent(left, right)
    assert meter.read() == Traffic(0, 0)
    carry(left, right, 1_000_003)
    first = meter.read()
    extra = resent(left, right) - again
    assert first == Traffic(1_000_003 + extra, 1_000_003)  # both ends are ours
    carry(right, left, 77)
    second = meter.read()
    extra = resent(left, right) - again
    assert second == meter.read() == Traffic(1_000_080 + extra, 1_000_080)


@linux
def test_new_sockets_count_from_nothing_and_closed_ones_stay() -> None:
    meter = SocketMeter()
    left, right = connected(socket.AF_INET)
    carry(left, right, 5000)
    first = meter.read()
    again = resent(left, right)
    assert first == Traffic(5000 + again, 5000)
    left.close()
    right.close()
    assert meter.read() == first
    left, right = connected(socket.AF_INET)
    carry(left, right, 600)
    second = meter.read()
    again += resent(left, right)
    assert second == Traffic(5600 + again, 5600)
    left.close()
    right.close()


@linux
def test_a_duplicated_descriptor_counts_once(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    meter = SocketMeter()
    with left.dup():
        carry(left, right, 100)
        traffic = meter.read()
        assert traffic == Traffic(100 + resent(left, right), 100)


@linux
def test_other_descriptors_do_not_count_and_do_not_disturb() -> None:
    meter = SocketMeter()
    one, other = socket.socketpair()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", 0))
    with one, other, datagrams, socket.create_server(("127.0.0.1", 0)):
        carry(one, other, 1000)
        datagrams.sendto(b"x" * 50, datagrams.getsockname())
        assert meter.read() == Traffic(0, 0)


@linux
def test_reading_leaves_sockets_as_they_are(pair: tuple[socket.socket, socket.socket]) -> None:
    """Python makes what it wraps non-blocking under a default timeout; that would break gloo."""
    before, blocking = len(os.listdir("/proc/self/fd")), [os.get_blocking(end.fileno()) for end in pair]
    socket.setdefaulttimeout(1.0)
    try:
        SocketMeter().read()
    finally:
        socket.setdefaulttimeout(None)
    assert [os.get_blocking(end.fileno()) for end in pair] == blocking == [True, True]
    assert len(os.listdir("/proc/self/fd")) == before


@linux
def test_sockets_may_come_and_go_meanwhile() -> None:
    meter, stop = SocketMeter(), threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for end in connected(socket.AF_INET):
                end.close()

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    left, right = connected(socket.AF_INET)
    try:
        for _ in range(200):
            carry(left, right, 10)
            meter.read()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    traffic, again = meter.read(), resent(left, right)
    left.close()
    right.close()
    assert traffic is not None
    assert traffic.sent == 2000 + again  # the others sent nothing, and nothing was counted for a wrong socket
    assert traffic.received >= 2000  # ends of streams count one each


def test_a_number_that_is_used_again_is_another_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [{1: Traffic(100, 10)}, {1: Traffic(150, 15)}, {1: Traffic(20, 30)}, {}, {2: Traffic(5, 5)}]
    monkeypatch.setattr(sockets, "_source", lambda: "bytes_sent")
    monkeypatch.setattr(sockets, "_open_sockets", lambda has_bytes_sent: seen.pop(0))
    meter = SocketMeter()
    assert [meter.read() for _ in range(4)] == [(50, 5), (70, 35), (70, 35), (75, 40)]


def test_elsewhere_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    meter = SocketMeter()
    assert meter.source is None and meter.read() is None


@linux
@pytest.mark.parametrize(
    ("length", "source"), [(232, "bytes_sent"), (207, "bytes_acked"), (136, "bytes_acked"), (104, None)]
)
def test_old_kernels_tell_less(length: int, source: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class OldSocket(socket.socket):
        def getsockopt(self, *args: int) -> bytes:  # type: ignore[override]
            return super().getsockopt(*args)[:length]

    monkeypatch.setattr(sockets.socket, "socket", OldSocket)
    assert SocketMeter().source == source


@linux
def test_confirmed_bytes_are_the_same_where_nothing_is_lost(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_source", lambda: "bytes_acked")
    left, right = pair
    meter = SocketMeter()
    carry(left, right, 40_000)
    patience = time.monotonic() + 10  # confirmations may take their time
    while (traffic := meter.read()) != Traffic(40_000, 40_000) and time.monotonic() < patience:
        time.sleep(0.01)
    assert traffic == Traffic(40_000, 40_000)


def metered_all_reduce(rank: int, world: int, numel: int) -> tuple[int, int]:
    dist.all_reduce(torch.ones(8))  # connections are made by the first
    meter, again = SocketMeter(), resent_by_this_process()
    dist.barrier()
    total = torch.full((numel,), float(rank + 1))
    dist.all_reduce(total)
    assert total.eq(world * (world + 1) / 2).all()
    dist.barrier()
    traffic = meter.read()
    again = resent_by_this_process() - again
    assert traffic is not None
    return traffic.sent - again, traffic.received


@linux
def test_gloo_moves_what_a_ring_must(pool: Pool) -> None:
    nbytes, world = 4_000_000, 2
    ring = 2 * (world - 1) * nbytes // world
    for sent, received in pool.run(world, metered_all_reduce, nbytes // 4):
        assert ring <= sent <= 1.01 * ring
        assert ring <= received <= 1.01 * ring
