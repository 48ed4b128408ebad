"""Replaces the secret of a running workspace after a visitor's right has ended, without a restart of its tool.

A visitor who can run code can read the secret, and a tool may show it. A visit is a ``WorkspaceSession`` of
somebody else than the owner; it is deleted once the secret that it may have revealed is replaced. So it does not
matter how the right ended: the share was revoked or expired, or its user left the project or was deactivated.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from django.db import transaction
from django.db.models import F, QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import Permission, can
from portal.domain.states import AttemptState, JobKind
from portal.domain.stored_texts import stored_text
from portal.domain.workspaces.sharing import REPLACEABLE_SECRET_TOOLS
from portal.models import Attempt, Job, JobEvent, Node, Task, WorkspaceSession
from portal.outbox import notify_node
from portal.services.encryption import DecryptionError
from portal.services.jobs.attempt_secrets import (
    REPLACEABLE_PREFIX,
    decrypt_attempt_secret,
    encrypt_attempt_secret,
)

REPLACE_SECRET_HINT = "secret"  # noqa: S105  (a notification)


@dataclass(frozen=True)
class Replacement:
    """A task whose tool gets a new secret, because these visits have ended."""

    task: Task
    visits: Sequence[int]


def due_replacements(node: Node | None = None) -> list[Replacement]:
    """Return the running workspaces, on one node or all, in which the right of a visitor has ended."""
    rows = _visits().filter(
        attempt__stop_requested_at__isnull=True,
        attempt__job__environment__tool__in=REPLACEABLE_SECRET_TOOLS,
    )
    if node is not None:
        rows = rows.filter(attempt__task_rows__node=node, attempt__task_rows__rank=0)
    ended: dict[int, list[int]] = defaultdict(list)
    for row in _ended_visits(rows):
        assert row.attempt is not None  # noqa: S101  (the filter)
        ended[row.attempt.pk].append(row.pk)
    tasks = Task.objects.select_related("node", "attempt__job__environment").filter(
        attempt__in=ended, rank=0, state=AttemptState.RUNNING.value
    )
    return [
        Replacement(task, ended[task.attempt_id]) for task in tasks if has_replaceable_secret(task.attempt)
    ]


def unreplaced_secret(job: Job) -> str:
    """Return why the secret that a former visitor may know is not replaced within seconds; "" if it is."""
    visit = next(_ended_visits(_visits().filter(attempt__job=job)), None)
    if visit is None or (attempt := visit.attempt) is None:
        return ""
    if not has_replaceable_secret(attempt):
        return _(
            "{tool} reads its secret only when it starts. Stop and start the workspace to replace the secret."
        ).format(tool=job.environment.tool)
    task = Task.objects.filter(attempt=attempt, rank=0).select_related("node").first()
    if task is None or task.node.reachable:
        return ""
    return _("{node} does not answer. The secret of the workspace is replaced when it answers again.").format(
        node=task.node.name
    )


def _visits() -> QuerySet[WorkspaceSession]:
    """Return the sessions of visitors in running workspaces."""
    rows = WorkspaceSession.objects.filter(
        attempt__state=AttemptState.RUNNING.value, attempt__job__kind=JobKind.WORKSPACE.value
    )
    return rows.exclude(user=F("attempt__job__owner"))


def _ended_visits(rows: QuerySet[WorkspaceSession]) -> Iterator[WorkspaceSession]:
    """Yield those whose user has no right any more."""
    now = timezone.now()
    related = ("user", "attempt__job__project", "attempt__job__owner", "attempt__job__environment")
    for row in rows.select_related(*related):
        assert row.attempt is not None  # noqa: S101  (callers filter by it)
        if row.expires_at <= now or not can(row.user, Permission.VISIT, row.attempt.job):
            yield row


def has_replaceable_secret(attempt: Attempt) -> bool:
    """Return whether the tool reads its secret again when it changes; attempts of older versions do not."""
    try:
        secret = decrypt_attempt_secret(attempt)
    except DecryptionError:
        return False
    return secret.startswith(REPLACEABLE_PREFIX) and (
        attempt.job.environment.tool in REPLACEABLE_SECRET_TOOLS
    )


def new_secret() -> str:
    return REPLACEABLE_PREFIX + secrets.token_urlsafe(32)


def do_record_replacement(replacement: Replacement, secret: str) -> None:
    """Record the secret that the tool has now; the gateway sends it with its next decision."""
    attempt = replacement.task.attempt
    with transaction.atomic():
        Attempt.objects.filter(pk=attempt.pk).update(
            secret=encrypt_attempt_secret(attempt.job, attempt.number, secret)
        )
        WorkspaceSession.objects.filter(pk__in=replacement.visits).delete()
        message = stored_text(
            "The secret of its server was replaced, because a visitor has no access any more."
        )
        JobEvent.objects.create(job=attempt.job, attempt=attempt, kind="secret_replaced", message=message)


def request_replacements() -> None:
    """Ask the nodes of workspaces in which the right of a visitor has ended; the request is repeated until done."""
    for node in {replacement.task.node for replacement in due_replacements()}:
        notify_node(node.public_id, REPLACE_SECRET_HINT)


def request_replacement(job: Job) -> None:
    """Ask the node of a workspace to check it now; the periodic pass does so later in any case."""
    running = Task.objects.filter(attempt__job=job, rank=0, state=AttemptState.RUNNING.value)
    for node in running.values_list("node__public_id", flat=True):
        notify_node(node, REPLACE_SECRET_HINT)
