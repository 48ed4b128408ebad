"""Reads requests of users and their answers."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection
from dataclasses import dataclass

from django.db.models import QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import Requester, require_user, visible_requests
from portal.domain.requests.user_requests import RequestKind, RequestState
from portal.models import UserRequest
from portal.selectors.lookup import get_first
from portal.selectors.reports.held_time import UsageGrouping
from portal.selectors.reports.usage import WorkRow, work_by

EFFICIENCY_PERIOD = dt.timedelta(days=30)


def list_requests(
    requester: Requester, *, is_open: bool | None = None, kind: str = "", mine: bool | None = None
) -> QuerySet[UserRequest]:
    """Return the requests that the user may see, newest first; ``mine`` selects by whether the user made them."""
    rows = visible_requests(requester).select_related(
        "job__project",
        "job__owner",
        "attempt",
        "requested_by",
        "decided_by",
        "project",
        "pool",
        "environment",
    )
    if is_open is not None:
        is_open_row = {"state": RequestState.OPEN.value}
        rows = rows.filter(**is_open_row) if is_open else rows.exclude(**is_open_row)
    if kind:
        rows = rows.filter(kind=RequestKind(kind).value)
    if mine is not None:
        own = {"requested_by": require_user(requester)}
        rows = rows.filter(**own) if mine else rows.exclude(**own)
    return rows.order_by("-id")


def get_request(requester: Requester, public_id: str) -> UserRequest:
    """Return the request. Raise NotFound if the user may not see it."""
    return get_first(list_requests(requester).filter(public_id=public_id), _("There is no such request."))


@dataclass(frozen=True)
class RequestEfficiency:
    """How the asking user and the project used the GPUs of attempts that ended in the last 30 days.

    None: the reader may not see any, or there were none.
    """

    user: WorkRow | None
    project: WorkRow | None


def request_efficiencies(requester: Requester, rows: Collection[UserRequest]) -> dict[int, RequestEfficiency]:
    """Return the efficiency behind each request of quota, by primary key, in two queries plus permissions."""
    asked = [row for row in rows if row.kind == RequestKind.QUOTA]
    if not asked:
        return {}
    end = timezone.now()
    users, projects = (
        {
            row.key: row
            for row in work_by(requester, end - EFFICIENCY_PERIOD, end, by, groups=groups)
            if row.held_gpu_hours
        }
        for by, groups in (
            (UsageGrouping.USER, {row.requested_by_id for row in asked}),
            (UsageGrouping.PROJECT, {row.project_id for row in asked}),
        )
    )
    return {
        row.pk: RequestEfficiency(
            users.get(row.requested_by.public_id),
            projects.get(row.project.public_id) if row.project else None,
        )
        for row in asked
    }
