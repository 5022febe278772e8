"""The network lab: links hold their rate, counters count, programs run, and nothing is ever left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compressed_ddp.cli import main
from compressed_ddp.lab import (
    Lab,
    LabError,
    LaunchFailed,
    Loopback,
    check,
    clean,
    launch,
    missing,
    parse_rate,
)
from compressed_ddp.lab import cli as lab_cli
from compressed_ddp.lab import tools as lab_tools
from compressed_ddp.lab.records import RECORDS, namespaces, record, remove
from compressed_ddp.lab.selftest import Figure, measure_flows
from compressed_ddp.lab.shaping import Shape

LACKING = missing()
needs_a_lab = pytest.mark.skipif(LACKING is not None, reason=f"no network lab: {LACKING}")
PYTHON = [sys.executable, "-I", "-S", "-c"]
RATE = 100e6


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Three hosts at 100 Mbit/s, for all tests that leave it as it was."""
    with Lab(3, "100mbit") as lab:
        yield lab
    assert gone(lab.prefix)


def gone(prefix: str) -> bool:
    """Whether nothing is left of a lab."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return prefix not in listed and not namespaces(prefix) and not (RECORDS / prefix).exists()


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


# Rates, hosts, shapes: no root needed.


@pytest.mark.parametrize(
    ("text", "rate"), [("100mbit", 100e6), ("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("1500kbit", 1.5e6)]
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "100", "100 mb", "-1gbit", "1e3mbit", "nangbit", "100mbit; ls"])
def test_a_wrong_rate_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="100mbit or 1gbit") as caught:
        Lab(3, text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["1kbit", "0mbit", "500gbit"])
def test_a_rate_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="1mbit to 100gbit"):
        Lab(3, text)


@pytest.mark.parametrize("network", [Lab, Loopback])
def test_wrong_hosts_are_refused(network: type[Lab] | type[Loopback]) -> None:
    for hosts in (-1, 0, 1, 251):
        with pytest.raises(ValueError, match=f"hosts is {hosts}; a lab has 2 to 250"):
            network(hosts)
    with pytest.raises(TypeError, match="whole number"):
        network(2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [1e6, 10e6, 100e6, 1e9, 10e9, 100e9])
def test_a_bucket_holds_super_packets_and_little_more(rate: float) -> None:
    shape = Shape.of(rate)
    assert shape.burst >= 2 * shape.gso and shape.limit >= shape.burst and shape.gso <= 65_536
    assert shape.burst <= 8_000 or shape.burst <= 2e-3 * rate / 8


def test_figures_are_judged_in_both_directions() -> None:
    assert Figure(0, "", sent=95e6, received=91e6).holds(RATE)
    assert Figure(0, "", sent=91e6, received=95e6).holds(RATE)
    for sent, received in ((89e6, 95e6), (95e6, 89e6), (100.1e6, 95e6), (95e6, 100.1e6)):
        assert not Figure(0, "", sent, received).holds(RATE)


# The launcher, on loopback: no root needed.


def test_every_rank_is_told_where_it_is() -> None:
    heard: list[str] = []
    program = (
        "import json, os; "
        "print(json.dumps({k: os.environ[k] for k in ('MASTER_ADDR', 'MASTER_PORT', 'RANK', 'WORLD_SIZE', "
        "'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GLOO_SOCKET_IFNAME', 'OMP_NUM_THREADS', 'MORE')}))"
    )
    with Loopback(2) as network:
        assert launch(network, [*PYTHON, program], {"MORE": "yes"}, listen=heard.append) == [0, 0]
        assert network.counters() is None
    facts = json.loads(heard[0])
    assert facts["MASTER_ADDR"] == "127.0.0.1" and int(facts["MASTER_PORT"]) > 1024
    assert (facts["RANK"], facts["WORLD_SIZE"], facts["MORE"]) == ("0", "2", "yes")
    assert (facts["LOCAL_RANK"], facts["LOCAL_WORLD_SIZE"]) == ("0", "1")
    assert int(facts["OMP_NUM_THREADS"]) >= 1


def test_rank_0_is_answered() -> None:
    program = (
        "import os\nif os.environ['RANK'] == '0':\n print('begin', flush=True)\n assert input() == 'go'\n"
    )
    with Loopback(2) as network:
        assert launch(network, [*PYTHON, program], listen=lambda line: "go") == [0, 0]


def test_an_error_of_the_listener_ends_all() -> None:
    def listen(line: str) -> None:
        raise KeyError(line)

    program = "import time; print('begin', flush=True); time.sleep(60)"
    with Loopback(2) as network, pytest.raises(KeyError, match="begin"):
        launch(network, [*PYTHON, program], listen=listen)


def test_one_failing_ends_all_and_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would run for a minute, one of them deaf to SIGTERM; what they started ends as well."""
    monkeypatch.setattr(sys.modules["compressed_ddp.lab.launch"], "GRACE", 0.2)
    program = (
        "import os, pathlib, signal, sys, time\n"
        "rank, folder = os.environ['RANK'], pathlib.Path(os.environ['FOLDER'])\n"
        "while rank == '1':\n"
        " if len(list(folder.iterdir())) == 2: print('out of luck'); sys.exit(7)\n"
        " time.sleep(0.01)\n"
        "if rank == '2': signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if child := os.fork(): (folder / str(child)).touch()\n"
        "time.sleep(60)\n"
    )
    with Loopback(3) as network, pytest.raises(LaunchFailed, match="out of luck") as caught:
        launch(network, [*PYTHON, program], {"FOLDER": str(tmp_path)})
    assert "rank 1 ended with exit status 7" in str(caught.value)
    assert caught.value.codes == [-15, 7, -9] and caught.value.first == 1
    for child in tmp_path.iterdir():
        assert ends(int(child.name))


