"""Everything that DistributedDataParallel can do, with our hook attached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import feature_jobs as jobs
import pytest
import torch
from pool import Pool

WAYS = pytest.mark.parametrize("way", ["allgather", "sharded"])


def test_no_sync_accumulates(pool: Pool) -> None:
    for ours, expected, steps in pool.run(2, jobs.accumulation):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
        assert steps == 1, "the hook must run once for four micro-batches"


@WAYS
def test_four_micro_batches_are_one_large_batch(pool: Pool, way: str) -> None:
    """Within rounding, residuals included, at a ratio where most entries wait.

    Values of 32 bits: in 8, what differs by a rounding may get the next code, and that is a step of
    half a percent, taken by the parameter and given back by the residual.
    """
    config = {"ratio": 0.05, "collective": way, "values": "fp32"}
    for found in pool.run(2, jobs.micro_batches, config):
        for name, (parts, whole) in found.items():
            torch.testing.assert_close(
                parts, whole, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
            )


@WAYS
def test_find_unused_parameters(pool: Pool, way: str) -> None:
    results = pool.run(3, jobs.unused, {"ratio": 0.1, "collective": way})
    for parameters, never_moved in results:
        assert torch.equal(parameters, results[0][0])
        assert never_moved


@pytest.mark.parametrize(
    "ddp",
    [
        {"bucket_cap_mb": 1},
        {"bucket_cap_mb": 25},
        {"bucket_cap_mb": 100},
        {"static_graph": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 1},
        {"gradient_as_bucket_view": False, "bucket_cap_mb": 1},
        {"static_graph": True, "gradient_as_bucket_view": True, "find_unused_parameters": True},
    ],
    ids=str,
)
def test_ddp_options_equal_plain_ddp_at_ratio_one(pool: Pool, ddp: dict[str, Any]) -> None:
    for plain, ours in pool.run(2, jobs.with_ddp, ddp, jobs.EXACT):
        assert torch.equal(plain, ours)


def test_frozen_and_shared_parameters(pool: Pool) -> None:
    for plain, ours, names in pool.run(2, jobs.frozen_and_shared):
        assert torch.equal(plain, ours)
        assert names == ["head.bias", "head.weight", "once.weight"], "shared once, frozen not at all"


@WAYS
def test_join_with_uneven_inputs(pool: Pool, way: str) -> None:
    results = pool.run(3, jobs.uneven, {"ratio": 0.05, "collective": way})
    for parameters, _, _ in results:
        assert torch.equal(parameters, results[0][0])
    for rank, (_, at_the_end_of_data, after) in enumerate(results):
        assert after == at_the_end_of_data > 0, f"rank {rank} sent its residual after its data ended"


def test_several_models_in_one_process(pool: Pool) -> None:
    results = pool.run(2, jobs.two_models)
    for first, second, threads in results:
        assert torch.equal(first, results[0][0]) and torch.equal(second, results[0][1])
        assert threads == 2


@WAYS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_gradients(pool: Pool, dtype: str, way: str) -> None:
    """Results are rounded to the gradient's dtype, alike on all ranks; residuals are float32."""
    results = pool.run(3, jobs.half_precision, dtype, way)
    for applied, error, residual_dtype in results:
        assert torch.equal(applied, results[0][0])
        assert error < (2e-3 if dtype == "float16" else 2e-2)
        assert residual_dtype == "torch.float32"


def test_ddp_over_a_part_of_the_world(pool: Pool) -> None:
    results = pool.run(3, jobs.subgroup)
    assert torch.equal(results[0][0], results[1][0])
    assert [steps for _, steps in results] == [3, 3, 0]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "undefined"])
def test_gloo_is_known_by_what_it_serves(pool: Pool, backend: str) -> None:
    """``init_process_group()`` without a name, or with one for each kind of device, is gloo on CPUs too."""
    assert pool.run(2, jobs.backend_by_device, backend) == [("gloo", True)] * 2


@WAYS
def test_overflow_on_one_rank_is_skipped_by_all(pool: Pool, way: str) -> None:
    results = pool.run(3, jobs.overflow, way)
    for result in results:
        assert result["skipped"] == [3, 5] and result["noted"] == 2
        assert torch.equal(result["parameters"], results[0]["parameters"])


@WAYS
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_overflows_at_random(pool: Pool, way: str, seed: int) -> None:
    """The scale goes down and up; of steps that count nothing is lost, of the others nothing applied."""
    results = pool.run(3, jobs.random_overflows, way, seed)
    for result in results:
        assert torch.equal(result["parameters"], results[0]["parameters"])
        assert result["scales"] == results[0]["scales"] and len(set(result["scales"])) >= 3
        assert result["skipped"] >= 3
        assert result["law"] < 1e-5


