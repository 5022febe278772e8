"""Where a worker is: devices, backends, and how the workers of one start find each other."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from compressed_ddp.training.place import Place, meet, pick_backend, pick_device
from compressed_ddp.types import SyncError


def start(
    store: Any, ranks: range, world: int, found: dict[int, Any], timeout: float = 20.0
) -> list[threading.Thread]:
    """Workers that meet, each on a thread; what they found is written to ``found``."""

    def one(rank: int) -> None:
        try:
            found[rank] = meet(store, rank, world, timeout)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    return threads


def test_a_new_start_meets_in_a_store_full_of_the_dead() -> None:
    """Whoever comes first, and whatever earlier starts left behind: all of one start, in one place."""
    store = HashStore()
    places = []
    for first in (range(3), range(2, -1, -1), range(1, 3)):
        found: dict[int, Any] = {}
        threads = start(store, first, 3, found)
        if len(first) == 2:  # rank 0 comes late: the others see the last start's offer, and answer it
            time.sleep(0.3)
            threads += start(store, range(1), 3, found)
        for thread in threads:
            thread.join(30)
        found[0].set("address", f"of start {len(places)}")
        assert {found[rank].get("address") for rank in range(3)} == {f"of start {len(places)}".encode()}
        places.append(found[0])
    assert [place.get("address") for place in places] == [b"of start 0", b"of start 1", b"of start 2"]


def test_without_rank_0_it_says_so() -> None:
    store = HashStore()
    store.set("offer", "of the dead")
    found: dict[int, Any] = {}
    for thread in start(store, range(1, 2), 2, found, timeout=0.3):
        thread.join(30)
    assert isinstance(found[1], SyncError) and "all 2 workers" in str(found[1])


def test_devices_and_backends() -> None:
    assert pick_device("cpu", 0) == torch.device("cpu")
    assert pick_backend("auto", torch.device("cpu")) == "gloo"
    for name, told in (("gpu", "unknown device 'gpu'"), ("meta", "not one that this program knows")):
        with pytest.raises(ValueError, match=told):
            pick_device(name, 0)
    with pytest.raises(ValueError, match="nccl needs CUDA"):
        pick_backend("nccl", torch.device("cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--device cpu"):
            pick_device("cuda", 0)


@pytest.mark.parametrize("length", [float("nan"), -1.0, 2.0**40])
def test_lengths_that_rank_0_cannot_have_said(length: float, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(1, 2, 1, torch.device("cpu"), "gloo")
    monkeypatch.setattr(Place, "total", lambda self, values: [length])
    with pytest.raises(SyncError, match="rank 0 says") as caught:
        place.say("")
    assert caught.value.ranks == (0,)


def test_what_rank_0_says_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(1, 2, 1, torch.device("cpu"), "gloo")
    monkeypatch.setattr(Place, "total", lambda self, values: [2.0])
    monkeypatch.setattr("torch.distributed.broadcast", lambda tensor, _: tensor.fill_(0xFF))
    with pytest.raises(SyncError, match="no text"):
        place.say("")


def test_who_failed_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(0, 3, 0, torch.device("cpu"), "gloo")
    monkeypatch.setattr(Place, "gather", lambda self, row, what: [row, b"\1", b"\1"])
    with pytest.raises(SyncError, match="reading failed on rank 1, 2") as caught:
        place.together("reading", lambda: None)
    assert (caught.value.phase, caught.value.ranks) == ("reading", (1, 2))
