"""Reads schedules and their runs."""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from portal.access import Requester, visible_schedules
from portal.models import Schedule, ScheduleRun
from portal.selectors.lookup import get_first


def list_schedules(requester: Requester) -> QuerySet[Schedule]:
    rows = visible_schedules(requester)
    return rows.select_related("owner", "project", "environment", "pool", "template").order_by("-id")


def get_schedule(requester: Requester, public_id: str) -> Schedule:
    """Return the schedule. Raise NotFound if it does not exist or the user may not see it."""
    return get_first(list_schedules(requester).filter(public_id=public_id), _("There is no such schedule."))


def list_runs(schedule: Schedule) -> QuerySet[ScheduleRun]:
    return schedule.runs.select_related("job")


def newest_runs(schedules: Iterable[Schedule]) -> dict[int, ScheduleRun]:
    """Return the newest run of each schedule by the schedule's primary key, in one query."""
    rows = ScheduleRun.objects.filter(schedule__in=[each.pk for each in schedules]).select_related("job")
    return {run.schedule_id: run for run in rows.order_by("schedule_id", "-due_at").distinct("schedule_id")}
