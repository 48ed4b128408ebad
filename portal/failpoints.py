"""Named points at which a test can kill or stop this process, to check that nothing is lost or duplicated.

Without ``FAIRWAY_KILL_AT`` or ``FAIRWAY_STOP_AT`` in the environment they do nothing.
"""

from __future__ import annotations

import os
import signal
import threading


def failpoint(name: str) -> None:
    """Kill the process with SIGKILL, or stop it with SIGSTOP, if this failpoint is selected."""
    if name == os.environ.get("FAIRWAY_KILL_AT"):
        os.kill(os.getpid(), signal.SIGKILL)
    if name == os.environ.get("FAIRWAY_STOP_AT"):
        del os.environ["FAIRWAY_STOP_AT"]  # once: execution continues after SIGCONT
        # Signal this thread: a signal to the process could be taken by another thread while this one
        # continues.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
