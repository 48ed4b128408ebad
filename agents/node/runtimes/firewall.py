"""What job networks may not reach: the node itself, other jobs, the metadata address, the control plane.

Rules are by address range, not by bridge name, so they stand before the first job network exists. They live
in two chains of our own; a restart or a second agent finds them and changes nothing.
"""

from __future__ import annotations

import subprocess
import threading
from typing import List, Sequence

from agents.node import refusals
from agents.node.durable import locked
from agents.node.refusals import Refusal
from agents.node.settings import Settings

METADATA = "169.254.0.0/16"
_WITHIN_S = 10.0


def chain_rules(subnets: str, egress_deny: Sequence[str]) -> List[List[str]]:
    """The rules for packets of job networks, pure: words after ``iptables -A CHAIN``."""
    refuse = ["-j", "REJECT", "--reject-with", "icmp-port-unreachable"]
    rules = [["-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "RETURN"]]
    for place in (METADATA, *egress_deny):
        rules.append(["-s", subnets, "-d", place, *refuse])
    # Between job networks packets are routed; within one they are bridged, and those pass.
    rules.append(["-s", subnets, "-d", subnets, "-m", "physdev", "!", "--physdev-is-bridged", *refuse])
    return rules


def input_rules(subnets: str) -> List[List[str]]:
    """The rules for packets of job networks to the node itself: answers only."""
    return [
        ["-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "RETURN"],
        ["-s", subnets, "-j", "REJECT", "--reject-with", "icmp-port-unreachable"],
    ]


class Firewall:
    """Puts the rules up before the first container of this agent process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._up = False
        self._lock = threading.Lock()

    def raise_once(self) -> None:
        """Makes sure that the rules stand; without them no container is started."""
        with self._lock:
            if self._up:
                return
            with locked(f"{self._settings.state_dir}/firewall.lock"):
                self._chain("FAIRWAY-FORWARD", "FORWARD", self._forward())
                self._chain("FAIRWAY-INPUT", "INPUT", input_rules(self._settings.subnets))
            self._up = True

    def _forward(self) -> List[List[str]]:
        return chain_rules(self._settings.subnets, self._settings.egress_deny)

    def _chain(self, chain: str, hook: str, rules: List[List[str]]) -> None:
        """A chain that other clusters of this node may share: rules are added when missing, never flushed."""
        if self._run("-n", "-L", chain) != 0:
            self._must("-N", chain)
        for rule in rules:
            if self._run("-C", chain, *rule) != 0:
                self._must("-A", chain, *rule)
        if self._run("-C", hook, "-j", chain) != 0:
            self._must("-I", hook, "1", "-j", chain)

    def _must(self, *words: str) -> None:
        if self._run(*words) != 0:
            raise Refusal(
                refusals.ENGINE_ERROR,
                f"The firewall rule 'iptables {' '.join(words)}' cannot be set, so no container is started.",
            )

    @staticmethod
    def _run(*words: str) -> int:
        try:
            return subprocess.run(
                ["iptables", "-w", "5", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_WITHIN_S,
                check=False,
            ).returncode
        except (OSError, subprocess.TimeoutExpired):
            return -1
