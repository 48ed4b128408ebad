"""Runs the benchmarks of the portal: submission to RUNNING, gateway, fan-out, web, submissions, pages and lists.

    DATABASE_URL=... REDIS_URL=... python -m bench suite_portal [PART ...]

Each part is a process with a time limit; a part that fails or cannot run reports it in its line, and the
others continue. All together take less than nine minutes.
"""

from __future__ import annotations

from bench.runner import run_suite

PARTS: dict[str, tuple[list[str], float]] = {
    "start": (["start", "--jobs", "30", "--within", "155"], 165),
    "gateway": (["gateway", "--seconds", "1", "--rounds", "2"], 95),
    "fanout": (["fanout", "--seconds", "20"], 60),
    "web": (["web"], 45),
    "submissions": (["submissions", "--jobs", "100", "--crowd", "100"], 60),
    "html_pages": (["html_pages", "--lists", "--rounds", "20"], 115),
}
"""Arguments and time limit in seconds. ``html_pages`` also measures the lists on the same database."""


def main(arguments: list[str]) -> int:
    """Run the named parts, or all; return 1 when a part did not finish."""
    return run_suite("suite_portal", PARTS, arguments, limit_s=540)
