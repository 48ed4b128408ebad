"""The real agent, except that it dies by SIGKILL at the K-th durable or outward step of a start or stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from agents.node import __main__ as program
from agents.node.tasks import Tasks

PYZ, AT, VERB = os.environ["CRASH_PYZ"], int(os.environ["CRASH_AT"]), os.environ["CRASH_VERB"]
steps = 0
armed = False


def step() -> None:
    """Counts, and dies when it is time."""
    global steps
    if armed:
        steps += 1
        if steps == AT:
            os.kill(os.getpid(), signal.SIGKILL)


def wrap(place: Any, name: str) -> None:
    """Makes a function a step before and a step after."""
    plain = getattr(place, name)

    def stepping(*words: Any, **how: Any) -> Any:
        step()
        answer = plain(*words, **how)
        step()
        return answer

    setattr(place, name, stepping)


def arm(name: str) -> None:
    plain = getattr(Tasks, name)

    def armed_verb(self: Tasks, fields: dict[str, Any]) -> Any:
        global armed
        armed = True
        try:
            return plain(self, fields)
        finally:
            armed = False

    setattr(Tasks, name, armed_verb)


for place, name in ((os, "replace"), (os, "fsync"), (os, "mkdir"), (subprocess, "run")):
    wrap(place, name)
arm(VERB)
sys.argv[0] = PYZ
sys.exit(program.main())
