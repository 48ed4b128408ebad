"""Answers the portal's questions about layer profiles and pipeline plans, and stores the profiles that jobs measured.

Nothing of them is in the snapshot.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from portal.domain.jobs.layer_profiles import ProfileTextError
from portal.services.jobs.pipeline_plans import measured_profile, record_profile_run, unhandled_profile_runs
from scheduler.planner.comparison import compare_plans
from scheduler.planner.partition import BandwidthLevel, PlanError
from scheduler.planner.profile import ProfileError, read_profile

KINDS = frozenset({"profile", "plan"})
MAX_STEPS = 300_000_000
"""Combinations that are examined while a user waits."""


def answer_plan_query(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the layers of a profile, or its plans; ``{"error", "invalid"}`` where that is impossible.

    ``invalid`` is ``profile`` if the profile itself is wrong, else ``topology``.
    """
    try:
        profile = read_profile(body["profile"])
        if kind == "profile":
            return {
                "model": profile.model,
                "batch_size": profile.batch_size,
                "layers": [asdict(layer) for layer in profile.layers],
            }
        levels = [BandwidthLevel(int(machines), float(bandwidth)) for machines, bandwidth in body["levels"]]
        return compare_plans(profile, levels, memory_bytes=body["memory_bytes"], max_steps=MAX_STEPS)
    except ProfileError as error:
        return {"error": str(error), "invalid": "profile"}
    except PlanError as error:
        return {"error": str(error), "invalid": "topology"}


def store_measured_profiles() -> None:
    """Read the result of each profile job that ended since the last pass. Repeatable."""
    for run in unhandled_profile_runs():
        content, reason = None, ""
        try:
            content = measured_profile(run)
        except ProfileTextError as error:
            reason = f" that can be used: {error}"
        if content is None:
            answer = {"error": f"The job is {run.job.state} and its log has no profile{reason or '.'}"}
        else:
            answer = answer_plan_query("profile", {"profile": content})
        record_profile_run(run, content, answer)
