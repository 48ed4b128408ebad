"""One action on several jobs: which of them it can change, why not the others, and the result of each."""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import InterfaceError, OperationalError, connection, transaction
from django.db.models import F, Window
from django.db.models.functions import RowNumber
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from redis.exceptions import RedisError

from portal.access import Permission, permitted_job_ids, visible_jobs, visible_projects
from portal.domain.states import TERMINAL_JOB_STATES, DesiredState, JobKind, JobState
from portal.errors import Conflict, FairwayError, InvalidRequest
from portal.models import BulkOperation, Job, User
from portal.selectors.jobs.jobs import ROW_RELATIONS
from portal.services.jobs.changes import change_refusal, do_change_job
from portal.services.jobs.submission import (
    check_resubmission,
    do_cancel_job,
    do_hold_job,
    do_resubmit_job,
    do_resume_job,
    do_suspend_job,
)

log = logging.getLogger(__name__)

MAX_CHOSEN_JOBS = 100
"""Jobs that a page offers to choose at once."""
MAX_BULK_JOBS = 5000
REQUEST_LIMIT_S = 3.0
"""A request works on its jobs for this long; the worker changes the rest. Below the request limit of 8 s."""
WORKER_LIMIT_S = 15.0
WORKER_DELAY_S = REQUEST_LIMIT_S + 2
"""The worker leaves newer rows to the request that wrote them."""
MAX_OPEN_OPERATIONS = 20
"""Unfinished bulk operations of one user; further ones are refused."""
MAX_IN_REQUESTS = 2
"""Unfinished operations of one user on which requests work. Further ones are left to the worker, since their requests
would use up the connections."""
_CHUNK_JOBS = 10
_CHUNK_S = 0.5
_LOCK_TIMEOUT = "1s"
_LOCKED_STATES = {"55P03", "57014", "40P01"}
"""Lock timeout, statement timeout, deadlock: the job is busy, and the connection still usable."""
_OUTAGES = (OperationalError, InterfaceError, RedisError)
"""Failures of a server, not of a job: the operation continues when the server answers again."""


@dataclass(frozen=True)
class BulkAction:
    """``refusal`` says why a job that the user controls cannot be changed now, or None.

    ``parameter`` is the name of the value that it needs, ``priority`` or ``project``.
    """

    label: str
    done: str
    refusal: Callable[[User, Job], str | None]
    perform: Callable[[User, Job, Any], Job]
    parameter: str = ""


@dataclass(frozen=True)
class BulkResult:
    """``refusal`` is blank if the job was, or can be, changed. ``job`` is then the changed or the new one."""

    job: Job
    refusal: str = ""

    @property
    def changed(self) -> bool:
        return not self.refusal


def _has_ended(job: Job) -> bool:
    return JobState(job.state) in TERMINAL_JOB_STATES or job.desired_state == DesiredState.CANCELLED


def _stop_refusal(_user: User, job: Job) -> str | None:
    return _("It has ended or is stopping.") if _has_ended(job) else None


def _requeue_refusal(user: User, job: Job) -> str | None:
    if job.kind != JobKind.TRAINING.value:
        return _("Only training jobs can be requeued.")
    if job.is_placeholder:
        return _("It was adopted from a container and could not start again.")
    if JobState(job.state) in TERMINAL_JOB_STATES:
        try:
            check_resubmission(user, job)
        except FairwayError as error:
            return error.message
        return None
    if job.state == JobState.PENDING:
        return _("It waits in the queue.")
    return _stop_refusal(user, job)


def _requeue(user: User, job: Job, _: Any) -> Job:
    """Submit an ended job again; return a running or suspended one to the queue."""
    if JobState(job.state) in TERMINAL_JOB_STATES:
        return do_resubmit_job(user, job)
    with transaction.atomic():
        if job.desired_state != DesiredState.SUSPENDED:
            job = do_suspend_job(user, job)
        return do_resume_job(user, job)