def ends(pid: int) -> bool:
    """Whether a process is dead, or dies in the next seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_a_program_that_does_not_end_is_ended() -> None:
    with Loopback(2) as network, pytest.raises(LabError, match=r"ranks \[0, 1\] did not end within 0.2 s"):
        launch(network, [*PYTHON, "import time; time.sleep(60)"], timeout=0.2)


def test_wrong_calls_are_refused() -> None:
    network = Loopback(2)
    with pytest.raises(LabError, match="with"):
        network.run(0, ["true"])
    with network:
        with pytest.raises(ValueError, match="host 2 does not exist: there are 0 to 1"):
            network.run(2, ["true"])
        for command in ([], ["no-such-program-anywhere"]):
            with pytest.raises(ValueError, match="cannot be found"):
                launch(network, command)


def test_without_root_it_says_so_and_runs_on_loopback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for where in (lab_tools, lab_cli):
        monkeypatch.setattr(where, "missing", lambda: "it needs root, and this is user 1000: use sudo")
    command = [*PYTHON, "import os; print('rank', os.environ['RANK'])"]
    assert main(["lab", "run", "--hosts=2", "--rate=1gbit", "--", *command]) == 0
    printed = capfd.readouterr()
    assert printed.out == "rank 0\n"
    assert "it needs root" in printed.err and "loopback" in printed.err and "holds it" not in printed.err
    assert main(["lab", "clean"]) == 1
    assert "it needs root" in capfd.readouterr().err


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert "needs Linux" in (missing() or "")
    with pytest.raises(LabError, match="needs Linux"), Lab(2, "1gbit"):
        pass
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert 'sudo env "PATH=$PATH"' in (missing() or "")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    assert "apt-get install iproute2" in (missing() or "")


def test_a_wrong_command_line_is_explained(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["run", "--hosts=2", "--seed=1", "--", "true"], "about comparing methods"),
        (["run", "--hosts=2", "--rate=quick", "--", "true"], "'quick'"),
        (["run", "--hosts=1", "--loopback", "--", "true"], "hosts is 1"),
        (["run", "--hosts=2", "--"], "nothing stands after --"),
        (["check", "--hosts=2", "--", "true"], "lab check runs no program: leave out -- true"),
        (["clean", "--", "true"], "lab clean runs no program"),
        (["clean", "--"], "lab clean runs no program"),
    ):
        assert main(["lab", *arguments]) == 2
        assert said in capfd.readouterr().err


def test_a_program_is_looked_for_before_the_network_is_built(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(options: object) -> None:
        raise AssertionError("a network is built")

    monkeypatch.setattr(lab_cli, "_network", built)
    assert main(["lab", "run", "--hosts=2", "--", "no-such-program-anywhere"]) == 2
    assert "'no-such-program-anywhere' cannot be found" in capfd.readouterr().err


# The lab.


@needs_a_lab
def test_the_self_test_judges_every_link_and_none_exceeds_its_rate(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may be slower than the rate; faster it can be only where nothing is shaped."""
    monkeypatch.setattr("compressed_ddp.lab.selftest.LEAST", 0.0)
    figures = check(lab, seconds=0.5)
    assert [figure.address for figure in figures] == [lab.address(host) for host in range(3)]
    assert all(0 < way <= RATE for figure in figures for way in (figure.sent, figure.received))


@needs_a_lab
def test_all_pairs_reach_each_other(lab: Lab) -> None:
    flows = [(a, b) for a in range(3) for b in range(3) if a != b]
    assert all(rate > 0 for rate in measure_flows(lab, flows, seconds=0.3))