def test_replicas_that_drift_apart(pool: Pool) -> None:
    """One bit in one weight of one rank is seen by all at the next look, by name."""
    told = "8 SyncError the replicas have drifted apart: at step 8 parameter '3.bias' of rank 1 is not that"
    for said in pool.run(3, jobs.drift):
        assert len(said) == 1 and said[0].startswith(told), said


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("sparse", "TypeError: '0' has sparse gradients; build it with sparse=False"),
        ("complex", "TypeError: cannot compress a gradient of dtype torch.complex64"),
        ("bare", "TypeError: attach needs a DistributedDataParallel model, got Sequential"),
        ("twice", "ValueError: this model has a communication hook already; build a new Distributed"),
        ("twice on one rank", "this model has a communication hook already; build a new Distributed"),
        ("built in", "ValueError: this model has a communication hook already; build a new Distributed"),
        ("text", "TypeError: attach needs a CompressionConfig, got 'topk'"),
        ("pairs", "TypeError: (name, parameter) pairs are needed: pass model.named_parameters()"),
        ("momentum twice", "TypeError: SGD has momentum 0.9 and adds it after compression"),
        ("momentum twice on one rank", "SGD has momentum 0.9 and adds it after compression"),
        ("ignored", "ValueError: the optimizer has a parameter of shape (96,) whose gradient nobody"),
        ("one bit, unused", "ValueError: 'sign' has one bit an entry"),
        ("closed", "GradientSync was closed"),
        ("name", "ValueError: unknown compressor 'topq'; did you mean 'topk'?"),
    ],
)
def test_what_attach_refuses(pool: Pool, what: str, message: str) -> None:
    for said in pool.run(2, jobs.refused, what):
        assert message in said


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("ratio", "rank 2 differs from rank 0 in config.ratio: 0.02, not 0.01"),
        ("version", "rank 2 differs from rank 0 in library: '0.0.1'"),
        ("frozen", "rank 2 differs from rank 0 in parameters.0.weight: 'nothing'"),
    ],
)
def test_handshake_names_rank_and_field(pool: Pool, field: str, message: str) -> None:
    for said in pool.run(3, jobs.disagree, field):
        assert message in said


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", "the parameter (96, 20)"),
        ("name", "a residual for 'stranger', which this model does not have"),
        ("nan", "NaN or infinite"),
        ("rank", "saved by rank 0, this is rank 1"),
        ("world", "saved by 7 workers, this job has 2: pass all ranks' states through"),
        ("step", "state.step: 5, not 1"),
        ("empty", "not a compressed-ddp state: it has no 'format'"),
        ("format", "state has format 99"),
        ("none", "not a compressed-ddp state: NoneType"),
        ("list", "is not a floating point tensor"),
        ("integer", "is not a floating point tensor"),
        ("no names", "damaged state: KeyError 'names'"),
        ("owner nan", "owner of the bucket with"),
        ("owner shape", "owner residual has shape (5,)"),
    ],
)
def test_a_state_that_does_not_fit(pool: Pool, what: str, message: str) -> None:
    """One rank's state is wrong: it says why, the other says who, nobody hangs, nothing changes."""
    (other, unchanged_0), (mine, unchanged_1) = pool.run(2, jobs.damaged_state, what)
    assert message in mine
    assert other.startswith("SyncError: rank 1 ")
    assert unchanged_0 and unchanged_1


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("meta", "a tensor without entries of its own"),
        ("sparse", "a tensor without entries of its own"),
        ("wide", "NaN or infinite"),
        ("deep", "damaged state: RecursionError"),
        ("buckets", "damaged state: TypeError"),
        ("strides", "damaged state: TypeError"),
    ],
)
def test_an_odd_state_of_a_channels_last_model(pool: Pool, what: str, message: str) -> None:
    (other, unchanged_0), (mine, unchanged_1) = pool.run(2, jobs.odd_state_of_a_channels_last_model, what)
    assert mine.startswith("ValueError: ") and message in mine
    assert other.startswith("SyncError: rank 1 ")
    assert unchanged_0 and unchanged_1


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_an_attach_that_fails_late_holds_nothing(pool: Pool) -> None:
    for said, held in pool.run(2, jobs.refused_addresses):
        assert "as its address" in said
        assert len(set(held)) == 1, held


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("built_in", [False, True])
def test_a_second_attach_holds_nothing(pool: Pool, built_in: bool) -> None:
    for first, *_, last in pool.run(2, jobs.attached_again, built_in):
        assert all(after <= before for before, after in zip(first, last, strict=True)), (first, last)


def test_a_configuration_that_only_one_rank_has_wrong(pool: Pool) -> None:
    """The one says what is wrong, the others who; nobody waits for a timeout."""
    other, mine = pool.run(2, jobs.invalid_on_one_rank)
    assert mine.startswith("ValueError: 'randomk' has no scope='tensor'")
    assert other.startswith("SyncError: rank 1 cannot take part: 'randomk' has no scope")


@WAYS
def test_parameters_that_nobody_used_lose_nothing(pool: Pool, way: str) -> None:
    """DDP throws away what arrives for a parameter that no rank used: so nothing may be sent for it."""
    for error in pool.run(3, jobs.alternating_branches, {"ratio": 0.05, "values": "fp32", "collective": way}):
        assert error < 1e-5


