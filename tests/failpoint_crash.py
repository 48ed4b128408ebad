"""A child process that is killed at a named point, as a test asks."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

from django.db import connections


def crashes_at(point: str, action: Callable[[], object]) -> bool:
    """Runs ``act`` in a child that is to be killed at a point; True when it was."""
    connections.close_all()
    child = os.fork()
    if child == 0:
        os.environ["FAIRWAY_KILL_AT"] = point
        try:
            action()
        except BaseException:
            traceback.print_exc()
        os._exit(7)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
