"""A schedule, declared once for form and REST: when its job is submitted again, and what if one is active. Pure."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from dataclasses import dataclass, replace
from enum import StrEnum

from cronsim import CronSim, CronSimError

from portal.domain.jobs.job_spec import JobField, declare, field_errors

CRON_FIELDS = 5


class Overlap(StrEnum):
    """What happens when a job is due and an earlier one of the schedule has not ended."""

    SKIP = "skip"
    ALLOW = "allow"
    REPLACE = "replace"


OVERLAP_LABELS = {
    Overlap.SKIP: "Skip this time",
    Overlap.ALLOW: "Submit it, too",
    Overlap.REPLACE: "Stop the earlier job",
}


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """When the job of a schedule is submitted."""

    cron: str = declare(
        "",
        JobField(
            max_length=100, label="Cron expression",
            help="Minute, hour, day of the month, month and day of the week: 0 6 * * MON-FRI is 6:00 on working "
            "days.",
        ),
    )  # fmt: skip
    time_zone: str = declare("UTC", JobField(max_length=64, help="Such as Europe/Berlin."))
    overlap: str = declare(
        Overlap.SKIP.value,
        JobField(
            choices=tuple(Overlap),
            help="If an earlier job has not ended: skip this time, allow both, or replace (stop) the earlier one.",
        ),
    )  # fmt: skip


def schedule_errors(spec: ScheduleSpec, now: dt.datetime) -> dict[str, str]:
    """Return what is wrong with a schedule, by field."""
    wrong = field_errors(spec)
    try:
        zoneinfo.ZoneInfo(spec.time_zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        wrong["time_zone"] = "Enter the name of a time zone such as Europe/Berlin."
        spec = replace(spec, time_zone="UTC")
    if len(spec.cron.split()) != CRON_FIELDS:
        return wrong | {"cron": "Enter five fields, such as 0 6 * * MON-FRI."}
    try:
        next_due(spec, now)
    except CronSimError as error:
        wrong["cron"] = f"{error}. Enter five fields, such as 0 6 * * MON-FRI."
    except StopIteration:
        wrong["cron"] = "No date matches it."
    return wrong


def next_due(spec: ScheduleSpec, after: dt.datetime) -> dt.datetime:
    """Return the first due time after ``after``, as cron of Debian chooses it around clock changes.

    A time that is left out runs right after the change, and a time that occurs twice runs once; expressions with
    * as their hour or minute follow the elapsed time instead. Raise CronSimError or StopIteration for a
    specification with errors.
    """
    here = after.astimezone(zoneinfo.ZoneInfo(spec.time_zone))
    return next(CronSim(spec.cron, here)).astimezone(dt.UTC)
