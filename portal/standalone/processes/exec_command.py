"""Builds the argument list that starts a child through `exec_child.py`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

EXEC_SCRIPT = Path(__file__).with_name("exec_child.py")


def exec_command(
    command: Sequence[str],
    *,
    account: str | None = None,
    niceness: int = 0,
    death_signal: signal.Signals = signal.SIGTERM,
) -> list[str]:
    """Return the command of a child of this process (main thread); it gets `death_signal` when we die."""
    options = ["--parent", str(os.getpid()), "--death-signal", str(int(death_signal))]
    if account is not None:
        options += ["--account", account]
    if niceness:
        options += ["--nice", str(niceness)]
    return [sys.executable, "-S", "-E", str(EXEC_SCRIPT), *options, "--", *command]
