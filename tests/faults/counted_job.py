"""A job that leaves a line in its owner's home each time it starts, so that starts can be counted."""

from __future__ import annotations

from typing import Any

from portal.models import Job
from tests import factories


def submit(dataset: dict[str, Any], seconds: float = 0.2) -> Job:
    """Submits one that then sleeps for some seconds."""
    script = f'echo "$FAIRWAY_JOB $FAIRWAY_ATTEMPT" >> "$HOME/starts"; sleep {seconds}'
    return factories.job(
        dataset["owner"],
        dataset["project"],
        dataset["environment"],
        command=["sh", "-c", script],
        cpu_milli=100,
        memory_mib=64,
        termination_grace_s=1,
    )
