"""The wires between this machine and its rig nodes: one bridge a run, one veth pair a node."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

FIRST_NODE_ADDRESS = 11


def ip(*arguments: str) -> None:
    """Runs iproute2 and raises with its own words when it refuses."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def free_subnet() -> str:
    """Gives the first three parts of a /24 that no interface of this machine uses."""
    shown = subprocess.run(
        ["ip", "-j", "addr"], capture_output=True, text=True, check=True, timeout=10
    ).stdout
    used = {
        address["local"].rsplit(".", 1)[0]
        for link in json.loads(shown)
        for address in link.get("addr_info", [])
        if address.get("family") == "inet"
    }
    for third in range(1, 255):
        if f"10.203.{third}" not in used:
            return f"10.203.{third}"
    raise RuntimeError(
        "every subnet of 10.203.0.0/16 is in use; take old runs down: python -m tests.rig down"
    )


def make_bridge(name: str, subnet: str) -> None:
    """Makes the run's bridge; this machine, the portal's place, is .1 on it."""
    ip("link", "add", name, "type", "bridge")
    ip("addr", "add", f"{subnet}.1/24", "dev", name)
    ip("link", "set", name, "up")
    # Frames between nodes are switched, not routed: a firewall of this machine has no say in them.
    setting = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if setting.exists() and setting.read_text().strip() == "1":
        local = Path(f"/sys/class/net/{name}/bridge/nf_call_iptables")
        local.write_text("0")


def make_veth(netns: str, veth: str, bridge: str, address: str, gateway: str) -> None:
    """Makes a node's network namespace and plugs it into the bridge."""
    ip("netns", "add", netns)
    ip("link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", netns)
    ip("link", "set", veth, "master", bridge, "up")
    ip("-n", netns, "addr", "add", f"{address}/24", "dev", "eth0")
    ip("-n", netns, "link", "set", "eth0", "up")
    ip("-n", netns, "link", "set", "lo", "up")
    ip("-n", netns, "route", "add", "default", "via", gateway)
    # a real machine keeps its network card over a restart; here the new one has another hardware address
    ip("neigh", "flush", "to", address, "dev", bridge)
