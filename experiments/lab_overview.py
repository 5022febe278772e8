"""What was measured on the lab and what was not, and how far dilated runs stand for whole ones: for docs/."""

from __future__ import annotations

from collections.abc import Mapping

from compressed_ddp.lab.methods import METHODS
from compressed_ddp.lab.shaping import Shape
from compressed_ddp.lab.summary import Summary
from compressed_ddp.metrics import amount
from compressed_ddp.report import Table
from compressed_ddp.report.figures import (
    PLAIN,
    Setting,
    good,
    is_ours,
    median,
    of,
    refused,
    settings,
    title,
)
from compressed_ddp.report.grid import NONE, Grid, share
from compressed_ddp.report.lab_tables import summaries

WHOLE, DILATED = "scalability_analysis", "scalability_dilated"
OURS = ("ours-allgather-int8", "ours-sharded-int8")
HOSTS, RATES = (2, 4, 8, 16), {1e8: "100 Mbit/s", 1e9: "1 Gbit/s", 1e10: "10 Gbit/s"}

Found = Mapping[str, Table]


def place(table: Table, hosts: int, rate: float) -> Setting | None:
    """The setting of a file with so many hosts at this rate; of the largest model if there are several."""
    return next((s for s in settings(good(table.rows)) if (s.hosts, s.rate_bits) == (hosts, rate)), None)


def measured(found: Found) -> str:
    """Every number of hosts at every rate: whole, dilated, refused or not measured."""
    files = [(found[name], word) for name, word in ((WHOLE, "whole"), (DILATED, "dilated")) if name in found]
    gone = {(s.hosts, s.rate_bits) for table, _ in files for s in refused(table.rows)}

    def cell(hosts: int, rate: float) -> str:
        words = [word for table, word in files if place(table, hosts, rate) is not None]
        if (hosts, rate) in gone and "whole" not in words:
            words.insert(0, "whole: refused")
        return ", ".join(words) or "not measured"

    lines = [[f"{hosts} hosts", *(cell(hosts, rate) for rate in RATES)] for hosts in HOSTS]
    return Grid("", ("", *RATES.values()), lines).markdown()


def dilated_cpu(found: Found) -> str:
    """CPU of a host and step in dilated runs against whole ones, 8 hosts at 1 Gbit/s."""
    whole, dilated = (_figures(found, name, 8, 1e9) for name in (WHOLE, DILATED))
    lines = [
        [title(name), f"{each.cpu:.1f}", f"{dilated[name].cpu:.1f}", share(dilated[name].cpu, each.cpu)]
        for name, each in whole.items()
        if name in dilated and name != "none"
    ]
    head = ("CPU of a host and step, 8 hosts at 1 Gbit/s", "whole, ms", "dilated, ms", "dilated by whole")
    return Grid("", head, lines or [["not measured yet", *[NONE] * 3]]).markdown()


def dilated_low_rank(found: Found) -> str:
    """What low-rank methods send too much in dilated runs, and how long the wire needs for that."""
    lines = []
    for rate, words in RATES.items():
        dilated = _figures(found, DILATED, 8, rate)
        # What the whole model's share of plain DDP's bytes is does not depend on the rate.
        whole = _figures(found, WHOLE, 8, rate) or _figures(found, WHOLE, 8, 1e9)
        ours = [each.step for name, each in dilated.items() if is_ours(name)]
        for name, each in dilated.items():
            known = name in whole and name in METHODS and METHODS[name].low_rank and ours
            sent, plain = (dilated[which].sent if which in dilated else None for which in (name, PLAIN))
            of_whole, of_plain = (whole[which].sent if which in whole else None for which in (name, PLAIN))
            if not known or not sent or not plain or not of_whole or not of_plain:
                continue
            ran = place(found[DILATED], 8, rate)
            assert ran is not None
            spare = 8e3 * (sent - plain * of_whole / of_plain) / (ran.rate_bits / ran.dilation)
            lines.append(
                [
                    f"{title(name)}, 8 hosts at {words}",
                    *(f"{100 * sent / plain:.2f}", f"{100 * of_whole / of_plain:.2f}"),
                    *(f"{each.step:.1f}", f"{spare:.1f}", f"{each.step - spare:.1f}"),
                    f"{min(ours):.1f}",
                ]
            )
    head = (
        *("dilated", "sent, % of plain DDP", "it should be", "step, ms", "wire for what is too much, ms"),
        *("COMPUTED: step without, ms", "the faster of ours, ms"),
    )
    return Grid("", head, lines or [["not measured yet", *[NONE] * 6]]).markdown()


def unshaped(found: Found) -> str:
    """What a token bucket may let through at once, at most: it is full when each part of an exchange begins.

    An exchange has as many parts as rounds, and there is one for each of DDP's buckets.
    """
    lines = []
    for source, kind in ((WHOLE, "whole"), (DILATED, "dilated")):
        for rate, words in list(RATES.items())[:2]:
            figures = _figures(found, source, 8, rate)
            for name in (name for name in OURS if name in figures):
                where = place(found[source], 8, rate)
                assert where is not None
                buckets = median(of(good(found[source].rows), where, name), "buckets")
                each, real = figures[name], where.rate_bits / where.dilation
                if each.sent is None or buckets is None:
                    continue
                burst, times = Shape.of(real).burst, round(buckets * METHODS[name].rounds(8))
                wire, at_once = (8e3 * size / real for size in (each.sent, min(each.sent, times * burst)))
                lines.append(
                    [
                        f"{title(name)}, {words}, {kind}",
                        *(amount(burst), str(times), amount(round(each.sent))),
                        *(f"{wire:.1f}", f"{at_once:.1f}", f"{each.step:.1f}"),
                    ]
                )
    head = (
        *("8 hosts", "a full bucket", "times a step", "sent by a host", "COMPUTED: on the wire, ms"),
        *("COMPUTED: of it at once, at most, ms", "step, ms"),
    )
    return Grid("", head, lines or [["not measured yet", *[NONE] * 6]]).markdown()


def _figures(found: Found, source: str, hosts: int, rate: float) -> dict[str, Summary]:
    """What the lab says about a file's rows of a setting, by method; nothing if there are none."""
    where = place(found[source], hosts, rate) if source in found else None
    rows = good(found[source].rows) if source in found else []
    return {} if where is None else summaries(of(rows, where), where)
