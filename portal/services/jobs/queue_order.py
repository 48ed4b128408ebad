"""The order that users give to their own waiting jobs, and the front of the queue of a project."""

from __future__ import annotations

from django.db import transaction
from django.db.models import Max
from django.utils.translation import gettext as _

from portal.access import Permission, require_admin, require_permission
from portal.domain.jobs.job_spec import job_fields
from portal.domain.states import DesiredState, JobState
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict, Forbidden
from portal.live_events import publish_all_on_commit
from portal.models import Job, JobEvent, User
from portal.outbox import trigger_cycle
from portal.services.audit import record_action
from portal.services.jobs.changes import change_refusal, do_change_job
from portal.services.lifecycle.state_events import job_topic_events

MAX_ORDERED = 500
"""Maximum number of jobs of a user, project and priority whose order can be changed."""
MOVES = ("up", "down", "front")


def do_move_job(user: User, job: Job, to: str) -> Job:
    """Move a waiting job among its owner's jobs of the same project and priority, ``up`` or ``down``.

    ``front`` gives it a higher priority than any other waiting job of its project. Raise Conflict if it cannot move.
    """
    require_permission(user, Permission.CONTROL, job)
    if to == "front":
        return _move_to_front(user, job)
    if job.owner_id != user.pk:
        raise Forbidden(_("Only the owner of a job orders it among their other jobs."))
    with transaction.atomic():
        rows = Job.objects.filter(
            owner=user,
            project=job.project,
            priority=job.priority,
            state=JobState.PENDING.value,
            desired_state=DesiredState.RUN.value,
        )
        locked = (
            rows.select_for_update(of=("self",), no_key=True)
            .select_related("project", "owner")
            .order_by("pk")
        )
        waiting = sorted(locked[:MAX_ORDERED], key=lambda each: (each.queue_rank, each.submitted_at, each.pk))
        at = next((n for n, each in enumerate(waiting) if each.pk == job.pk), None)
        if at is None:
            raise Conflict(change_refusal(Job.objects.get(pk=job.pk)) or _TOO_MANY, code="not_changeable")
        other = at - 1 if to == "up" else at + 1
        if not 0 <= other < len(waiting):
            end = "first" if to == "up" else "last"
            raise Conflict(
                _("It is the {end} of your waiting jobs with priority {priority}.").format(
                    end=end, priority=job.priority
                ),
                code="no_move",
            )
        moved, passed = waiting[at], waiting[other]
        waiting[at], waiting[other] = passed, moved
        ordered = 1 + max(n for n, each in enumerate(waiting) if each.queue_rank or n in (at, other))
        for n, each in enumerate(waiting[:ordered]):
            each.queue_rank = n - ordered  # below 0, so that jobs submitted later come after them
        Job.objects.bulk_update(waiting[:ordered], ["queue_rank"])
        message = stored_text(
            f"Moved {'before' if to == 'up' else 'after'} {passed.name} ({passed.public_id}) by {user.username}."
        )
        JobEvent.objects.create(job=moved, kind="moved", actor=user.username, message=message)
        positions = ({"position": at + 1}, {"position": other + 1})
        record_action(user, "job.move", moved, before=positions[0], after=positions[1])
        publish_all_on_commit(job_topic_events(moved))
        trigger_cycle("order")
    return moved


_TOO_MANY = f"Only the first {MAX_ORDERED} of your waiting jobs can be ordered; change its priority instead."


def _move_to_front(user: User, job: Job) -> Job:
    require_admin(user, "move a job to the front of its project")
    others = Job.objects.filter(project=job.project, state=JobState.PENDING.value).exclude(pk=job.pk)
    highest = others.aggregate(highest=Max("priority"))["highest"]
    if highest is None or job.priority > highest:
        raise Conflict(_("It is already at the front of its project."), code="no_move")
    if highest >= int(job_fields()["priority"].maximum or 0):
        message = _("Another waiting job of {name} has the highest priority, {highest}.").format(
            name=job.project.name, highest=highest
        )
        raise Conflict(message, code="no_move")
    return do_change_job(user, job, {"priority": highest + 1})
