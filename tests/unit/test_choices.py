"""What is chosen and refused before anything is sent, and how the ledger names it."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
import torch

from compressed_ddp import CompressionConfig, DistributedBackend, SplitSGD, get_compressor
from compressed_ddp.communication import Reducer, run_in_process
from compressed_ddp.compression.factory import from_config
from compressed_ddp.types import Transport


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"config": CompressionConfig(error_feedback=True)}, ValueError, "needs an error_buffer"),
        ({"compressor": "topk"}, TypeError, "compressor must be one that get_compressor makes, got 'topk'"),
        ({"error_buffer": {}}, TypeError, "error_buffer must be an ErrorFeedbackBuffer"),
        (
            {"compressor": get_compressor(0.1), "config": CompressionConfig(compressor="sign")},
            ValueError,
            "compressor is 'topk' and config says 'sign'",
        ),
    ],
)
def test_a_backend_refuses_what_it_would_not_do(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        DistributedBackend(**arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "topk, ratio 0.01, int8 values"),
        ({"adapt_every": 5}, "topk, ratio 0.01, int8 values, adaptive"),
        ({"error_feedback": False}, "topk, ratio 0.01, int8 values, no error feedback"),
        ({"memory": "ef21"}, "topk, ratio 0.01, int8 values, ef21"),
        ({"compressor": "terngrad"}, "terngrad"),
    ],
)
def test_the_ledger_names_the_method(options: dict[str, Any], words: str) -> None:
    config = CompressionConfig(**options)
    sender = SplitSGD([torch.zeros(3, requires_grad=True)], masking=False)

    def method(net: Transport, half: SplitSGD | None) -> str:
        return Reducer(from_config(config), config, net, sender=half).stats.method

    assert run_in_process(1, lambda net: method(net, None)) == [words]
    assert run_in_process(1, lambda net: method(net, sender)) == [f"{words}, SplitSGD"]


def test_numbers_of_other_kinds_become_pythons_own() -> None:
    """numpy's cannot be told to other workers, nor loaded with ``weights_only``."""
    np = pytest.importorskip("numpy")
    given = {
        "ratio": np.float32(0.25),
        "eta": np.float64(0.5),
        "owner_factor": Fraction(3, 2),
        "sync_timeout": 9,
    }
    given |= {
        "rank": np.int64(3),
        "seed": np.uint8(7),
        "compressor": np.str_("topk"),
        "threshold": np.int32(2),
    }
    config = CompressionConfig(**given)
    plain = {name: value for name, value in config.as_dict().items() if name in given}
    assert json.loads(json.dumps(config.as_dict())) == config.as_dict() and plain == given
    kinds = [type(plain[name]) for name in given]
    assert kinds == [float, float, float, int, int, int, str, int]
