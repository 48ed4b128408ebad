"""Packet filter between accounts of plain processes: a port that one account listens on is closed to the others.

Plain processes share the network of their node, so a task could connect to the workspace, the kernels and the
services of other users. The rules mark a connection with the account that opens it, and drop the answer of a
listener of another account. They need no list of ports. Accounts that belong to no task, such as those of the
gateway and its tunnel, are not marked. Both tables are replaced atomically when the accounts change.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
import zlib
from typing import List, Sequence

from agents.node.host.atomic_files import file_lock
from agents.node.ledger.ledger import LIVE_PHASES, Ledger
from agents.node.settings import Settings

_TIMEOUT_S = 10.0
_IPV6_INTERFACES = "/proc/net/if_inet6"


def chain_name(cluster: str) -> str:
    return f"FAIRWAY-LOOPBACK-{format(zlib.crc32(cluster.encode()), '08x')}"


def build_rules(cluster: str, accounts: Sequence[int]) -> str:
    """Return the input of ``iptables-restore --noflush``, which replaces only the chain of this cluster. Pure."""
    chain = chain_name(cluster)
    answers = "--tcp-flags SYN,ACK SYN,ACK"
    lines = ["*mangle", f":{chain} - [0:0]"]
    for uid in accounts:
        lines.append(f"-A {chain} -p tcp --syn -m owner --uid-owner {uid} -j CONNMARK --set-mark {uid}")
    for uid in accounts:
        answer = f"-A {chain} -p tcp {answers} -m owner --uid-owner {uid} -m connmark"
        lines += [f"{answer} --mark {uid} -j RETURN", f"{answer} ! --mark 0 -j DROP"]
    return "\n".join([*lines, "COMMIT", ""])


class LoopbackRules:
    """Keeps the rules in line with the accounts of the ledger."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ledger = Ledger(settings.state_dir)
        self._lock = threading.Lock()

    def refresh(self) -> str:
        """Apply the rules if they changed; return blank, or why they are not in force."""
        if os.geteuid() != 0:
            return "Without root all tasks of this node run under one account."
        if not self._settings.firewall:
            return "The settings of this node disable its network rules."
        programs = ["iptables"]
        if os.path.exists(_IPV6_INTERFACES):
            programs.append("ip6tables")
        try:
            with self._lock, file_lock(f"{self._settings.state_dir}/loopback_rules.lock"):
                text = build_rules(self._settings.cluster, self._accounts())
                for program in programs:
                    self._apply(program, text)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None)
            detail = said.decode(errors="replace").strip()[-300:] if said else str(error)
            return f"The rules that close ports of tasks cannot be set: {detail}"
        return ""

    def _accounts(self) -> List[int]:
        live = (record for record in self._ledger.tasks().values() if record["phase"] in LIVE_PHASES)
        return sorted({int(each["task_uid"]) for each in live if each.get("task_uid") is not None})

    def _apply(self, program: str, text: str) -> None:
        chain = chain_name(self._settings.cluster)
        # the digest is a comment of the jump rule, so rules that somebody removed are detected
        digest = hashlib.sha256(text.encode()).hexdigest()
        jump = f"OUTPUT -o lo -p tcp -m comment --comment {digest} -j {chain}"
        listed = _run([program, "-w", "5", "-t", "mangle", "-S"]).splitlines()
        in_force = [line for line in listed if line.startswith("-A OUTPUT ") and line.endswith(f"-j {chain}")]
        count = sum(line.startswith(f"-A {chain} ") for line in listed)
        if in_force == [f"-A {jump}"] and count == text.count(f"-A {chain} "):
            return
        changes = [*(f"-D{line[2:]}" for line in in_force), f"-I {jump}"]
        _run(
            [f"{program}-restore", "--wait", "5", "--noflush"],
            text.replace("COMMIT\n", "\n".join([*changes, "COMMIT", ""])),
        )


def _run(command: List[str], text: str = "") -> str:
    answer = subprocess.run(command, input=text.encode(), capture_output=True, timeout=_TIMEOUT_S, check=True)
    return answer.stdout.decode(errors="replace")
