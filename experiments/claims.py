"""The original write-up's claims, one by one: what it says, what our results say, and why they differ.

What was measured is computed from the files in results/; a claim whose file is not there yet says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import claim_figures as figures
from claim_figures import Measure, on_lab

from compressed_ddp.report import SOURCES, Table
from compressed_ddp.report.grid import Grid

Found = Mapping[str, Table]


class Claim(NamedTuple):
    """One row."""

    says: str
    source: str
    measure: Measure
    why: str


LAB, KERNELS = "scalability_analysis", "benchmark_compression"
TRAINING, LAB_TRAINING = "benchmark_training", "lab_training"
FEEDBACK = "error_feedback"
BOTH = ("mnist", "cifar10")
CLAIMS: dict[str, tuple[Claim, ...]] = {
    "problem": (
        Claim(
            "ResNet-50, 8 workers, 1 Gbit/s: 50 ms compute, 736 ms communication, efficiency 6 %",
            LAB,
            on_lab(figures.plain_step),
            "a ring sends 179 MB from each host, and 1 Gbit/s needs 1,431 ms for that: 736 would be "
            "twice the line's rate",
        ),
        Claim(
            "8 workers synchronise 800 MB",
            LAB,
            on_lab(figures.plain_bytes),
            "a ring sends 2 (P - 1) / P of the gradient from each host, all at the same time, and headers",
        ),
    ),
    "design": (
        Claim(
            "1 % as 12-byte entries is 3 MB, and saves 97 %",
            LAB,
            on_lab(figures.entries_bytes),
            "every worker must send its entries to all others: the share grows with their number",
        ),
        Claim(
            "an entry needs 12 bytes",
            KERNELS,
            figures.entry_bits,
            "naming 1 % of all elements takes 8.1 bits an entry; what rounding values loses stays in the "
            "residual",
        ),
        Claim(
            "compressing takes 1.2 ms for 1 M, 12.8 ms for 10 M, 38.4 ms for 25 M",
            KERNELS,
            figures.top_k_times,
            "ours is one core of a CPU, theirs may be a GPU; its steps, written in torch, against one pass",
        ),
        Claim(
            "for 25 M: 3 ms to add the residual, 4 to choose, 3 for the new residual",
            KERNELS,
            figures.phases,
            "its own table has 38.4 ms for 25 M, not 10; and nothing is said of packing, which here is small",
        ),
        Claim(
            "over time the sum of what was sent equals the true sum of gradients",
            FEEDBACK,
            figures.the_sum,
            "true only with what is still owed, and a smaller ratio owes more. With its own residual "
            "(compensated less the average) the workers together owe what is missing, but each piles up its "
            "distance from the average, never pays it, and sends the wrong entries",
        ),
        Claim(
            "error feedback is essential, plain compression ruins convergence",
            FEEDBACK,
            figures.feedback_scores,
            "true, and the more the smaller the ratio; a small model, few steps, and the same rate for all",
        ),
        Claim(
            "torch.topk is fast enough, kernels of one's own are not needed",
            KERNELS,
            figures.top_k_gain,
            "adding, selecting and subtracting can be one pass over memory",
        ),
    ),
    "revised": (
        Claim(
            "decompressing before the all-reduce is simpler and still saves 97 %",
            LAB,
            on_lab(figures.dense_bytes),
            "a dense tensor of mostly zeros is as long as any other: nothing is saved, and selecting "
            "comes on top",
        ),
        Claim(
            "sending sparse entries needs kernels inside NCCL, and would save 3 times more",
            LAB,
            on_lab(figures.our_bytes),
            "all-gather and all-to-all of small byte messages are enough; fixed sizes, no exchange of "
            "lengths",
        ),
    ),
    "analysis": (
        Claim(
            "MNIST: 98.2 % dense, then 98.0, 97.9 and 97.2 % at 10, 1 and 0.1 %",
            TRAINING,
            figures.scores("mnist"),
            "another rate, batch and number of epochs; its residual never pays what differs between "
            "workers; ours pays late: at 0.1 % much is still owed after few steps (`error_feedback.csv`)",
        ),
        Claim(
            "MNIST: 10.7, 3.0 and 1.2 % of the bytes",
            TRAINING,
            figures.shares("mnist"),
            "12-byte entries would be 30, 3 and 0.3 % of one message, and its method sends everything; ours "
            "is what sockets sent, the fixed cost of tensors that travel whole included",
        ),
        Claim(
            "MNIST: 1.2, 8.5 and 12.3 times faster",
            LAB_TRAINING,
            figures.faster("mnist"),
            "a small model computes longer than it sends unless the network is slow",
        ),
        Claim(
            "CIFAR-10, ResNet-18: 92.5 % dense, then 92.1, 91.8 and 90.3 %",
            TRAINING,
            figures.scores("cifar10"),
            "not the same training: a smaller model, two fifths of the data, few epochs; compare the "
            "distances",
        ),
        Claim(
            "CIFAR-10: 11.2, 3.0 and 1.2 % of the bytes",
            TRAINING,
            figures.shares("cifar10"),
            "as for MNIST",
        ),
        Claim(
            "CIFAR-10: 1.3, 9.2 and 13.5 times faster",
            LAB_TRAINING,
            figures.faster("cifar10"),
            "as for MNIST; all hosts share two cores here",
        ),
        Claim(
            "73, 97 and 99.7 % saved for 0.4, 0.7 and 2.2 points at 10, 1 and 0.1 %",
            TRAINING,
            figures.trade_off(BOTH),
            "its bytes are 12-byte entries of one message, computed; how much is lost depends on the task "
            "and on how many steps there are to pay what is owed",
        ),
        Claim(
            "less than 1 % of accuracy is lost",
            TRAINING,
            figures.accuracy_lost(BOTH),
            "true for MNIST; not for a harder task in ten epochs with the rate that was chosen for dense",
        ),
        Claim(
            "a ratio of 1 % is the optimum",
            TRAINING,
            figures.trade_off(BOTH),
            "there is no single one: MNIST loses little at 0.1 %, this CIFAR-10 much at 1 %. What is saved "
            "beyond 10 % matters only where the network is still the slowest part",
        ),
        Claim(
            "communication 10.2 times faster (ResNet-50, 8 GPUs)",
            LAB,
            on_lab(figures.communication),
            "10.2 is 786 by 77 ms, two whole steps of its tables; 736 by 22, its communication, would be 33. "
            "Its method sends every byte of plain DDP and compresses on top. Ours is paid for by eight hosts "
            "on two cores, except where computed",
        ),
        Claim(
            "a step of 82 instead of 786 ms: 9.6 times faster, efficiency 69 %",
            LAB,
            on_lab(figures.speed_up),
            "24 MB take 192 ms at 1 Gbit/s, not 22; eight hosts on two cores pay for compression four "
            "times over",
        ),
    ),
}


def table(found: Found, name: str) -> str:
    """The claims of a page, as a table for it."""
    rows = []
    for claim in CLAIMS[name]:
        missing = f"not measured yet: `{SOURCES[claim.source].command}`"
        measured = claim.measure(found[claim.source]) if claim.source in found else None
        rows.append([claim.says, measured or missing, f"`{claim.source}.csv`", claim.why])
    return Grid("", ("the write-up", "measured here", "file", "why they differ"), rows).markdown()
