"""The rows of the spine: submit to RUNNING, gateway, fan-out, web, pages and lists, one after the other.

    DATABASE_URL=... REDIS_URL=... python -m bench suite_portal [PART ...]

Each part is a process of its own with a limit on its time; a part that fails or cannot run says so in its line
and the others go on. All together take less than eight minutes.
"""

from __future__ import annotations

from bench.runner import run_suite

PARTS: dict[str, tuple[list[str], float]] = {
    "start": (["start", "--jobs", "30", "--within", "155"], 165),
    "gateway": (["gateway", "--seconds", "1", "--rounds", "2"], 95),
    "fanout": (["fanout", "--seconds", "20"], 60),
    "web": (["web"], 45),
    "html_pages": (["html_pages", "--lists", "--rounds", "20"], 115),
}
"""What to run and within how many seconds. ``pages`` measures the lists on the same record."""


def main(arguments: list[str]) -> int:
    """Runs the parts named, or all; 1 when a part did not finish."""
    return run_suite("suite_portal", PARTS, arguments, limit_s=480)
