"""Environments that users save from their running jobs: requested here, saved by the actor of the node.

The image stays on that node, so the scheduler starts jobs of the environment only on nodes that have it.
"""

from __future__ import annotations

import datetime as dt

from django.db import transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import Permission, can, require_permission, visible_environments
from portal.domain.scheduling.policy_settings import SAVED_IMAGE_LIMIT
from portal.domain.states import AttemptState, JobKind, RuntimeKind
from portal.errors import Conflict, FairwayError, Forbidden, InvalidRequest, NotFound
from portal.live_events import publish_on_commit
from portal.models import Environment, ImagePresence, Job, Node, SavedImage, Task, User
from portal.models.public_id import name_error
from portal.outbox import notify_node, trigger_cycle
from portal.selectors.scheduling.settings import effective_pool_settings
from portal.services.audit import record_action
from portal.services.environments.environments import do_allow_environment
from portal.services.lifecycle.rights_changes import DEFAULT_CHOICE, applying_choice
from portal.services.names import atomic_unique
from portal.services.requests.user_requests import do_request_environment

SAVE_IMAGE_HINT = "save_image"
MAX_SAVED_ENVIRONMENTS = 20
"""Maximum number of saved environments of a user."""
TIMEOUT = dt.timedelta(minutes=30)
"""A node that is not reachable for this long after a request does not save any more."""
_COPIED = ("runtime", "min_driver", "image_cuda", "min_cuda", "tool", "tool_command", "tool_port")


def may_save(user: User, job: Job) -> bool:
    """Return True for those who control a job; an image of a workspace has files that only its owner may read."""
    verb = Permission.ENTER if job.kind == JobKind.WORKSPACE.value else Permission.READ_FILES
    return can(user, Permission.CONTROL, job) and can(user, verb, job)


def save_limit_mib(job: Job) -> int:
    """Return the maximum size of what can be saved, by the policy of the pool in which the job last ran."""
    attempt = job.attempts.select_related("pool").order_by("-number").first()
    return int(effective_pool_settings([attempt.pool])[attempt.pool_id][SAVED_IMAGE_LIMIT]) if attempt else 0


def do_save_environment_of(
    user: User, job: Job, *, name: str, purpose: str, for_project: bool = False
) -> SavedImage:
    """Save the running task of the lowest rank as an environment that the user alone may use in its project.

    ``for_project``: all users of the project, once an administrator has approved that. Raise Conflict if the
    job does not run in a container, or while it is being saved.
    """
    require_permission(user, Permission.CONTROL, job)
    if not may_save(user, job):
        raise Forbidden(_("Only its owner can save a workspace: the image contains files of the owner."))
    wrong = {"name": fault} if (fault := name_error(name)) else {}
    if not 1 <= len(purpose := " ".join(purpose.split())) <= 500:
        wrong["purpose"] = _("Say in at most 500 characters what it is for.")
    if wrong:
        raise InvalidRequest(fields=wrong)
    task = _running_task(job)
    if not save_limit_mib(job):
        raise Conflict(_("The administrators have disabled saving environments."), code="saving_disabled")
    with atomic_unique("name", _("An environment with this name already exists.")):
        Job.objects.select_for_update(no_key=True).get(pk=job.pk)
        mine = SavedImage.objects.filter(requested_by=user)
        for late in mine.filter(finished_at__isnull=True).exclude(pk__in=_in_progress(mine)):
            record_not_saved(late, problem_of(late))
        if _in_progress(SavedImage.objects.filter(task__attempt__job=job)).exists():
            raise Conflict(_("It is already being saved."), code="save_in_progress")
        if mine.filter(environment__enabled=True).count() >= MAX_SAVED_ENVIRONMENTS:
            message = _(
                "You already have {max_saved_environments} saved environments. Delete one first."
            ).format(max_saved_environments=MAX_SAVED_ENVIRONMENTS)
            raise Conflict(message, code="too_many_saved")
        environment = Environment(
            name=name, title=name, description=purpose, owner=user, enabled=False,
            **{column: getattr(job.environment, column) for column in _COPIED},
        )  # fmt: skip
        environment.image = f"localhost/fairway-saved/{environment.public_id}:latest"
        environment.save()
        environment.projects.set([job.project])
        row = SavedImage.objects.create(
            environment=environment, task=task, requested_by=user, for_project=for_project
        )
        row.refresh_from_db(fields=["requested_at"])
        after = {"job": job.name, "node": task.node.name, "for_project": for_project}
        record_action(user, "environment.save_job", environment, after=after, reason=purpose)
        notify_node(task.node.public_id, SAVE_IMAGE_HINT)
        _publish(row)
    return row


def _running_task(job: Job) -> Task:
    """Return the running task of the lowest rank. Raise Conflict if it cannot be saved."""
    running = {"attempt__state": AttemptState.RUNNING.value, "state": AttemptState.RUNNING.value}
    tasks = Task.objects.filter(attempt__job=job, attempt__stop_requested_at__isnull=True, **running)
    task = tasks.select_related("node").order_by("-attempt__number", "rank").first()
    if task is None:
        message = _("Only a running job can be saved: its container is removed when it ends.")
        raise Conflict(message, code="not_running")
    if task.node.runtime == RuntimeKind.PROCESS.value:
        raise Conflict(
            _("{name} runs jobs without containers.").format(name=task.node.name), code="no_container"
        )
    if not task.node.reachable:
        raise Conflict(
            _("{name} is not reachable at the moment.").format(name=task.node.name), code="node_unreachable"
        )
    return task


