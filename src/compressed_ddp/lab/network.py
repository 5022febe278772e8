"""The lab: hosts in network namespaces, joined by a switch, every link shaped in both directions."""

from __future__ import annotations

import json
import secrets
from typing import Any

from . import records
from .hosts import Counters, Network
from .shaping import Shape, parse_rate, rate_text
from .tools import LabError, call, call_all, missing, tool

SYSCTLS = {
    # In every kernel, so that figures do not depend on what this machine has been set to; and it takes
    # nothing but loss for a full link. Cubic and BBR go by delay too, and slow down when cores are busy.
    "net/ipv4/tcp_congestion_control": "reno",
    # Neighbour and router discovery would only add bytes that nobody sent.
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
    # A switch has no firewall; each namespace has these of its own.
    "net/bridge/bridge-nf-call-iptables": "0",
    "net/bridge/bridge-nf-call-arptables": "0",
}


class Lab(Network):
    """``hosts`` machines on a switch, ``rate`` on every link in each direction: ``Lab(8, "1gbit")``.

    Each host is a network namespace with one interface ``eth0``; the switch is a bridge in a namespace
    of its own, so nothing touches this machine's network, and hosts reach each other alone. A token
    bucket at both ends of each cable holds the rate (``rate=None``: as fast as the machine can). There is
    no latency but the machine's own. Needs root: ``missing()`` says what is lacking.

    Everything is removed at the end of the ``with`` block, however it ends; after ``kill -9`` by ``clean``.
    """

    interface = "eth0"

    def __init__(self, hosts: int, rate: str | None = None) -> None:
        super().__init__(hosts)
        self.rate = None if rate is None else parse_rate(rate)
        self.shape = None if self.rate is None else Shape.of(self.rate)
        self._mark = secrets.token_hex(4)
        self._begun = False

    @property
    def prefix(self) -> str:
        """How the names of all its namespaces begin."""
        return f"cddp-{self._mark}"

    def namespace(self, host: int) -> str:
        return f"{self.prefix}-h{host}"

    @property
    def switch(self) -> str:
        """The namespace of the bridge, with a port for each host: ``port0``, ``port1`` ..."""
        return f"{self.prefix}-sw"

    def address(self, host: int) -> str:
        # Labs never meet; the subnet only tells their logs apart.
        return f"10.{int(self._mark[:2], 16)}.{int(self._mark[2:4], 16)}.{host + 1}"

    def port(self) -> int:
        return 29500  # nobody else is there

    def describe(self) -> str:
        speed = "without shaping" if self.rate is None else f"{rate_text(self.rate)} a link and direction"
        return f"{self.hosts} hosts ({self.prefix}), {speed}"

    def counters(self) -> list[Counters]:
        """What passed each host's interface so far.

        The interfaces are read at the switch, all at once: what a port received its host has sent.
        """
        shapers = [(["tc", "-n", self.namespace(host), *_STATISTICS], ()) for host in range(self.hosts)]
        links, ports, *hosts = call_all(
            [
                (["ip", "-n", self.switch, "-s", "-j", "link", "show"], ()),
                (["tc", "-n", self.switch, *_STATISTICS], ()),
                *shapers,
            ]
        )
        interfaces = {link["ifname"]: link["stats64"] for link in json.loads(links)}
        down = _shaped(ports)
        result = []
        for host, output in enumerate(hosts):
            port, up = interfaces[f"port{host}"], _shaped(output)["eth0"]
            result.append(
                Counters(
                    tx_bytes=port["rx"]["bytes"],
                    tx_packets=port["rx"]["packets"],
                    rx_bytes=port["tx"]["bytes"],
                    rx_packets=port["tx"]["packets"],
                    tx_wire_bytes=up["bytes"],
                    tx_frames=up["packets"],
                    rx_wire_bytes=down[f"port{host}"]["bytes"],
                    rx_frames=down[f"port{host}"]["packets"],
                )
            )
        return result

    def cut(self, host: int) -> None:
        """Pull the cable of a host out of the switch. Connections are not told: they fall silent."""
        call(["ip", "-n", self.switch, "link", "set", f"port{host}", "down"])

    def _enter_host(self, host: int) -> list[str]:
        return [tool("ip"), "netns", "exec", self.namespace(host)]

    def _build(self) -> None:
        lacking = missing()
        if lacking:
            raise LabError(f"no lab here: {lacking}")
        self._begun = True
        records.record(self.prefix)
        hosts = [self.namespace(host) for host in range(self.hosts)]
        everywhere = [self.switch, *hosts]
        call(["ip", "-batch", "-"], [f"netns add {name}" for name in everywhere])
        settings = "; ".join(f"echo {value} > /proc/sys/{name}" for name, value in SYSCTLS.items())
        # What this kernel does not have it does not do either; so failures are no matter.
        script = f"{{ {settings}; }} 2>/dev/null; true"
        call_all([(["ip", "netns", "exec", name, "sh", "-c", script], ()) for name in everywhere])
        call(["ip", "-n", self.switch, "-batch", "-"], self._switch_lines())
        call_all(
            [(["ip", "-n", name, "-batch", "-"], self._host_lines(host)) for host, name in enumerate(hosts)]
        )
        # Without a rate a queue that never fills: only for its counters.
        queue = "root bfifo limit 64000000" if self.shape is None else self.shape.qdisc()
        ends = [[f"port{host}" for host in range(self.hosts)], *(["eth0"] for _ in hosts)]
        call_all(
            [
                (["tc", "-n", name, "-batch", "-"], [f"qdisc add dev {link} {queue}" for link in links])
                for name, links in zip(everywhere, ends, strict=True)
            ]
        )

    def _switch_lines(self) -> list[str]:
        """For ``ip``: the bridge, and a cable to each host."""
        lines = ["link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0", "link set br0 up"]
        for host in range(self.hosts):
            port = f"port{host}"
            lines.append(f"link add {port} type veth peer name eth0 netns {self.namespace(host)}")
            lines.append(f"link set {port} master br0{self._gso()} up")
        return lines

    def _host_lines(self, host: int) -> list[str]:
        return [
            "link set lo up",
            f"link set eth0{self._gso()} up",
            f"address add {self.address(host)}/24 dev eth0",
        ]

    def _gso(self) -> str:
        return "" if self.shape is None else f" gso_max_size {self.shape.gso}"

    def _remove(self) -> None:
        if self._begun:  # else it was refused, and whoever may not build may not look for leftovers either
            records.remove(self.prefix)


_STATISTICS = ("-s", "-j", "qdisc", "show")


def _shaped(output: str) -> dict[str, Any]:
    """What ``tc`` says of the outermost queue of each interface."""
    return {queue["dev"]: queue for queue in json.loads(output) if queue.get("root")}
