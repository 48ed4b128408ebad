"""What job networks may not reach: nodes, other jobs, the portal, metadata, and what a project's policy leaves out.

Rules are by address range, not by bridge name, so they stand before the first job network exists. They live
in two chains of this cluster's own, each replaced in one step whenever what they say has changed.
They stand in the table mangle, which packets meet before the table filter: there the engine puts its own
rules first, at a time of its choosing, and they accept what a container sends.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
import zlib
from typing import List, Sequence, Tuple

from agents.node import egress, refusals
from agents.node.durable import locked, write_whole
from agents.node.egress import METADATA, OPEN, Egress
from agents.node.ledger import HOLDING, Ledger
from agents.node.machine import read_text
from agents.node.refusals import Refusal
from agents.node.settings import Settings

_WITHIN_S = 10.0
_ANSWERS = "-m conntrack --ctstate ESTABLISHED,RELATED --ctdir REPLY -j RETURN"
"""Answers to who connected to a container. What a container began itself meets the rules with each packet, so that
an address which is denied later is cut off from connections that stand."""
Job = Tuple[str, Egress]
"""The network of a job, and its policy."""


def chains(cluster: str) -> Tuple[str, str]:
    """The names of the two chains: for routed packets, and for packets to the node itself."""
    mark = format(zlib.crc32(cluster.encode()), "08x")
    return f"FAIRWAY-FORWARD-{mark}", f"FAIRWAY-INPUT-{mark}"


def rules(
    cluster: str, subnets: str, deny: Sequence[str], jobs: Sequence[Job] = (), nameservers: Sequence[str] = ()
) -> str:
    """The text for ``iptables-restore --noflush``, pure: replaces both chains and touches nothing else.

    ``jobs`` are those whose policy is not open. Containers have no IPv6, so addresses of it need no rule.
    """
    forward, to_node = chains(cluster)
    lines = ["*mangle", f":{forward} - [0:0]", f":{to_node} - [0:0]"]
    lines += [f"-A {forward} {_ANSWERS}", f"-A {forward} ! -s {subnets} -j RETURN"]
    for place in dict.fromkeys((*METADATA, *deny)):
        if ":" not in place:
            lines.append(f"-A {forward} -d {place} -j DROP")
    # Between job networks packets are routed; within one they are bridged, and those pass.
    lines.append(f"-A {forward} -d {subnets} -m physdev ! --physdev-is-bridged -j DROP")
    for subnet, policy in jobs:
        lines.append(f"-A {forward} -s {subnet} -d {subnet} -j RETURN")
        for target in egress.targets(policy, nameservers):
            ports = (
                f" -p {target.protocol} --dport {target.first_port}:{target.last_port}"
                if target.protocol
                else ""
            )
            lines.append(f"-A {forward} -s {subnet} -d {target.network}{ports} -j RETURN")
        lines.append(f"-A {forward} -s {subnet} -j DROP")
    lines.append(f"-A {to_node} {_ANSWERS}")
    lines.append(f"-A {to_node} -s {subnets} -j DROP")
    return "\n".join([*lines, "COMMIT", ""])


class Firewall:
    """Keeps the rules as ledger and portal say; without them no container is started."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ledger = Ledger(settings.state_dir)
        self._applied = os.path.join(settings.state_dir, "firewall.applied")
        self._up = False
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Sets the rules anew where they are not what they should be, and once in each agent process anyway."""
        settings = self._settings
        with self._lock, locked(f"{settings.state_dir}/firewall.lock"):
            deny = [*settings.egress_deny, *egress.denied(settings.state_dir)]
            text = rules(settings.cluster, settings.subnets, deny, self._jobs(), egress.nameservers())
            digest = hashlib.sha256(text.encode()).hexdigest()
            if self._up and read_text(self._applied) == digest:
                return
            self._must(["iptables-restore", "--wait", "5", "--noflush"], text)
            for hook, chain in zip(("FORWARD", "INPUT"), chains(settings.cluster)):
                if self._run(["iptables", "-w", "5", "-t", "mangle", "-C", hook, "-j", chain])[0] != 0:
                    self._must(["iptables", "-w", "5", "-t", "mangle", "-I", hook, "1", "-j", chain])
            write_whole(self._applied, digest.encode(), sync=False)
            self._up = True

    def _jobs(self) -> List[Job]:
        """The networks of live tasks whose policy is not open, each once."""
        found = {
            record["subnet"]: egress.parse_egress(record["egress"])
            for record in self._ledger.tasks().values()
            if record["phase"] in HOLDING and record["subnet"] and record.get("egress")
        }
        return [(subnet, policy) for subnet, policy in sorted(found.items()) if policy.mode != OPEN]

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