def _hold_refusal(user: User, job: Job) -> str | None:
    return _("It is held already.") if job.held else _stop_refusal(user, job)


def _release_refusal(user: User, job: Job) -> str | None:
    return _stop_refusal(user, job) if job.held else _("It is not held.")


BULK_ACTIONS: Mapping[str, BulkAction] = {
    "stop": BulkAction(
        gettext_noop("Stop"),
        gettext_noop("stopped"),
        _stop_refusal,
        lambda user, job, _: do_cancel_job(user, job),
    ),
    "requeue": BulkAction(gettext_noop("Requeue"), gettext_noop("requeued"), _requeue_refusal, _requeue),
    "hold": BulkAction(
        gettext_noop("Hold"),
        gettext_noop("held"),
        _hold_refusal,
        lambda user, job, _: do_hold_job(user, job, True),
    ),
    "release": BulkAction(
        gettext_noop("Release"),
        gettext_noop("released"),
        _release_refusal,
        lambda user, job, _: do_hold_job(user, job, False),
    ),
    "priority": BulkAction(
        gettext_noop("Set the priority of"),
        gettext_noop("changed"),
        lambda _, job: change_refusal(job, ["priority"]),
        lambda user, job, value: do_change_job(user, job, {"priority": value}),
        "priority",
    ),
    "move": BulkAction(
        gettext_noop("Move"),
        gettext_noop("moved"),
        lambda _, job: change_refusal(job, ["project"]),
        lambda user, job, value: do_change_job(user, job, {"project": value}),
        "project",
    ),
}


def check_bulk(user: User, jobs: Sequence[Job], action: str) -> list[BulkResult]:
    """Return which of the jobs the action can change now, in the given order."""
    if len(jobs) > MAX_BULK_JOBS:
        raise InvalidRequest(fields={"jobs": _too_many()})
    controlled = permitted_job_ids(user, Permission.CONTROL, jobs)
    rule = BULK_ACTIONS[action]
    return [
        BulkResult(job, (rule.refusal(user, job) or "") if job.pk in controlled else _denied())
        for job in jobs
    ]


def start_bulk(user: User, jobs: Sequence[Job], action: str, value: Any = None) -> BulkOperation:
    """Record a bulk operation; a request or the worker changes its jobs. ``value``: a number or a project.

    Raise Conflict while the user has too many unfinished ones.
    """
    if len(jobs) > MAX_BULK_JOBS:
        raise InvalidRequest(fields={"jobs": _too_many()})
    number = value if value is None or isinstance(value, int) else value.pk
    ids = [job.public_id for job in jobs]
    with transaction.atomic():
        User.objects.select_for_update(no_key=True).get(pk=user.pk)  # concurrent requests count each other
        if BulkOperation.objects.filter(user=user, finished_at__isnull=True).count() >= MAX_OPEN_OPERATIONS:
            message = _("{count} of your bulk operations are not finished. Wait until one is.")
            raise Conflict(message.format(count=MAX_OPEN_OPERATIONS), code="too_many_bulk_operations")
        return BulkOperation.objects.create(user=user, action=action, value=number, jobs=ids)


def advance_in_request(operation: BulkOperation) -> BulkOperation:
    """Change jobs of a recorded operation for as long as a request may; the worker changes the rest.

    If a server fails meanwhile, the worker continues, so the request does not fail.
    """
    older = BulkOperation.objects.filter(
        user_id=operation.user_id, finished_at__isnull=True, pk__lt=operation.pk
    )
    if operation.finished_at is None and older.count() >= MAX_IN_REQUESTS:
        return operation
    try:
        return advance_bulk(operation)
    except _OUTAGES as error:
        log.warning("the bulk operation %s is left to the worker: %s", operation.public_id, error)
        return BulkOperation.objects.select_related("user").get(pk=operation.pk)


