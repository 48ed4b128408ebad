"""The real agent, except that at the K-th durable or outward step it is killed, or the disk is full."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from agents.node import __main__ as program
from agents.node.tasks.network_pool import NetworkPool
from agents.node.tasks.task_manager import TaskManager

PYZ, AT, VERB = os.environ["CRASH_PYZ"], int(os.environ["CRASH_AT"]), os.environ["CRASH_VERB"]
FULL = os.environ.get("CRASH_KIND") == "disk_full_message"
steps = 0
armed = False


def step(writes: bool) -> None:
    """Counts, and dies when it is time; or from then on no step that writes succeeds."""
    global steps
    if armed:
        steps += 1
        if FULL and steps >= AT and writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if steps == AT and not FULL:
            os.kill(os.getpid(), signal.SIGKILL)


def wrap(place: Any, name: str) -> None:
    """Makes a function a step before and a step after."""
    plain = getattr(place, name)

    def stepping(*words: Any, **how: Any) -> Any:
        step(place is os)
        answer = plain(*words, **how)
        step(False)
        return answer

    setattr(place, name, stepping)


def arm(owner: type, name: str) -> None:
    plain = getattr(owner, name)

    def armed_verb(self: Any, *words: Any) -> Any:
        global armed
        armed = True
        try:
            return plain(self, *words)
        finally:
            armed = False

    setattr(owner, name, armed_verb)


for place, name in ((os, "replace"), (os, "fsync"), (os, "mkdir"), (subprocess, "run")):
    wrap(place, name)
arm(NetworkPool if VERB == "refill" else TaskManager, VERB)
sys.argv[0] = PYZ
sys.exit(program.main())
