"""Jobs that start after other jobs: what may be named, and who is cancelled because another one failed."""

from __future__ import annotations

from collections.abc import Sequence

from portal.access import Verb, can
from portal.errors import Invalid
from portal.models import Dependency, Job, User
from portal.services import lifecycle
from portal.words.reasons import EndReason, end_sentence
from portal.words.states import JOB_ENDS, Desired, JobState

MOST_DEPENDENCIES = 20
AT_ONCE = 500

FAILED = tuple(sorted(state.value for state in JOB_ENDS if state is not JobState.COMPLETED))
"""The ends after which nothing starts that was to start once the job has completed."""

HOW = {
    JobState.FAILED: "failed",
    JobState.CANCELLED: "was cancelled",
    JobState.TIMEOUT: "reached its time limit",
}


def wrong_dependencies(user: User, after: Sequence[Job], *, any_end: bool) -> dict[str, str]:
    """What is wrong with jobs that a new one is to start after, by field of the request; empty when nothing is."""
    if len({job.pk for job in after}) > MOST_DEPENDENCIES:
        return {"after": f"A job may start after at most {MOST_DEPENDENCIES} others."}
    for job in after:
        if not can(user, Verb.SEE, job):
            return {"after": unknown(job.public_id)}
    failed = next((job for job in after if job.state in FAILED), None)
    if failed is not None and not any_end:
        how = HOW[JobState(failed.state)]
        return {
            "after": f"{failed.name} {how}, so nothing can start once it has completed. Take another job, or let "
            "it start however they end."
        }
    return {}


def unknown(key: str) -> str:
    """The refusal of a job that is not there, or that the person may not see."""
    return f"There is no job {key[:63]}, or you may not see it."


def lock_dependencies(user: User, after: Sequence[Job], *, any_end: bool) -> list[Job]:
    """The same jobs as they stand now, each once, locked until the new job stands beside them.

    An end that comes later finds the new job and tells it. Raises Invalid when one has failed meanwhile.
    """
    if not after:
        return []
    wanted = {job.pk for job in after}
    rows = Job.objects.select_for_update(of=("self",), no_key=True).select_related("project")
    locked = list(rows.filter(pk__in=wanted).order_by("pk"))
    if wrong := wrong_dependencies(user, locked, any_end=any_end):
        raise Invalid(fields=wrong)
    return locked


def cancel_dependents() -> int:
    """Cancels the jobs that were to start after one that did not complete; gives how many.

    Each in a transaction of its own. Whoever waited for a cancelled one is cancelled next. Repeatable.
    """
    cancelled = 0
    while cancelled < AT_ONCE:
        rows = Dependency.objects.filter(
            after__state__in=FAILED,
            job__after_any=False,
            job__state=JobState.PENDING.value,
            job__desired=Desired.RUN.value,
        )
        found = {
            row.job_id: row
            for row in rows.select_related("job", "after").order_by("-after__ended_at")[:AT_ONCE]
        }
        if not found:
            break
        for row in found.values():
            lifecycle.cancel(row.job_id, EndReason.DEPENDENCY_FAILED, actor="", sentence=_why(row))
        cancelled += len(found)
    return cancelled


def _why(row: Dependency) -> str:
    """Named only inside its own project: whoever sees the one that waited need not see the other."""
    alike = row.job.project_id == row.after.project_id
    name = row.after.name if alike else "a job of another project"
    return end_sentence(EndReason.DEPENDENCY_FAILED, job=name, how=HOW[JobState(row.after.state)])