def advance_bulk(
    operation: BulkOperation, limit_s: float = REQUEST_LIMIT_S, *, wait: bool = True
) -> BulkOperation:
    """Change jobs of the operation until none is left or the time is over; return its new state.

    Each transaction changes a few jobs and stores their results, so that a kill repeats and loses none.
    Without ``wait``, an operation that another process works on is left to it.
    """
    deadline_s = time.monotonic() + limit_s
    while operation.finished_at is None and time.monotonic() < deadline_s:
        try:
            advanced = _advance_chunk(operation, _CHUNK_JOBS, wait=wait)
        except _OUTAGES:
            raise
        except Exception:  # at the end of the transaction, such as by a deferred constraint; logged below
            advanced = _advance_one_by_one(operation, wait=wait)
        if advanced is None:
            break
        operation = advanced
    return operation


_one_pass = threading.Lock()


def advance_open_bulk_operations(limit_s: float = WORKER_LIMIT_S) -> int:
    """Continue operations whose requests have been answered; return how many were open. Called by the worker.

    One thread of a process does so at a time, since the others start and stop jobs. Users share the time equally.
    """
    if not _one_pass.acquire(blocking=False):
        return 0
    try:
        return _advance_open_operations(time.monotonic() + limit_s)
    finally:
        _one_pass.release()


def _advance_open_operations(deadline_s: float) -> int:
    old = timezone.now() - dt.timedelta(seconds=WORKER_DELAY_S)
    rows = BulkOperation.objects.filter(finished_at__isnull=True, created_at__lt=old)
    rank = Window(RowNumber(), partition_by=F("user_id"), order_by=F("pk").asc())
    operations = list(rows.annotate(rank_of_user=rank).order_by("rank_of_user", "pk")[:100])
    by_user: dict[int, list[BulkOperation]] = {}
    for operation in operations:
        by_user.setdefault(operation.user_id, []).append(operation)
    for place, of_user in enumerate(by_user.values()):
        share_s = (deadline_s - time.monotonic()) / (len(by_user) - place)
        _advance_operations_of_user(of_user, min(deadline_s, time.monotonic() + share_s))
    return len(operations)


def _advance_operations_of_user(operations: Sequence[BulkOperation], deadline_s: float) -> None:
    for place, operation in enumerate(operations):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            break
        share_s = left_s / (len(operations) - place)  # a long operation does not delay the others
        try:
            advance_bulk(operation, share_s, wait=False)
        except _OUTAGES as error:
            if not _is_busy(error):
                raise
            log.warning("the bulk operation %s waits for a lock: %s", operation.public_id, error)
        except Exception:  # the other operations go on
            log.exception("the bulk operation %s failed", operation.public_id)


def bulk_results(operation: BulkOperation) -> list[BulkResult]:
    """Return the results so far, in the order of the request, of jobs that the user can still see."""
    done = [operation.results[one] for one in operation.jobs if one in operation.results]
    rows = (
        visible_jobs(operation.user).select_related("project").filter(public_id__in=[one for one, _ in done])
    )
    found = {job.public_id: job for job in rows}
    return [BulkResult(found[one], refusal) for one, refusal in done if one in found]


def _lock_operation(operation: BulkOperation, *, wait: bool) -> BulkOperation | None:
    """Return the locked row, or None if another process works on it."""
    rows = BulkOperation.objects.select_for_update(no_key=True, of=("self",), skip_locked=not wait)
    return rows.select_related("user").filter(pk=operation.pk).first()


def _advance_one_by_one(operation: BulkOperation, *, wait: bool) -> BulkOperation | None:
    """Change the next jobs in a transaction each, after their common one failed; refuse those that fail again."""
    advanced: BulkOperation | None = operation
    for _number in range(_CHUNK_JOBS):
        if advanced is None or advanced.finished_at is not None:
            break
        try:
            advanced = _advance_chunk(advanced, 1, wait=wait)
        except _OUTAGES:
            raise
        except Exception:
            log.exception("a job of the bulk operation %s was not changed", operation.public_id)
            advanced = _refuse_next(operation, wait=wait)
    return advanced


