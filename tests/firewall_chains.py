"""Removes chains of the packet filter that agents of a test leave behind."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence


def drop_chains(program: str, chains: Sequence[str]) -> None:
    def iptables(*words: str) -> str:
        command = [program, "-w", "5", "-t", "mangle", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout

    for rule in iptables("-S").splitlines():
        if rule.endswith(tuple(f"-j {chain}" for chain in chains)):
            iptables("-D", *rule.split()[1:])
    for chain in chains:
        iptables("-F", chain)
        iptables("-X", chain)
