"""Synchronisers that are closed, forgotten, destroyed and attached again at random moments.

    python experiments/stress.py

Two gloo processes. In each round a synchroniser trains a little and ends in one of the ways of
``stress_rounds.py``: before, during or after backward, from other threads, by the garbage collector, after
the process groups were destroyed. Then no thread of ours may be left, all descriptors and gloo's threads are
given back, and a new one gives the weights that it always gives. Then the worker thread alone, with threads
that submit, close and forget it at once. A round that does not end is a deadlock: the stacks are printed.

PASS or FAIL at the end; rows in results/stress.csv. Linux only: /proc says what a process holds.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter
from datetime import datetime, timezone
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch.distributed as dist
from origin import origin
from rows import append

FOLDER = Path(__file__).resolve().parent
COLUMNS = ("check", "rounds", "seconds", "verdict", "date", "seed", "command", "commit", "version", "machine")
STUCK = 100.0
"""Seconds without news after which a round is a deadlock; every wait within a round is shorter."""


def serve(rank: int, rounds: int, worker_rounds: int, seed: int, port: int, news: Connection) -> None:
    """One of the processes: tells the name of each round's ending, and what went wrong, if anything."""
    import torch
    from stress_rounds import RANKS, one_round
    from stress_worker import worker_round

    from compressed_ddp.communication import worker as module

    sys.setswitchinterval(1e-5)  # threads take turns 500 times as often
    gc.freeze()  # what was imported is no garbage; collections are cheap then
    faulthandler.register(signal.SIGUSR1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    module._IDLE_SECONDS = 0.02  # or nothing would happen while an idle thread looks around
    store = dist.TCPStore("127.0.0.1", port)
    expected: dict[str, str] = {}
    try:
        for number in range(rounds):
            news.send(one_round(number, rank, store, seed, expected))
        module._IDLE_SECONDS = 0.001
        for number in range(rank, worker_rounds, RANKS):
            worker_round(number, seed)
            news.send("the worker thread alone")
    except BaseException:
        news.send(("failed", f"rank {rank}:\n{traceback.format_exc()}"))
        raise


def run(rounds: int, worker_rounds: int, seed: int) -> tuple[Counter[str], list[str]]:
    """How many rounds of each kind were gone through, and what went wrong."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stress_rounds"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(2):
        mine, theirs = context.Pipe(duplex=False)
        args = (rank, rounds, worker_rounds, seed, store.port, theirs)
        processes.append(context.Process(target=serve, args=args, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(mine)
    done: Counter[str] = Counter()
    wrong: list[str] = []
    try:
        while pipes and not wrong:
            ready = wait(pipes, STUCK)
            if not ready:
                wrong.append(f"no round has ended for {STUCK:g} s; the stacks are above")
                for process in processes:
                    os.kill(process.pid or 0, signal.SIGUSR1)
                time.sleep(1)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    told = pipe.recv()
                except EOFError:
                    pipes.remove(pipe)
                    continue
                if isinstance(told, tuple):
                    wrong.append(told[1])
                else:
                    done[told] += 1
        for rank, process in enumerate(processes):
            process.join(5 if not wrong else 0.1)
            if process.exitcode != 0 and not wrong:
                wrong.append(f"rank {rank} ended with exit code {process.exitcode}")
    finally:
        for process in processes:
            process.kill()
            process.join()
    return done, wrong


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000, help="with two processes")
    parser.add_argument("--worker-rounds", type=int, default=1000, help="of the worker thread alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FOLDER.parent / "results", help="folder of the CSV file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not Path("/proc/self/fd").exists():
        print("this needs Linux's /proc to see what a process holds")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the processes are ended too
    # The process that the two are forked from looks for stress_rounds there, and says nothing if it is not.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    made_by = origin() | {"date": date, "seed": options.seed}
    began = time.monotonic()
    done, wrong = run(options.rounds, options.worker_rounds, options.seed)
    seconds = round(time.monotonic() - began, 1)
    alone = done.pop("the worker thread alone", 0)
    counts = {name: count // 2 for name, count in done.items()} | {"the worker thread alone": alone}
    asked = {"rounds": options.rounds, "the worker thread alone": options.worker_rounds}
    found = {"rounds": done.total() // 2, "the worker thread alone": alone}
    if found != asked and not wrong:
        wrong.append(f"asked for {asked}, done {found}")
    verdict = "FAIL" if wrong else "PASS"
    rows = [{"check": name, "rounds": count} for name, count in counts.items()]
    rows.append({"check": "all", "rounds": sum(found.values()), "seconds": seconds, "verdict": verdict})
    (options.out / "stress.csv").unlink(missing_ok=True)
    append(options.out / "stress.csv", COLUMNS, [made_by | row for row in rows])
    for name, count in counts.items():
        print(f"{count:>6}  {name.replace('_', ' ')}")
    print(f"{verdict}: {found} in {seconds} s", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