def _refuse_next(operation: BulkOperation, *, wait: bool) -> BulkOperation | None:
    with transaction.atomic():
        locked = _lock_operation(operation, wait=wait)
        if locked is not None and locked.finished_at is None:
            one = _open_ids(locked, 1)[0]
            _store_results(locked, {one: [one, _failed()]})
        return locked


def _open_ids(operation: BulkOperation, limit: int) -> list[str]:
    return [one for one in operation.jobs if one not in operation.results][:limit]


def _store_results(operation: BulkOperation, results: Mapping[str, list[str]]) -> None:
    operation.results |= results
    if len(operation.results) == len(operation.jobs):
        operation.finished_at = timezone.now()
    operation.save(update_fields=["results", "finished_at"])


def _advance_chunk(operation: BulkOperation, limit: int, *, wait: bool) -> BulkOperation | None:
    """Change at most ``limit`` jobs and store their results in one transaction; return the new row.

    Return None if another process works on the operation.
    """
    with transaction.atomic():
        locked = _lock_operation(operation, wait=wait)
        if locked is not None and locked.finished_at is None:
            _store_results(locked, _change_next(locked, limit))
        return locked


def _change_next(operation: BulkOperation, limit: int) -> dict[str, list[str]]:
    if not operation.user.is_active:
        refusal = _("The account that asked for it is deactivated.")
        return {one: [one, refusal] for one in _open_ids(operation, len(operation.jobs))}
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('lock_timeout', %s, true)", [_LOCK_TIMEOUT])
    ids = _open_ids(operation, limit)
    # in the order of their keys, as other writers lock them
    rows = visible_jobs(operation.user).select_related(*ROW_RELATIONS, "template").order_by("pk")
    jobs = list(rows.filter(public_id__in=ids))
    controlled = permitted_job_ids(operation.user, Permission.CONTROL, jobs)
    deadline_s = time.monotonic() + _CHUNK_S
    results: dict[str, list[str]] = {}
    for job in jobs:
        result = _change_job(operation, job) if job.pk in controlled else BulkResult(job, _denied())
        results[job.public_id] = [result.job.public_id, result.refusal]
        if time.monotonic() > deadline_s:
            return results
    missing = _("It cannot be found, or you may not see it.")
    return results | {one: [one, missing] for one in ids if one not in results}


def _change_job(operation: BulkOperation, job: Job) -> BulkResult:
    """Change one job in a savepoint. Raise only when a server does not answer."""
    rule = BULK_ACTIONS[operation.action]
    try:
        with transaction.atomic():
            if refusal := rule.refusal(operation.user, job):
                return BulkResult(job, refusal)
            value: Any = operation.value
            if rule.parameter == "project" and operation.value is not None:
                value = visible_projects(operation.user).filter(pk=operation.value).first()
                if value is None:
                    return BulkResult(job, _("There is no such project, or you may not see it."))
            return BulkResult(rule.perform(operation.user, job, value))
    except FairwayError as error:
        return BulkResult(job, error.message)
    except OperationalError as error:
        if not _is_busy(error):
            raise
        return BulkResult(job, _("Another change of it takes too long; it was not changed. Try again."))
    except (InterfaceError, RedisError):
        raise
    except Exception:  # a fault of one job does not stop the others
        log.exception("job %s of the bulk operation %s was not changed", job.public_id, operation.public_id)
        return BulkResult(job, _failed())


def _is_busy(failure: BaseException) -> bool:
    return getattr(failure.__cause__, "sqlstate", None) in _LOCKED_STATES


def _denied() -> str:
    return _("Only its owner and managers of its project may change it.")


def _failed() -> str:
    return _("It was not changed because of an error in Fairway, which is in the log. Tell an administrator.")


def _too_many() -> str:
    return _("At most {max_bulk_jobs} jobs at once.").format(max_bulk_jobs=MAX_BULK_JOBS)
