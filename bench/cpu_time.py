"""CPU time of a running Fairway by process, user and system, including ended children that were waited for."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
_PROCESSES = {
    " control --settings": "agent",
    ".pyz shim": "shims",
    "worker-cycle@": "worker-cycle",
    "worker-nodes@": "worker-nodes",
    "worker-ask@": "worker-ask",
    "portal.asgi": "web",
    "portal.gateway": "gateway",
    "postgres": "postgresql",
    "valkey": "valkey",
    "redis": "valkey",
}
"""Names by part of the command line; anything else is ``other``."""


def cpu_ms(root: int) -> Counter[str]:
    """Return the CPU time in ms so far of a process (id) and its descendants, by name."""
    rows = {int(path.name): row for path in Path("/proc").glob("[0-9]*") if (row := _read(path))}
    found: Counter[str] = Counter()
    for pid, (_, name, ms) in rows.items():
        if _descends(pid, root, rows):
            found[name] += round(ms)
    return found


def _descends(pid: int, root: int, rows: dict[int, tuple[int, str, float]]) -> bool:
    while pid != root and pid in rows:
        pid = rows[pid][0]
    return pid == root


def _read(folder: Path) -> tuple[int, str, float] | None:
    """Return parent, name and CPU time of a process; None when it has ended."""
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        command = (folder / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return None
    name = next((name for part, name in _PROCESSES.items() if part in command), "other")
    return int(fields[1]), name, sum(map(int, fields[11:15])) * _TICK_MS
