"""A process that no signal ends until it is let go, as one that waits in the kernel for a broken driver."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

FREEZER = Path("/sys/fs/cgroup/freezer")


def missing_freezer() -> str | None:
    """Why no process can be made unkillable here; None where it can."""
    return (
        None if os.geteuid() == 0 and FREEZER.is_dir() else "needs root and the freezer of cgroup version 1"
    )


@contextlib.contextmanager
def unkillable(*pids: int) -> Iterator[None]:
    """Inside the block these processes stay whatever they are sent; afterwards it reaches them."""
    group = FREEZER / f"fairway-test-{secrets.token_hex(4)}"
    group.mkdir()
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        _become(group, "FROZEN")
        yield
    finally:
        _become(group, "THAWED")
        for pid in pids:
            with contextlib.suppress(OSError):
                (FREEZER / "cgroup.procs").write_text(str(pid))
        deadline_s = time.monotonic() + 10
        while (group / "cgroup.procs").read_text().strip() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        group.rmdir()


def _become(group: Path, state: str) -> None:
    (group / "freezer.state").write_text(state)
    deadline_s = time.monotonic() + 10
    while (group / "freezer.state").read_text().strip() != state and time.monotonic() < deadline_s:
        time.sleep(0.01)
