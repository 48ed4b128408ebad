"""Named points at which a test may kill or stop this process, to see that nothing is lost or doubled.

Without ``FAIRWAY_KILL_AT`` or ``FAIRWAY_STOP_AT`` in the environment they do nothing.
"""

from __future__ import annotations

import os
import signal
import threading


def failpoint(name: str) -> None:
    """Ends the process as ``kill -9`` would, or stops it, when this is the point for that."""
    if name == os.environ.get("FAIRWAY_KILL_AT"):
        os.kill(os.getpid(), signal.SIGKILL)
    if name == os.environ.get("FAIRWAY_STOP_AT"):
        del os.environ["FAIRWAY_STOP_AT"]  # once: it goes on when somebody sends SIGCONT
        # To this thread: another may take a signal to the process, and this one would go on for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
