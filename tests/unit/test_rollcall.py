"""The roll call: who is gone, who is silent, whose fault it was; and who is not believed."""

from __future__ import annotations

import errno
import socket
import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from compressed_ddp import SyncError, WireError
from compressed_ddp.communication import rollcall as module
from compressed_ddp.communication.rollcall import (
    _NOTE,
    _ROW,
    Roll,
    RollCall,
    _Calls,
    _hear,
    exchange_failed,
    in_bucket,
    new_address,
    open_sockets,
)
from compressed_ddp.layout import BucketLayout
from compressed_ddp.types import Stamp


def sent_by(sender: int, text: str) -> WireError:
    error = WireError(text)
    error.sender = sender
    return error


def together(works: list[Any]) -> list[Any]:
    """The results of all ``works``, each on a thread of its own."""
    found: list[Any] = [None] * len(works)

    def run(at: int) -> None:
        found[at] = works[at]()

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def make(world: int, addresses: list[str | None] | None = None) -> list[RollCall]:
    rows: list[bytes] = [b""] * world
    met = threading.Barrier(world)

    def one(rank: int) -> RollCall:
        def exchange(row: bytes) -> list[bytes]:
            rows[rank] = row
            met.wait(30)
            return list(rows)

        return RollCall(rank, world, addresses[rank] if addresses else "127.0.0.1", exchange)

    return together([lambda rank=rank: one(rank) for rank in range(world)])


@pytest.mark.parametrize("told", [b"\xff\xfe", b"a.name.to.look.up", "١٢٧.0.0.1".encode(), b"127.0.0.1\0x"])
def test_an_address_is_a_number_or_nothing(told: bytes) -> None:
    """Peers' bytes: what is no address is refused at once, with the rank, and nothing stays open."""
    before = open_sockets()
    with pytest.raises(SyncError, match=r"rank 1 gave .* as its address") as caught:
        RollCall(0, 2, "127.0.0.1", lambda row: [row, _ROW.pack(bytes(16), 7, told)])
    assert caught.value.ranks == (1,) and open_sockets() <= before
    RollCall(0, 2, "127.0.0.1", lambda row: [row, _ROW.pack(bytes(16), 0, b"")]).close()


def test_everyone_answers() -> None:
    rolls = make(4)
    assert together([lambda roll=roll: roll.call(30) for roll in rolls]) == [Roll()] * 4
    assert Roll().verdict() == ("every rank answers, so a connection between them broke", ())


def test_one_is_gone_and_one_is_silent() -> None:
    """Who is gone is known for certain; who has not called yet may only be late."""
    rolls = make(4)
    rolls[2].close()
    first, second = together([lambda roll=roll: roll.call(0.2) for roll in rolls[:2]])
    assert first == second == Roll(gone=(2,), silent=(3,))
    assert first.verdict() == ("rank 2 is gone", (2,))
    # Rank 3 comes late. The others have gone by now, but their notes have not.
    assert rolls[3].call(30) == Roll(gone=(2,))


def test_silent_ones() -> None:
    rolls = make(3)
    found = rolls[0].call(0.1)
    assert found == Roll(silent=(1, 2))
    assert found.verdict() == ("rank 1, 2 are silent", (1, 2))
    for roll in rolls:
        roll.close()


def test_whose_fault_it_was() -> None:
    rolls = make(3)
    first, second, _ = together(
        [lambda: rolls[0].call(30), lambda: rolls[1].call(30), lambda: rolls[2].call(30, blames=2)]
    )
    assert first == second == Roll(failed=(2,))
    assert first.verdict() == ("rank 2 is out of step by an error of its own, which its log has", (2,))


def test_who_sent_what_cannot_be_read() -> None:
    """Who cannot read a message is not at fault, and says who is; the sender hears of it too."""
    rolls = make(3)
    _, second, third = together(
        [lambda: rolls[0].call(30, blames=2), lambda: rolls[1].call(30), lambda: rolls[2].call(30)]
    )
    assert second == third == Roll(accused=(2,))
    said = "rank 2 is the sender of a message that another rank cannot read"
    assert second.verdict() == (said, (2,))


def test_who_is_no_rank_of_the_job_is_not_named() -> None:
    rolls = make(2)
    _hear(_NOTE.pack(rolls[0]._secret, 9999, 9999), rolls[0]._secret, rolls[0]._heard)
    first, _ = together([lambda: rolls[0].call(30), lambda: rolls[1].call(30)])
    assert first == Roll()


@pytest.mark.parametrize("told", [7, -5])
def test_a_rank_that_is_none_is_not_accused(told: int) -> None:
    rolls = make(2)
    rolls[0].call(30, blames=told)
    assert rolls[1].call(30) == Roll()


# --- strangers -------------------------------------------------------------------------------------


