"""Reads which waiting jobs have an owner who may not run them any more: these are left out of a photograph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from portal.models import Job
from portal.services.rights import RUN_COLUMNS, Denial, denials_of, run_of
from portal.words.reasons import VerdictCode
from scheduler.core.cluster import JobId, PendingRow
from scheduler.core.plan import Verdict


def read_denied(rows: Mapping[int, dict[str, Any]], growing: Collection[JobId]) -> dict[JobId, Denial]:
    """Return the denials of waiting jobs, and of running ones that wait for more tasks.

    ``rows`` are the columns of waiting jobs. The number of queries does not depend on how many they are.
    """
    columns = {JobId(row["public_id"]): row for row in rows.values()}
    if growing:
        more = Job.objects.filter(public_id__in=growing).values("public_id", *RUN_COLUMNS)
        columns |= {JobId(row["public_id"]): row for row in more}
    return denials_of({job: run_of(row) for job, row in columns.items()})


def permitted(
    pending: tuple[PendingRow, ...], growing: tuple[PendingRow, ...], denied: Mapping[JobId, Denial]
) -> tuple[PendingRow, ...]:
    if not denied:
        return (*pending, *growing)
    return tuple(row for row in (*pending, *growing) if row.job not in denied)


def verdict_of(denied: tuple[JobId, Denial]) -> Verdict:
    job, denial = denied
    return Verdict(job, VerdictCode.OWNER_NOT_PERMITTED, str(denial), {"right": denial.right.value})
