"""The wire format is pinned: today's bytes are yesterday's, and the specification explains them."""

from __future__ import annotations

from pathlib import Path

import pytest
import spec_decoder
import torch
from make import Golden, build, cases, floats, load, words

FILES = sorted(Path(__file__).parent.glob("*.json"))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def golden(request: pytest.FixtureRequest) -> Golden:
    return load(request.param)


def test_encoding_gives_these_bytes(golden: Golden) -> None:
    """Otherwise workers of this release and the last could not talk to each other."""
    assert bytes(golden.encode().tolist()).hex() == golden.data.hex()


def test_decoding_gives_these_values(golden: Golden) -> None:
    """Otherwise two releases would read different gradients from one message."""
    decoded = golden.decode(torch.tensor(list(golden.data), dtype=torch.uint8))
    assert decoded.finite == golden.finite
    assert decoded.payload.indices.tolist() == golden.input_indices
    assert words(decoded.payload.values) == golden.decoded_values
    assert words(decoded.dense) == golden.decoded_dense


def test_the_specification_explains_the_bytes(golden: Golden) -> None:
    """A decoder that knows nothing but docs/wire-format.md must agree, to the bit."""
    stamp = golden.stamp
    message = spec_decoder.decode(golden.data, golden.room, stamp["seed"], stamp["shard"])
    assert message.finite == golden.finite
    assert message.from_owner == bool(stamp["phase"])
    assert message[:4] == (stamp["step"], stamp["bucket"], stamp["sender"], golden.numel)
    assert message.indices == golden.input_indices
    assert words(torch.tensor(message.values, dtype=torch.float32)) == golden.decoded_values
    assert words(torch.tensor(message.dense, dtype=torch.float32)) == golden.decoded_dense


def test_script_and_files_agree() -> None:
    """Otherwise make.py would silently rewrite what it should only reproduce."""
    made = {name: build(case).text() for name, case in cases().items()}
    assert sorted(made) == [path.stem for path in FILES]
    for path in FILES:
        assert path.read_text() == made[path.stem], path.name


def test_every_format_is_pinned() -> None:
    """A new format needs a golden file."""
    from compressed_ddp.wire.indices import INDEX_FORMATS
    from compressed_ddp.wire.values import _FORMATS

    found = [load(path) for path in FILES]
    assert {golden.indices for golden in found} == set(INDEX_FORMATS)
    assert {golden.values for golden in found} == set(_FORMATS)


@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_exact_formats_return_their_input(name: str) -> None:
    """Golden values are not just stable but right: fp32 is exact, int8 within its step."""
    golden = load(Path(__file__).parent / f"elias_fano_{name}.json")
    given, got = floats(golden.input_values), floats(golden.decoded_values)
    torch.testing.assert_close(got, given, rtol=0.0 if name == "fp32" else 0.06, atol=0.0)


@pytest.mark.parametrize("numel", [1, 2, 623, 700, 5000])
def test_seeded_draw_is_the_specified_one(numel: int) -> None:
    """Random-K sends no indices: if torch drew otherwise, releases would disagree silently."""
    from compressed_ddp.types import Stamp
    from compressed_ddp.wire.indices import seeded_indices

    for step in range(3):
        room = 1 + numel // 3
        drawn = seeded_indices(numel, room, Stamp(11, step, 4, 2, sender=9, phase=1), torch.device("cpu"))
        assert drawn.tolist() == spec_decoder.seeded(numel, room, f"11,{step},4,2")
