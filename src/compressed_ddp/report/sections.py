"""What the report says, in order: words, and which picture and table comes from which CSV file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import lab_plots, lab_tables, other_plots, tables
from .figures import PLAIN, good, headline, is_ours, median, of, sent, title
from .grid import Grid
from .sources import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FACTS_OF = "ours-sharded-int8"
"""The method whose figures stand first; another one of ours where it was not run."""


@dataclass(frozen=True)
class Picture:
    """A plot of one CSV file; ``name`` is also that of its PNG file."""

    name: str
    source: str
    draw: Callable[[Table], Figure | None]
    alt: str


@dataclass(frozen=True)
class Section:
    """A heading, what to know before looking, and what there is to see."""

    name: str
    title: str
    lead: str
    pictures: tuple[Picture, ...] = ()
    grids: tuple[tuple[str, Callable[[Table], Grid | None]], ...] = ()

    @property
    def sources(self) -> list[str]:
        needed = [picture.source for picture in self.pictures] + [source for source, _ in self.grids]
        return list(dict.fromkeys(needed))


SECTIONS = (
    Section(
        "steps",
        "Where a step's time goes",
        "Hosts in network namespaces, links held to the rate and measured before each run. Compute is "
        "emulated: every host sleeps as long as a GPU would work. Communication and compression are real, "
        "and all hosts share the cores of one machine, so compression looks slower here than on machines of "
        "their own: the column that says so computes the step on such machines from the same figures. Thick "
        "bars: the step. Thin bars: what the thread that synchronises did meanwhile, in part beside compute. "
        "Below, ours alone, at a scale of their own.",
        (
            Picture(
                "step_times",
                "scalability_analysis",
                lab_plots.step_times,
                "Bars: milliseconds of a training step by method, for each rate, split into emulated "
                "compute and what the method adds, and ours once more by themselves; the tables below have "
                "the numbers.",
            ),
        ),
        (
            ("scalability_analysis", lab_tables.steps),
            ("scalability_analysis", lab_tables.slow_steps),
            ("scalability_analysis", lab_tables.everywhere),
        ),
    ),
    Section(
        "dilated",
        "The same with less to compute",
        "A tenth of the elements on links of a tenth of the rate takes the same time on the wire and less "
        "CPU, so that few cores can stand for many hosts: what is paid by the byte or element becomes a "
        "tenth, what is paid by the message does not; the CPU columns here and above say how much that is. "
        "Settings are named by what they stand for; bytes are about a tenth of it, headers weigh more. "
        "Not so PowerSGD's: its factors shrink with the square root of "
        "the elements, so it sends about 2.5 times too much here and its steps are too long. It can be "
        "compared in whole runs, above, and there too it has one bucket where all others have several. "
        "After a pause a link lets a little through at once; that weighs more here, so what ours gain, at "
        "100 Mbit/s above all, is an upper bound.",
        (
            Picture(
                "step_times_dilated",
                "scalability_dilated",
                lab_plots.step_times,
                "Bars: milliseconds of a step by method, for each rate, of dilated runs, and ours once more "
                "by themselves; the tables below have the numbers.",
            ),
        ),
        (
            ("scalability_dilated", lab_tables.steps),
            ("scalability_dilated", lab_tables.everywhere),
            ("scalability_dilated", lab_tables.traffic),
        ),
    ),
    Section(
        "bytes",
        "Bytes against hosts",
        "Counted at the interface of a host, with Ethernet, IP and TCP headers. All-gather's traffic grows "
        "with the number of the other hosts. Plain DDP's ring sends 2 (P - 1) / P of the model, 25 % more "
        "with 16 hosts than with 4. The sharded exchange sends (P - 1) / P of a message to everyone and at "
        "most 3/4 of one to the owners: an eighth more, and headers come on top.",
        (
            Picture(
                "bytes_by_hosts",
                "scalability_analysis",
                lab_plots.bytes_by_hosts,
                "Lines: megabytes that a host sends in a step against the number of hosts, by method, both "
                "axes logarithmic; the table below has the numbers.",
            ),
        ),
        (("scalability_analysis", lab_tables.traffic),),
    ),
    Section(
        "accuracy",
        "Accuracy against bytes",
        "Whole trainings with real data and real processes. The learning rate was chosen once, for dense, on "
        "held-out training data. Bytes were counted at the workers' sockets. The last table is of hosts on "
        "the lab's links; its datasets may be of different machines, so compare within one.",
        (
            Picture(
                "accuracy_by_bytes",
                "benchmark_training",
                other_plots.accuracy,
                "Points: test accuracy against megabytes sent by a worker, for dense and for three ratios, "
                "a panel for each dataset; the table below has the numbers.",
            ),
        ),
        (("benchmark_training", tables.training), ("lab_training", tables.training)),
    ),
    Section(
        "feedback",
        "What error feedback is for",
        "Four workers train a small model on handwritten digits and keep the sum of their gradients beside "
        "the sum of what was applied. With error feedback what is missing is owed, and soon paid. Without "
        "it, it is lost. The residual of the original write-up subtracts the average instead of what the "
        "worker sent: over all workers nothing is lost, but what differs between them piles up in each and "
        "is never paid, and it crowds out what should be sent.",
        grids=(("error_feedback", tables.feedback),),
    ),
    Section(
        "kernels",
        "Kernels under the roof of memory",
        "Whoever keeps a residual must add the gradient to it: two reads and a write. No Top-K with error "
        "feedback can be faster than that one pass, so it is the roof, measured in the same run by turns "
        "with everything else. Encode and decode touch the chosen entries alone: the fewer those are, the "
        "further above it they lie.",
        (
            Picture(
                "kernel_throughput",
                "benchmark_compression",
                other_plots.roofline,
                "Lines: million elements a second against the number of elements for select, encode, "
                "decode, take_ and torch.topk, a panel for each ratio, with the line of one pass over "
                "memory. What selects lies below that; encode and decode of few entries of many lie above.",
            ),
        ),
        (("benchmark_compression", tables.kernels),),
    ),
    Section(
        "map",
        "Where it wins and where it loses",
        "Beyond what fits into one machine: a model of latency, bandwidth and work for each element, fitted "
        "on the lab's own runs. Everything in the map is computed, for ResNet-50, 50 ms of compute, a ratio "
        "of 1 %, hosts with cores of their own, and 0.05 ms for each of the P - 1 messages of a collective "
        "(unless the command names others). "
        "Left out: the CPU of moving bytes and of single messages, which helps plain DDP most, and of "
        "copying gradients. Green: compressed is faster. Orange: dense is. The thick line is break-even. "
        "Gains within the model's own error are no wins; at rates below the lab's they are extrapolated.",
        (
            Picture(
                "win_map",
                "cost_model_map",
                other_plots.win_map,
                "Map: how many times faster a compressed step is than a dense one, by rate of a link and "
                "number of workers, with the line where both are equal; the table below has the numbers.",
            ),
            Picture(
                "predictions",
                "cost_model_check",
                other_plots.predictions,
                "Points: predicted against measured step times, for runs that the model was fitted on and "
                "for runs that were held out.",
            ),
        ),
        (
            ("cost_model_map", tables.break_even),
            ("cost_model_check", tables.model_check),
            ("cost_model", tables.model_parameters),
        ),
    ),
)


def short(found: Mapping[str, Table]) -> list[tuple[str, str]]:
    """The figures that matter most: a number, and what it is. As many as there are files for."""
    facts = []
    if "scalability_analysis" in found:
        facts += _lab_facts(found["scalability_analysis"])
    if "benchmark_training" in found:
        facts += _training_facts(found["benchmark_training"])
    if "benchmark_compression" in found:
        facts += _kernel_facts(found["benchmark_compression"])
    return facts


def _lab_facts(table: Table) -> list[tuple[str, str]]:
    rows = good(table.rows)
    setting = headline(rows)
    if setting is None:
        return []
    mine = of(rows, setting)
    plain = of(mine, setting, PLAIN)
    plain_ms, plain_sent = median(plain, "step_ms"), sent(plain)
    names = [name for name in dict.fromkeys(row["method"] for row in mine) if is_ours(name)]
    name = next((name for name in (FACTS_OF, *names) if name in names), None)
    if name is None:
        return []
    ours = of(mine, setting, name)  # one method for both: what is fastest need not send least
    ms, size = median(ours, "step_ms"), sent(ours)
    facts = []
    if plain_ms and ms:
        facts.append((f"{plain_ms / ms:.1f} x", f"step against plain DDP, {title(name)}, {setting}"))
    if plain_sent and size:
        what = f"of plain DDP's bytes at the interface, {title(name)}, same run"
        facts.append((f"{100 * size / plain_sent:.2f} %", what))
    return facts


def _training_facts(table: Table) -> list[tuple[str, str]]:
    facts = []
    rows = [row for row in tables.tests_of(table.rows) if row["accuracy"] is not None]
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        scores = {
            ratio: [r["accuracy"] for r in rows if (r["dataset"], r["ratio"]) == (dataset, ratio)]
            for ratio in (1.0, 0.01)
        }
        if all(scores.values()):
            dense, sparse = (sum(each) / len(each) for each in scores.values())
            facts.append((f"{sparse - dense:+.2f}", f"points of test accuracy at 1 %, {dataset}"))
    return facts


def _kernel_facts(table: Table) -> list[tuple[str, str]]:
    rows = [r for r in table.rows if (r["distribution"], r["threads"], r["ratio"]) == ("gaussian", 1, 0.01)]
    size = max((row["elements"] for row in rows), default=0)
    ms = {row["method"]: row["best_ms"] for row in rows if row["elements"] == size}
    if not {"native", other_plots.ROOF} <= set(ms):
        return []
    return [
        (
            f"{ms['native'] / ms[other_plots.ROOF]:.2f}",
            "passes over memory to select 1 %, error feedback included",
        )
    ]
