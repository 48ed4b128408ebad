"""Cases in which we differ on purpose, and why. The list is for the report only: they count as failed."""

from __future__ import annotations

DECLARED: dict[str, str] = {
    "integration_tests.reclaim.reclaim#007": (
        "we give back to a project below its guarantee; the case pins that KAI-Scheduler does not"
    ),
}