def strangers(roll: RollCall, number: int) -> ExitStack:
    """So many connections that say nothing."""
    assert roll._listener is not None
    opened, where = ExitStack(), roll._listener.getsockname()
    for _ in range(number):
        opened.enter_context(socket.create_connection(where))
    return opened


def test_a_port_scan_keeps_nobody_out() -> None:
    """More connections than there used to be room for; nobody listens until something has failed."""
    rolls = make(3)
    with strangers(rolls[0], 40):
        assert together([lambda roll=roll: roll.call(2) for roll in rolls]) == [Roll()] * 3


def test_a_look_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the queue: who has called is answered now and then, and strangers are let go of."""
    monkeypatch.setattr(module, "_BACKLOG", 1)
    monkeypatch.setattr(module, "_STRANGERS", 4)
    rolls = make(2)
    with ExitStack() as opened:
        for _ in range(10):
            opened.enter_context(strangers(rolls[0], 2))
            rolls[0].look()
            assert len(rolls[0]._lines) <= 4
        assert together([lambda roll=roll: roll.call(2) for roll in rolls]) == [Roll()] * 2
    assert not rolls[0]._lines


def test_what_was_said_before_a_look_is_not_lost() -> None:
    """A rank fails, says so and is gone; this one looks before its next exchange, and notices then."""
    rolls = make(2)
    rolls[1].call(30, blames=1)
    rolls[0].look()
    rolls[0].look()
    assert rolls[0].call(30) == Roll(failed=(1,))


def test_a_process_out_of_files_still_has_its_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What failed matters, and not that nobody could be asked about it."""

    def full(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    rolls = make(2)
    monkeypatch.setattr(_Calls, "call", full)
    error = exchange_failed("all-gather", 0, 2, rolls[0], 5.0, RuntimeError("closed"))
    assert str(error) == "all-gather failed on rank 0 of 2: a peer is gone or silent for 5 s (closed)"
    assert "cannot call the others: [Errno 24] Too many open files" in caplog.text
    assert rolls[1].call(30, blames=1) is None and rolls[0]._listener is None


@pytest.mark.parametrize("note", [_NOTE.pack(b"?" * 16, 1, False), b"hello", b""])
def test_strangers_are_not_believed(note: bytes) -> None:
    rolls = make(2)
    assert rolls[0]._listener is not None
    with socket.create_connection(rolls[0]._listener.getsockname()) as line:
        line.sendall(note)
        assert rolls[0].call(0.2) == Roll(silent=(1,))
    rolls[1].close()


def test_without_an_address_nobody_is_blamed() -> None:
    rolls = make(2, ["127.0.0.1", None])
    assert [roll.call(30) for roll in rolls] == [None, None]
    error = exchange_failed("all-gather", 0, 2, rolls[0], 5.0, RuntimeError("closed"))
    assert str(error) == "all-gather failed on rank 0 of 2: a peer is gone or silent for 5 s (closed)"
    assert (error.phase, error.bucket, error.ranks) == ("all-gather", None, ())
    for roll in make(2, ["198.51.100.1", "203.0.113.1"]):  # no interface has such ones
        assert roll.call(30) is None


def test_the_address_of_new_connections() -> None:
    if not open_sockets() and not new_address(set()):
        with socket.socket():
            if not open_sockets():
                pytest.skip("no /proc here")
    before = open_sockets()
    assert new_address(before) is None
    families = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}
    for address, family in families.items():
        try:
            server = socket.create_server((address, 0), family=family)
        except OSError:  # no IPv6 here
            continue
        with server, socket.create_connection(server.getsockname()[:2]):
            assert new_address(before) == address


@pytest.mark.parametrize(
    ("error", "told", "phase", "ranks"),
    [
        (
            SyncError("all-gather failed", phase="all-gather", ranks=(4,)),
            "all-gather failed",
            "all-gather",
            (4,),
        ),
        (WireError("its checksum"), "decode failed on rank 1: its checksum", "decode", ()),
        (
            sent_by(2, "its checksum"),
            "decode failed on rank 1: its checksum (rank 2 sent it)",
            "decode",
            (2,),
        ),
    ],
)
def test_errors_name_the_bucket(error: Exception, told: str, phase: str, ranks: tuple[int, ...]) -> None:
    layout = BucketLayout(("fc.weight", "fc.bias"), (torch.Size([3, 2]), torch.Size([3])))
    with pytest.raises(SyncError) as caught, in_bucket(layout, Stamp(0, 7, 3, sender=1)):
        raise error
    found = caught.value
    assert str(found) == f"step 7, bucket 3 ('fc.weight' and 1 more): {told}"
    assert (found.phase, found.bucket, found.ranks, found.__cause__) == (phase, 3, ranks, error)
    with pytest.raises(ZeroDivisionError), in_bucket(layout, Stamp()):
        raise ZeroDivisionError  # not of others' making: left as it is