def list_saved_images(user: User, job: Job) -> QuerySet[SavedImage]:
    """Return what the user saved: all environments in use, and also what became of requests for this job."""
    require_permission(user, Permission.VIEW, job)
    shown = Q(environment__enabled=True) | (
        Q(task__attempt__job=job) & (Q(finished_at=None) | ~Q(problem=""))
    )
    rows = SavedImage.objects.filter(shown, requested_by=user)
    return rows.select_related("environment", "task__node", "task__attempt__job__project").order_by("-id")


def is_in_progress(row: SavedImage) -> bool:
    return row.finished_at is None and timezone.now() - row.requested_at < TIMEOUT


def problem_of(row: SavedImage) -> str:
    if row.finished_at is None and not is_in_progress(row):
        return f"{row.task.node.name} did not answer in time."
    return row.problem


def get_saved_environment(user: User, public_id: str) -> Environment:
    """Return an environment that the user saved, for administrators any saved one. Raise NotFound otherwise."""
    rows = visible_environments(user).filter(public_id=public_id, saved_image__isnull=False)
    row = (rows if user.is_admin else rows.filter(saved_image__requested_by=user)).first()
    if row is None:
        raise NotFound(_("There is no such saved environment."))
    return row


def do_delete_saved_environment(user: User, environment: Environment) -> Environment:
    """Offer a saved environment no longer: its waiting jobs are held, and its image is removed when space is needed.

    Its row is kept for its jobs.
    """
    row = get_saved_environment(user, environment.public_id)
    with transaction.atomic():
        row = Environment.objects.select_for_update(no_key=True).get(pk=row.pk)
        if row.enabled:
            before = {"name": row.name, "image": row.image}
            with applying_choice(user, row, Job.objects.filter(environment=row), DEFAULT_CHOICE):
                _retire(row)
            ImagePresence.objects.filter(environment=row).update(prefetched=False)
            record_action(user, "environment.delete_saved", row, before=before)
    return row


def _retire(environment: Environment) -> None:
    """Disable an environment; another may then have its name."""
    environment.name, environment.enabled = f"{environment.name[:45]}-{environment.public_id}", False
    environment.save(update_fields=["name", "enabled"])


def _in_progress(rows: QuerySet[SavedImage]) -> QuerySet[SavedImage]:
    return rows.filter(finished_at__isnull=True, requested_at__gt=Now() - TIMEOUT)


def _publish(row: SavedImage) -> None:
    job = row.task.attempt.job.public_id
    publish_on_commit(
        f"job.{job}", {"kind": "saved_image", "job": job, "finished": row.finished_at is not None}
    )


# -- carried out by the node's actor ---------------------------------------------------------------


def images_to_save(node: Node) -> list[SavedImage]:
    """Return the recent requests on a node; mostly there are none."""
    rows = _in_progress(SavedImage.objects.filter(task__node=node))
    columns = ("environment", "requested_by", "task__node", "task__attempt__job__project")
    return list(rows.select_related(*columns))


def record_saved(row: SavedImage, image_id: str, changed_mib: int) -> None:
    """Enable the environment on the node that has its image, and request it for the project."""
    environment, node, user = row.environment, row.task.node, row.requested_by
    with transaction.atomic():
        if not _finish(row, changed_mib=changed_mib):
            return
        environment.enabled, environment.image_digest = True, image_id
        environment.image_resolved_at, environment.image_resolved_by = timezone.now(), node.name
        environment.save()
        ImagePresence.objects.update_or_create(
            environment=environment,
            node=node,
            defaults={"state": "present", "image_pin": image_id, "prefetched": True},
        )
        after = {"image": image_id, "changed_mib": changed_mib, "node": node.name}
        record_action(user, "environment.saved", environment, after=after)
        trigger_cycle("environment")
    if row.for_project:
        project = row.task.attempt.job.project
        try:
            if user.is_admin:
                do_allow_environment(user, environment, project, requested_by=user)
            else:
                do_request_environment(user, project, environment.name, reason=environment.description)
        except FairwayError as error:
            problem = f"It was saved for you alone: {error.message}"
            SavedImage.objects.filter(pk=row.pk).update(problem=problem[:500])


def record_not_saved(row: SavedImage, problem: str) -> None:
    """Store why the node did not save it."""
    with transaction.atomic():
        if _finish(row, problem=problem[:500]):
            record_action(row.requested_by, "environment.not_saved", row.environment, reason=problem[:500])
            _retire(row.environment)


def _finish(row: SavedImage, *, changed_mib: int | None = None, problem: str = "") -> bool:
    """Mark a request as finished; return False if it was before."""
    done = SavedImage.objects.filter(pk=row.pk, finished_at__isnull=True).update(
        finished_at=Now(), changed_mib=changed_mib, problem=problem
    )
    row.refresh_from_db(fields=["finished_at", "problem"])
    _publish(row)
    return done == 1
