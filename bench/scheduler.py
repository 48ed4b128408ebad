"""The rows of the scheduler's decisions, one part after the other; only ``cycle`` and ``foresee`` need a database.

    DATABASE_URL=... REDIS_URL=... python -m bench scheduler [PART ...]

Each part is a process of its own with a limit on its time, as in ``bench spine``.
"""

from __future__ import annotations

from bench.parts import run_suite

PARTS: dict[str, tuple[list[str], float]] = {
    "decide": (["decide"], 120),
    "shapes": (["shapes"], 120),
    "cycle": (["cycle"], 150),
    "foresee": (["foresee"], 150),
    "openb": (["openb"], 300),
}
"""What to run and within how many seconds."""


def main(arguments: list[str]) -> int:
    """Runs the parts named, or all; 1 when a part did not finish."""
    return run_suite("scheduler", PARTS, arguments, limit_s=600)
