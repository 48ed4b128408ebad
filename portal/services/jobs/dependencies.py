"""Dependencies between jobs: validation, and cancellation of jobs whose dependency failed."""

from __future__ import annotations

from collections.abc import Sequence

from django.utils.translation import gettext as _

from portal.access import Permission, can
from portal.domain.jobs.reasons import EndReason, end_message
from portal.domain.states import TERMINAL_JOB_STATES, DesiredState, JobState
from portal.domain.stored_texts import stored_text
from portal.errors import InvalidRequest
from portal.models import Dependency, Job, User
from portal.services.lifecycle import job_control

MAX_DEPENDENCIES = 20
BATCH_SIZE = 500

UNSUCCESSFUL_STATES = tuple(
    sorted(state.value for state in TERMINAL_JOB_STATES if state is not JobState.COMPLETED)
)
"""Final states after which jobs that require completion are cancelled."""

OUTCOME_TEXT = {
    JobState.FAILED: stored_text("failed"),
    JobState.CANCELLED: stored_text("was cancelled"),
    JobState.TIMEOUT: stored_text("reached its time limit"),
}


def dependency_errors(user: User, dependencies: Sequence[Job], *, any_end: bool) -> dict[str, str]:
    """Return what is wrong with the dependencies of a new job, by field of the request; empty if nothing."""
    if len({job.pk for job in dependencies}) > MAX_DEPENDENCIES:
        return {
            "dependencies": _("A job has at most {max_dependencies} dependencies.").format(
                max_dependencies=MAX_DEPENDENCIES
            )
        }
    for job in dependencies:
        if not can(user, Permission.VIEW, job):
            return {"dependencies": unknown_job_message(job.public_id)}
    failed = next((job for job in dependencies if job.state in UNSUCCESSFUL_STATES), None)
    if failed is not None and not any_end:
        how = OUTCOME_TEXT[JobState(failed.state)]
        return {
            "dependencies": _(
                "{name} {how} and can never complete. Choose another job, or let it start even if "
                "its dependencies fail."
            ).format(name=failed.name, how=how)
        }
    return {}


def unknown_job_message(key: str) -> str:
    """Return the error for a job that does not exist or that the user may not see."""
    return _("There is no job {key}, or you may not see it.").format(key=key[:63])


def lock_dependencies(user: User, dependencies: Sequence[Job], *, any_end: bool) -> list[Job]:
    """Return the dependencies reread and locked, each once, until the new job is inserted.

    A later end of a dependency then sees the new job. Raise InvalidRequest if one has failed in the meantime.
    """
    if not dependencies:
        return []
    wanted = {job.pk for job in dependencies}
    rows = Job.objects.select_for_update(of=("self",), no_key=True).select_related("project")
    locked = list(rows.filter(pk__in=wanted).order_by("pk"))
    if wrong := dependency_errors(user, locked, any_end=any_end):
        raise InvalidRequest(fields=wrong)
    return locked


def cancel_dependents() -> int:
    """Cancel jobs whose dependency did not complete; return how many.

    One transaction per job. Dependents of a cancelled job are cancelled next. Repeatable.
    """
    cancelled = 0
    while cancelled < BATCH_SIZE:
        rows = Dependency.objects.filter(
            depends_on__state__in=UNSUCCESSFUL_STATES,
            job__ignore_dependency_failure=False,
            job__state=JobState.PENDING.value,
            job__desired_state=DesiredState.RUN.value,
        )
        found = {
            row.job_id: row
            for row in rows.select_related("job", "depends_on").order_by("-depends_on__ended_at")[:BATCH_SIZE]
        }
        if not found:
            break
        for row in found.values():
            job_control.cancel_job(
                row.job_id, EndReason.DEPENDENCY_FAILED, actor="", message=_cancellation_message(row)
            )
        cancelled += len(found)
    return cancelled


def _cancellation_message(row: Dependency) -> str:
    """Name the dependency only within its own project: the user may not be allowed to see it otherwise."""
    alike = row.job.project_id == row.depends_on.project_id
    name = row.depends_on.name if alike else stored_text("a job of another project")
    return end_message(
        EndReason.DEPENDENCY_FAILED, job=name, how_text=OUTCOME_TEXT[JobState(row.depends_on.state)]
    )
