"""What job networks may not reach: the node itself, other jobs, the metadata address, the control plane.

Rules are by address range, not by bridge name, so they stand before the first job network exists. They live
in two chains of this cluster's own, each replaced in one step whenever an agent first starts a container.
They stand in the table mangle, which packets meet before the table filter: there the engine puts its own
rules first, at a time of its choosing, and they accept what a container sends.
"""

from __future__ import annotations

import subprocess
import threading
import zlib
from typing import List, Sequence, Tuple

from agents.node import refusals
from agents.node.durable import locked
from agents.node.refusals import Refusal
from agents.node.settings import Settings

METADATA = "169.254.0.0/16"
_WITHIN_S = 10.0
_ANSWERS = "-m conntrack --ctstate ESTABLISHED,RELATED -j RETURN"


def chains(cluster: str) -> Tuple[str, str]:
    """The names of the two chains: for routed packets, and for packets to the node itself."""
    mark = format(zlib.crc32(cluster.encode()), "08x")
    return f"FAIRWAY-FORWARD-{mark}", f"FAIRWAY-INPUT-{mark}"


def rules(cluster: str, subnets: str, egress_deny: Sequence[str]) -> str:
    """The text for ``iptables-restore --noflush``, pure: replaces both chains and touches nothing else."""
    forward, to_node = chains(cluster)
    lines = ["*mangle", f":{forward} - [0:0]", f":{to_node} - [0:0]"]
    lines.append(f"-A {forward} {_ANSWERS}")
    for place in (METADATA, *egress_deny):
        if ":" not in place:
            lines.append(f"-A {forward} -s {subnets} -d {place} -j DROP")
    # Between job networks packets are routed; within one they are bridged, and those pass.
    lines.append(f"-A {forward} -s {subnets} -d {subnets} -m physdev ! --physdev-is-bridged -j DROP")
    lines.append(f"-A {to_node} {_ANSWERS}")
    lines.append(f"-A {to_node} -s {subnets} -j DROP")
    return "\n".join([*lines, "COMMIT", ""])


class Firewall:
    """Puts the rules up before the first container of this agent process; without them none is started."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._up = False
        self._lock = threading.Lock()

    def raise_once(self) -> None:
        with self._lock:
            if self._up:
                return
            cluster = self._settings.cluster
            with locked(f"{self._settings.state_dir}/firewall.lock"):
                text = rules(cluster, self._settings.subnets, self._settings.egress_deny)
                self._must(["iptables-restore", "--wait", "5", "--noflush"], text)
                for hook, chain in zip(("FORWARD", "INPUT"), chains(cluster)):
                    if self._run(["iptables", "-w", "5", "-t", "mangle", "-C", hook, "-j", chain])[0] != 0:
                        self._must(["iptables", "-w", "5", "-t", "mangle", "-I", hook, "1", "-j", chain])
            self._up = True

    def _must(self, command: List[str], text: str = "") -> None:
        code, said = self._run(command, text)
        if code != 0:
            raise Refusal(
                refusals.ENGINE_ERROR,
                f"The firewall of the node cannot be set, so no container is started: {said}",
            )

    @staticmethod
    def _run(command: List[str], text: str = "") -> Tuple[int, str]:
        try:
            answer = subprocess.run(
                command,
                input=text.encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_WITHIN_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return -1, str(error)
        return answer.returncode, answer.stderr.decode(errors="replace").strip()[-300:]
