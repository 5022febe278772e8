"""What a process's own TCP sockets really moved, as the kernel counted it. Linux; needs no rights.

The kernel keeps byte counts for every TCP socket (``struct tcp_info`` of linux/tcp.h), and a
process may read those of its own. They are payload: no headers, no acknowledgements.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import sys
from typing import Any, NamedTuple

# Offsets in struct tcp_info. The kernel only ever appends to it, and says how much it filled in.
_BYTES_ACKED, _BYTES_RECEIVED, _BYTES_SENT = 120, 128, 200
_LENGTH = 256
_TCP_INFO, _SO_PROTOCOL = 11, 38
_FDS = "/proc/self/fd"


class Traffic(NamedTuple):
    """Payload bytes of TCP connections."""

    sent: int
    received: int


class SocketMeter:
    """Bytes that this process's TCP sockets, IPv4 and IPv6, moved since the meter was made.

    A socket that is closed keeps counting with the figure of the last ``read``; what it moved
    after that, and sockets that came and went between two reads, are missed: read now and then,
    and before connections are closed. Everything this process has open counts, whoever opened it;
    what goes through shared memory, Unix sockets or RDMA does not. To be used by one thread at a time.

    ``sent`` counts what TCP transmitted, retransmissions included: what a slow network had to
    carry. ``received`` counts each byte of the stream once, however often it arrived. The end of a
    stream (FIN) takes a number, as a byte does, and counts as one received.
    """

    def __init__(self) -> None:
        self.source = _source()
        """Which of the kernel's counts ``sent`` is: ``"bytes_sent"``; ``"bytes_acked"`` on kernels
        before 4.19 (each byte once, when the peer has confirmed it, and one for opening the
        connection); None where there are none."""
        self._last: dict[int, Traffic] = {}
        self._before = Traffic(0, 0)
        """What is not in ``_last`` and counts nevertheless, less what had been moved at the start."""
        if self.source is not None:
            start = self._total()
            self._before = Traffic(-start.sent, -start.received)

    def read(self) -> Traffic | None:
        """Bytes since the meter was made, or None where they cannot be had (not Linux, or no /proc)."""
        return None if self.source is None else self._total()

    def _total(self) -> Traffic:
        """Read every socket that is open now; all that were ever seen, summed. Changes ``_last``."""
        for inode, now in _open_sockets(self.source == "bytes_sent").items():
            last = self._last.get(inode)
            if last is not None and (now.sent < last.sent or now.received < last.received):
                # Counts never fall: another connection has taken this number.
                self._before = _sum(self._before, last)
            self._last[inode] = now
        return _sum(self._before, *self._last.values())


def _sum(*traffic: Traffic) -> Traffic:
    return Traffic(sum(t.sent for t in traffic), sum(t.received for t in traffic))


def _source() -> str | None:
    """Which count of sent bytes this system has, found out with a socket that goes nowhere."""
    if sys.platform != "linux" or not os.path.isdir(_FDS):
        return None
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                length = len(probe.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _LENGTH))
        except OSError:
            continue
        if length >= _BYTES_SENT + 8:
            return "bytes_sent"
        return "bytes_acked" if length >= _BYTES_RECEIVED + 8 else None
    return None


def _open_sockets(has_bytes_sent: bool) -> dict[int, Traffic]:
    """Counts of every open TCP socket, by inode: duplicates of a descriptor count once."""
    # Not socket.socket(fileno=...): with a default timeout set, that would make other people's
    # sockets non-blocking.
    libc = ctypes.CDLL(None)
    found: dict[int, Traffic] = {}
    for name in os.listdir(_FDS):
        inode = _socket_inode(int(name))
        if inode is None or inode in found:
            continue
        info = _tcp_info(libc, int(name))
        # Other threads open and close: only if it is still the same socket is this its count.
        if info is not None and _socket_inode(int(name)) == inode:
            (sent,) = struct.unpack_from("=Q", info, _BYTES_SENT if has_bytes_sent else _BYTES_ACKED)
            (received,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED)
            found[inode] = Traffic(sent, received)
    return found


def _socket_inode(fd: int) -> int | None:
    try:
        status = os.fstat(fd)
    except OSError:  # closed meanwhile
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _tcp_info(libc: Any, fd: int) -> bytes | None:
    """What the kernel filled in, with zeros after it; None if ``fd`` is no TCP socket."""
    protocol, length = ctypes.c_int(0), ctypes.c_uint(4)
    if libc.getsockopt(fd, socket.SOL_SOCKET, _SO_PROTOCOL, ctypes.byref(protocol), ctypes.byref(length)):
        return None
    if protocol.value != socket.IPPROTO_TCP:
        return None
    info, length = ctypes.create_string_buffer(_LENGTH), ctypes.c_uint(_LENGTH)
    if libc.getsockopt(fd, socket.IPPROTO_TCP, _TCP_INFO, info, ctypes.byref(length)):
        return None
    return info.raw
