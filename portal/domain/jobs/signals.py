"""Signals that users may send to running jobs. KILL and STOP are excluded; users stop a job instead."""

from __future__ import annotations

SIGNALS: dict[str, str] = {
    "SIGUSR1": "often: save a checkpoint",
    "SIGUSR2": "defined by the program",
    "SIGINT": "as Ctrl+C",
    "SIGHUP": "often: reload the configuration",
    "SIGTERM": "requests termination, without a deadline",
}
"""Name, and its usual meaning to programs."""

SIGNAL_TTL_S = 30.0
"""A signal that could not be sent within this time is dropped."""
