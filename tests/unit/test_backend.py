"""Loops of one's own, over threads: which parameters are synchronised, and what is said if some are not."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

from compressed_ddp import CompressionConfig, DistributedBackend, ErrorFeedbackBuffer, LocalSync, SyncError
from compressed_ddp.communication import run_in_process
from compressed_ddp.types import Transport


def make_backend(net: Transport, **options: Any) -> DistributedBackend:
    config = CompressionConfig(**({"ratio": 0.1, "min_compress_numel": 16} | options))
    return DistributedBackend(None, ErrorFeedbackBuffer(), config=config, transport=net)


def give(models: list[nn.Linear], rank: int) -> None:
    """Gradients of this rank's own."""
    for at, model in enumerate(models):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(10 * at + rank))


def test_two_parameters_of_one_name_are_refused() -> None:
    """The one would hide the other, whose replicas then drift apart. With prefixes both are averaged."""

    def work(net: Transport) -> None:
        encoder, decoder = models = [nn.Linear(8, 8), nn.Linear(8, 8)]
        give(models, net.rank)
        backend = make_backend(net, ratio=1.0, values="fp32", guard_every=0)
        with pytest.raises(ValueError, match=r"two parameters are named 'weight'.*names a prefix"):
            backend.allreduce_gradients(chain(encoder.named_parameters(), decoder.named_parameters()))
        backend.allreduce_gradients(
            chain(encoder.named_parameters(prefix="encoder"), decoder.named_parameters(prefix="decoder"))
        )
        for at, model in enumerate(models):
            assert all(bool((p.grad == 10 * at + 0.5).all()) for p in model.parameters())
        with pytest.raises(ValueError, match="two parameters are named 'bias'"):
            backend.load_state_dict(
                backend.state_dict(), [("bias", models[0].bias), ("bias", models[1].bias)]
            )

    run_in_process(2, work)


def test_one_parameter_of_two_names_is_synchronised_once() -> None:
    """Twice, the second mean would overwrite the first, and what that had sent would be lost."""

    def work(net: Transport) -> None:
        one = nn.Linear(8, 8)
        give([one], net.rank)
        backend = make_backend(net, ratio=1.0, values="fp32", guard_every=0)
        pairs = [("a.weight", one.weight), ("b.weight", one.weight), ("a.weight", one.weight)]
        backend.allreduce_gradients(pairs)
        assert list(backend.state_dict()["residuals"]) == ["a.weight"]
        assert bool((one.weight.grad == 0.5).all())

    run_in_process(2, work)


@pytest.mark.parametrize("local", [False, True])
def test_workers_compare_the_size_of_their_buckets(local: bool) -> None:
    """Other buckets are messages of other sizes, and gloo ends the process where they meet."""

    def work(net: Transport) -> None:
        model, cap = nn.Linear(300, 300), 0.5 if net.rank else 25
        give([model], net.rank)
        with pytest.raises(SyncError, match=r"rank 1 differs from rank 0 in bucket_cap_mb: 0.5, not 25.0"):
            if local:
                LocalSync(model, steps=1, bucket_cap_mb=cap, transport=net)
            else:
                backend = DistributedBackend(config=CompressionConfig(), bucket_cap_mb=cap, transport=net)
                backend.allreduce_gradients(model.named_parameters())

    run_in_process(2, work)


def test_a_state_of_before_the_first_step_can_be_loaded() -> None:
    """It is empty, on all ranks or on none; after a step it cannot be."""

    def work(net: Transport) -> None:
        model = nn.Linear(8, 8)
        give([model], net.rank)
        saved = make_backend(net).state_dict()
        assert saved == {}
        backend = make_backend(net, guard_every=0)
        backend.load_state_dict(saved, model.named_parameters())
        backend.allreduce_gradients(model.named_parameters())
        taken = backend.state_dict()
        with pytest.raises(ValueError, match=r"this backend has taken 1: make a new one to begin again"):
            backend.load_state_dict(saved, model.named_parameters())
        other = make_backend(net)
        with pytest.raises(SyncError, match="rank 1 differs from rank 0 in state: 'empty', not 'of a step'"):
            other.load_state_dict({} if net.rank else taken, model.named_parameters())
        other.load_state_dict(taken, model.named_parameters())
        with pytest.raises(ValueError, match="not a compressed-ddp state: NoneType"):
            other.load_state_dict(None, model.named_parameters())  # type: ignore[arg-type]

    run_in_process(2, work)
