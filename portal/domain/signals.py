"""Signals that people may send to running jobs. KILL and STOP are not among them: that is what *Stop* is for."""

from __future__ import annotations

SIGNALS: dict[str, str] = {
    "SIGUSR1": "often: save a checkpoint",
    "SIGUSR2": "the program's own meaning",
    "SIGINT": "as Ctrl+C",
    "SIGHUP": "often: read the configuration again",
    "SIGTERM": "asks it to end, without a deadline",
}
"""Name, and what programs usually make of it."""

SIGNAL_TTL_S = 30.0
"""One that could not be sent by then is dropped: what it was meant for is over."""
