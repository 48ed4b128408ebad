"""Waits for a server that is starting."""

from __future__ import annotations

import time
from collections.abc import Callable

from portal.standalone.errors import StartError

POLL_INTERVAL_S = 0.02


def wait_until_ready(
    name: str,
    attempt: Callable[[], object],
    failure: type[Exception],
    is_running: Callable[[], bool],
    timeout_s: float,
) -> None:
    """Return when ``attempt`` no longer raises ``failure``. Raise StartError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            attempt()
            return
        except failure as trouble:
            if not is_running():
                raise StartError(f"{name} stopped while starting; see its log lines above.") from trouble
            if time.monotonic() > deadline:
                raise StartError(f"{name} did not respond within {timeout_s:.0f} s: {trouble}") from trouble
        time.sleep(POLL_INTERVAL_S)
