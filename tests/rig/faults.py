"""What can go wrong with a rig node, each acted for real: cut wires, dead connections, full disks."""

from __future__ import annotations

import abc
import subprocess
from collections.abc import Mapping

CHAIN = "RIG-FAULT"
_GANGS = ("-i", "eth0", "-p", "tcp", "--dport", "32000:32700")


class NodeFaults(abc.ABC):
    """The faults of one node; `heal` undoes those of the network."""

    port: int

    @abc.abstractmethod
    def execute(
        self,
        *command: str,
        text_in: str | None = None,
        check: bool = True,
        timeout_s: float = 60,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command inside the node."""

    def cut(self) -> None:
        """Drops every packet in both directions, silently, as a dead switch does."""
        self._prepare_chain()
        self._rule("-j", "DROP")

    def half_open(self) -> None:
        """Kills the SSH connections that exist now without telling anyone; new ones work."""
        self._prepare_chain()
        shown = self.execute("ss", "-Htn", "state", "established", "sport", "=", f":{self.port}").stdout
        for line in shown.splitlines():
            peer_address, peer_port = line.split()[-1].rsplit(":", 1)
            self._rule("-p", "tcp", "-s", peer_address, "--sport", peer_port, "-j", "DROP")
            self._rule("-p", "tcp", "-d", peer_address, "--dport", peer_port, "-j", "DROP")

    def lose(self, percent: float) -> None:
        """Loses that share of the packets at random, in both directions."""
        self._prepare_chain()
        self._rule(
            "-m", "statistic", "--mode", "random", "--probability", f"{percent / 100:.4f}", "-j", "DROP"
        )

    def refuse_ssh(self) -> None:
        """Answers new connections to sshd with a reset, as a host without sshd does."""
        self._prepare_chain()
        self._iptables("-I", "INPUT", "-p", "tcp", "--dport", str(self.port), "--syn", "-j", "REJECT")

    def close_gang_ports(self, how: str) -> None:
        """Lets nobody in at the ports where gangs meet: DROP is silent, REJECT says so."""
        self.heal()
        self._iptables("-I", "INPUT", *_GANGS, "-j", how)

    def heal(self) -> None:
        """Ends every network fault of this node."""
        self._iptables("-t", "raw", "-F", CHAIN, check=False)
        for how in ("DROP", "REJECT"):
            self._iptables("-D", "INPUT", *_GANGS, "-j", how, check=False)
        rule = ("INPUT", "-p", "tcp", "--dport", str(self.port), "--syn", "-j", "REJECT")
        while self._iptables("-D", *rule, check=False).returncode == 0:
            pass

    def fill_disk(self) -> None:
        """Fills the disk that holds the agent's state to the last byte."""
        self.execute("sh", "-c", "cat /dev/zero > /var/lib/fairway-node/.filler", check=False)

    def free_disk(self) -> None:
        """Gives the space back that `fill_disk` took."""
        self.execute("rm", "-f", "/var/lib/fairway-node/.filler")

    def _prepare_chain(self) -> None:
        if self._iptables("-t", "raw", "-N", CHAIN, check=False).returncode == 0:
            self._iptables("-t", "raw", "-I", "PREROUTING", "-i", "eth0", "-j", CHAIN)
            self._iptables("-t", "raw", "-I", "OUTPUT", "-o", "eth0", "-j", CHAIN)

    def _rule(self, *match: str) -> None:
        self._iptables("-t", "raw", "-A", CHAIN, *match)

    def _iptables(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.execute("iptables", "-w", "5", *arguments, check=check)
