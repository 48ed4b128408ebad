"""Runs the benchmarks of scheduling decisions; only ``cycle``, ``forecast`` and ``noisy_node`` need a database.

    DATABASE_URL=... REDIS_URL=... python -m bench suite_scheduler [PART ...]

Each part is a process with a time limit, as in ``bench suite_portal``.
"""

from __future__ import annotations

from bench.runner import run_suite

PARTS: dict[str, tuple[list[str], float]] = {
    "decide": (["decide"], 120),
    "kai_scenarios": (["kai_scenarios"], 120),
    "cycle": (["cycle"], 150),
    "forecast": (["forecast"], 150),
    "openb": (["openb"], 300),
    "planner": (["planner"], 60),
    "noisy_node": (["noisy_node", "--rounds", "2", "--seconds", "5"], 60),
}
"""Arguments and time limit in seconds."""


def main(arguments: list[str]) -> int:
    """Run the named parts, or all; return 1 when a part did not finish."""
    return run_suite("suite_scheduler", PARTS, arguments, limit_s=600)