@WAYS
def test_an_error_in_the_middle_of_a_step(pool: Pool, way: str) -> None:
    """One rank fails in its first bucket: its residuals are as before the step, and all ranks hear soon."""
    for result in pool.run(3, jobs.fails_midway, way):
        assert result["unchanged"] and result["steps"] == 2
        said = result["said"]
        assert (
            "planted" in said or "rank 1 is out of step by an error of its own" in said or "earlier" in said
        )


def test_a_model_that_is_forgotten_leaves_no_thread(pool: Pool) -> None:
    for running, left in pool.run(2, jobs.forgotten):
        assert running == 3 and left == 0


def test_channels_last_states_are_in_the_parameters_order(pool: Pool) -> None:
    """DDP lays such gradients in memory order; a saved residual has the parameter's own."""
    for error, round_trip in pool.run(2, jobs.channels_last):
        assert error == 0.0 and round_trip


def test_channels_last_weights_meet_their_own_gradients(pool: Pool) -> None:
    """An L2 penalty before compression, where gradients lie in memory order."""
    for ours, theirs in pool.run(2, jobs.channels_last_penalty):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_channels_last_owners_owe_in_the_parameters_order(pool: Pool) -> None:
    for law, said in pool.run(2, jobs.channels_last_owners):
        assert law < 1e-5
        assert "saved with another memory format" in said


@WAYS
def test_resume_is_exact_for_a_slice_of_a_larger_tensor(pool: Pool, way: str) -> None:
    for weights, debts, law in pool.run(2, jobs.sliced, way):
        assert weights and debts
        assert law < 1e-5


@pytest.mark.parametrize(
    ("default", "own"),
    [
        (torch.float64, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "none"])
def test_another_default_dtype(pool: Pool, default: torch.dtype, own: torch.dtype, feedback: bool) -> None:
    """Buffers that kernels write to are theirs, whatever torch makes tensors of."""
    config = {"ratio": 0.05, "error_feedback": feedback, "collective": "allgather"}
    results = pool.run(2, jobs.other_default, default, own, config)
    for parameters, law in results:
        assert torch.equal(parameters, results[0][0]) and torch.isfinite(parameters).all()
        assert law < 1e-5 or not feedback


def test_thread_ends_when_the_user_destroys_the_groups(pool: Pool) -> None:
    for running, left in pool.run(2, jobs.destroyed):
        assert len(running) == 1 and left == []


def test_a_damaged_message_is_quoted_and_kept(pool: Pool) -> None:
    for said in pool.run(2, jobs.foreign_message):
        assert "message from rank 0 is damaged: its checksum does not match" in said
        assert "synchronisation failed in an earlier step" in said
        assert said.endswith("kept SyncError of bucket 0, by WireError")


def test_register_comm_hook_by_hand(pool: Pool) -> None:
    assert pool.run(2, jobs.own_registration) == [1, 1]


@pytest.mark.parametrize("config", [{}, {"name": "sign"}, {"name": "powersgd"}, {"name": "randomk"}], ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_manual_backend(pool: Pool, config: dict[str, Any], world: int) -> None:
    results = pool.run(world, jobs.manual, config)
    for result in results:
        assert torch.equal(result["parameters"], results[0]["parameters"])
    if results[0]["stats"]["collectives"].keys() == {"allgather"}:
        sums = results[0]["applied"] + results[0]["debt"]
        torch.testing.assert_close(sums, results[0]["true"], rtol=0, atol=1e-5)
    assert sum(results[0]["stats"]["collectives"].values()) > 1, "parameters were not batched into buckets"


def test_manual_backend_compares_the_compressors_own_settings(pool: Pool) -> None:
    for what, field in [
        ("ratio", "config.ratio: 0.02, not 0.01"),
        ("values", "config.values: 'bf16', not 'fp16'"),
    ]:
        for said in pool.run(2, jobs.manual_disagreement, what):
            assert f"rank 1 differs from rank 0 in {field}" in said


def test_manual_backend_says_what_it_did(pool: Pool) -> None:
    """Ledger and compressor statistics are of the compressor in use, and blocking counts as exposed."""
    for printed, exposed, stats, dense in pool.run(2, jobs.manual_statistics):
        assert "topk, ratio 0.1, fp16 values" in printed
        assert exposed > 0
        assert (
            stats["total_calls"] > 0 and 0 < stats["total_bytes_compressed"] < stats["total_bytes_original"]
        )
        assert dense == "qsgd"


def test_manual_backend_with_a_grad_scaler(pool: Pool) -> None:
    results = pool.run(3, jobs.manual_overflows)
    for result in results:
        assert result["skipped"] == [2, 7] and result["law"] < 1e-5
        assert torch.equal(result["parameters"], results[0]["parameters"])


def test_manual_backend_dense_and_without_memory(pool: Pool) -> None:
    dense = pool.run(3, jobs.manual, None)
    torch.testing.assert_close(dense[0]["applied"], dense[0]["true"], rtol=0, atol=1e-5)
    forgetful = pool.run(2, jobs.manual, {}, feedback=False)
    assert forgetful[0]["stats"]["error_feedback"] is False
    assert torch.equal(forgetful[0]["parameters"], forgetful[1]["parameters"])