@needs_a_lab
def test_a_rate_beyond_the_machine_is_refused_with_figures() -> None:
    with Lab(2, "100gbit") as lab, pytest.raises(LabError, match="does not hold") as caught:
        check(lab, seconds=0.1, attempts=1)
    assert lab.address(1) in str(caught.value) and "100.0 Gbit/s" in str(caught.value)


@needs_a_lab
def test_counters_count_what_was_sent(lab: Lab) -> None:
    """3 MB from host 0 to host 1: payload, one header a super-packet; at the shaper one header a frame."""
    amount = 3_000_000
    serve = (
        "import socket, sys\n"
        f"with socket.create_server(('{lab.address(1)}', 7000)) as server:\n"
        " print('listening', flush=True); c, _ = server.accept()\n"
        "n = 0\n"
        "while data := c.recv(1 << 16): n += len(data)\n"
        "print(n)\n"
    )
    send = (
        f"import socket; s = socket.create_connection(('{lab.address(1)}', 7000)); s.sendall(bytes({amount}))"
    )
    receiver = lab.run(1, [*PYTHON, serve], stdout=subprocess.PIPE)
    assert receiver.stdout is not None and receiver.stdout.readline() == b"listening\n"
    before = lab.counters()
    assert lab.run(0, [*PYTHON, send]).wait(20) == 0
    assert receiver.communicate(timeout=20)[0] == b"%d\n" % amount
    sender, peer, other = (end - start for end, start in zip(lab.counters(), before, strict=True))
    frames = amount / 1448
    assert amount < sender.tx_bytes < 1.03 * amount and sender.tx_packets < frames / 2
    assert frames <= sender.tx_frames <= 1.05 * frames + 20
    assert sender.tx_wire_bytes == pytest.approx(amount + 66 * sender.tx_frames, rel=0.005)
    assert peer.rx_bytes == pytest.approx(sender.tx_bytes, abs=500)  # somebody may ask who has an address
    assert peer.rx_wire_bytes == pytest.approx(sender.tx_wire_bytes, abs=500)
    assert sender.rx_bytes < 0.1 * amount  # acknowledgements
    assert other.tx_bytes < 1000 and other.rx_bytes < 1000


@needs_a_lab
def test_hosts_see_each_other_and_nothing_else(lab: Lab) -> None:
    listing = lab.run(0, ["ip", "-j", "route", "show"], stdout=subprocess.PIPE)
    routes = json.loads(listing.communicate(timeout=10)[0])
    assert [(route["dev"], route["prefsrc"]) for route in routes] == [("eth0", lab.address(0))]


@needs_a_lab
def test_two_labs_at_once(lab: Lab) -> None:
    before = interfaces()
    with Lab(2, "1gbit") as other:
        assert other.prefix != lab.prefix
        assert len(namespaces(other.prefix)) == 3 and len(namespaces(lab.prefix)) == 4
        for each in (other, lab):
            assert each.run(0, ["true"]).wait(10) == 0
        assert interfaces() == before  # this machine's own network is as it was
    assert gone(other.prefix) and interfaces() == before
    assert len(measure_flows(lab, [(0, 2)], seconds=0.1)) == 1


@needs_a_lab
def test_nothing_is_left_after_an_error() -> None:
    with pytest.raises(KeyError), Lab(2) as lab:
        sleeper = lab.run(1, ["sleep", "60"])
        assert sleeper.poll() is None and len(namespaces(lab.prefix)) == 3
        raise KeyError
    assert gone(lab.prefix) and sleeper.poll() == -9
    lab.close()  # a second time does nothing


@needs_a_lab
def test_a_fork_of_the_runner_does_not_take_the_lab_with_it(lab: Lab) -> None:
    if (child := os.fork()) == 0:
        lab.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(namespaces(lab.prefix)) == 4 and lab.run(0, ["true"]).wait(10) == 0


@needs_a_lab
def test_a_lab_that_cannot_be_built_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shape, "qdisc", lambda self: "root nonsense")
    lab = Lab(2, "1gbit")
    with pytest.raises(LabError, match="qdisc add dev"), lab:
        pass
    assert gone(lab.prefix)


RUNNER = """
import sys, time
from compressed_ddp.lab import Lab
with Lab(2, "100mbit") as lab:
    sleeper = lab.run(1, ["sleep", "100"])
    print(lab.prefix, sleeper.pid, flush=True)
    time.sleep(100)
"""


