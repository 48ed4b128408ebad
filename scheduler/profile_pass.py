"""Stores the layer profiles that jobs have measured, when they have completed."""

from __future__ import annotations

from portal.services.jobs.pipeline_plans import measured_profile, record_profile_run, unhandled_profile_runs
from scheduler.plan_query import answer_plan_query


def store_measured_profiles() -> None:
    """Read the result of each profile job that ended since the last pass. Repeatable."""
    for run in unhandled_profile_runs():
        content = measured_profile(run)
        if content is None:
            answer = {"error": f"The job is {run.job.state} and its log has no profile."}
        else:
            answer = answer_plan_query("profile", {"profile": content})
        record_profile_run(run, content, answer)
