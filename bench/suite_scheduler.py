"""The rows of the scheduler's decisions, one part after the other; only ``cycle`` and ``forecast`` need a database.

    DATABASE_URL=... REDIS_URL=... python -m bench suite_scheduler [PART ...]

Each part is a process of its own with a limit on its time, as in ``bench suite_portal``.
"""

from __future__ import annotations

from bench.runner import run_suite

PARTS: dict[str, tuple[list[str], float]] = {
    "decide": (["decide"], 120),
    "kai_scenarios": (["kai_scenarios"], 120),
    "cycle": (["cycle"], 150),
    "forecast": (["forecast"], 150),
    "openb": (["openb"], 300),
}
"""What to run and within how many seconds."""


def main(arguments: list[str]) -> int:
    """Runs the parts named, or all; 1 when a part did not finish."""
    return run_suite("suite_scheduler", PARTS, arguments, limit_s=600)