@needs_a_lab
def test_a_runner_that_is_ended_leaves_nothing_and_one_that_is_killed_is_cleaned_up(lab: Lab) -> None:
    ways = {signal.SIGINT: -2, signal.SIGTERM: 143, signal.SIGKILL: -9}
    command = [sys.executable, "-c", RUNNER]

    def heed_ctrl_c() -> None:  # a suite that runs in the background of a shell hands down that it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runners = {way: subprocess.Popen(command, preexec_fn=heed_ctrl_c, **pipes) for way in ways}
    labs = {}
    try:
        for way, runner in runners.items():
            assert runner.stdout is not None
            prefix, sleeper = runner.stdout.readline().split()
            labs[way] = prefix, int(sleeper)
        for prefix, _ in labs.values():
            assert len(namespaces(prefix)) == 3
        for way, runner in runners.items():
            runner.send_signal(way)
        for way, runner in runners.items():
            assert runner.wait(30) == ways[way]
        for way in (signal.SIGINT, signal.SIGTERM):
            assert gone(labs[way][0])
        prefix, sleeper_of_dead = labs[signal.SIGKILL]
        assert len(namespaces(prefix)) == 3
        os.kill(sleeper_of_dead, 0)
        fates = {each.prefix: each for each in clean()}
        assert fates[prefix].removed and "3 namespaces, 1 processes killed" in fates[prefix].fate
        assert (
            not fates[lab.prefix].removed and f"process {os.getpid()} is using it" in fates[lab.prefix].fate
        )
        assert gone(prefix) and len(namespaces(lab.prefix)) == 4
        assert ends(sleeper_of_dead)
    finally:
        for runner in runners.values():
            runner.kill()
            runner.wait()
        clean()
        for runner in runners.values():
            runner.communicate()


@needs_a_lab
def test_clean_goes_by_start_time_and_leaves_alone_what_it_cannot_judge(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reused, unreadable = "cddp-00000001", "cddp-00000002"
    try:
        record(reused)
        facts = json.loads((RECORDS / reused).read_text())
        assert facts["pid"] == os.getpid()
        (RECORDS / reused).write_text(json.dumps({**facts, "started": facts["started"] - 1}))
        (RECORDS / unreadable).write_text("{}")
        assert main(["lab", "clean"]) == 1
        printed = capsys.readouterr().out
        assert f"{reused} removed" in printed and f"{unreadable} not removed" in printed
        assert not (RECORDS / reused).exists() and (RECORDS / unreadable).exists()
    finally:
        for prefix in (reused, unreadable):
            remove(prefix)


def test_clean_removes_records_that_were_never_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between writing and renaming. One that is being written just now stays."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr("compressed_ddp.lab.records.RECORDS", tmp_path)
    monkeypatch.setattr("compressed_ddp.lab.records.NAMESPACES", tmp_path / "none")
    left, now = tmp_path / f"cddp-0000000a.{ended.pid}.part", tmp_path / f"cddp-0000000b.{os.getpid()}.part"
    for path in (left, now, tmp_path / "something else"):
        path.write_text("{")
    (fate,) = clean()
    assert (fate.prefix, fate.removed, fate.stuck) == ("cddp-0000000a", True, False)
    assert not left.exists() and now.exists() and (tmp_path / "something else").exists()


REDUCE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((250_000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
assert torch.equal(x, torch.full_like(x, 6.0)), x
dist.barrier()
print("rank", dist.get_rank(), "has the sum", flush=True)
dist.destroy_process_group()
"""


@needs_a_lab
def test_gloo_reduces_across_the_lab(lab: Lab) -> None:
    heard: list[str] = []
    before = lab.counters()
    assert (
        launch(lab, [sys.executable, "-c", REDUCE], {"OMP_NUM_THREADS": "1"}, listen=heard.append) == [0] * 3
    )
    assert heard == ["rank 0 has the sum"]
    for start, end in zip(before, lab.counters(), strict=True):
        ring = 2 * 2 / 3 * 1_000_000
        assert ring < (end - start).tx_wire_bytes < 1.3 * ring


@needs_a_lab
def test_the_commands(capfd: pytest.CaptureFixture[str]) -> None:
    program = [*PYTHON, "import os; print('rank', os.environ['RANK'], os.environ['MASTER_ADDR'])"]
    assert main(["lab", "run", "--hosts=2", "--rate=1gbit", "--no-check", "--", *program]) == 0
    printed = capfd.readouterr()
    assert printed.out.startswith("rank 0 10.") and len(printed.out.splitlines()) == 1
    assert "NOT checked" in printed.err and "frames out" in printed.err
    failing = [*PYTHON, "import os, sys; print('bad luck'); sys.exit(3 * (os.environ['RANK'] == '1'))"]
    assert main(["lab", "run", "--hosts=2", "--", *failing]) == 3
    assert "rank 1 ended with exit status 3" in (said := capfd.readouterr().err) and "bad luck" in said
    assert main(["lab", "check", "--hosts=2"]) == 0
    assert "receives" in capfd.readouterr().out
