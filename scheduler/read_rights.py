"""Reads which waiting jobs have an owner who may not run them any more: these are left out of a photograph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from portal.models import Job
from portal.services.rights import RUN_COLUMNS, Denial, Run, read_rights, rights_version, run_of
from portal.words.reasons import VerdictCode
from scheduler.album import Built
from scheduler.core.cluster import JobId, PendingRow
from scheduler.core.plan import Verdict


class RightsCache:
    """The rights of what was asked about last, kept until a row that decides on rights is written."""

    def __init__(self) -> None:
        self.runs = Built[dict[str, Any], Run]()
        self._version: object = None
        self._denials: dict[Run, Denial | None] = {}

    def denied_among(self, runs: Iterable[Run]) -> dict[Run, Denial]:
        version = rights_version()
        known = self._denials if version == self._version else {}
        alike = set(runs)
        new = alike.difference(known)
        if new:
            rights = read_rights(new)
            known = {**known, **{run: rights.denial(run) for run in new}}
        self._version, self._denials = version, {run: known[run] for run in alike}
        return {run: denial for run, denial in self._denials.items() if denial is not None}


def read_denied(
    rows: Mapping[int, dict[str, Any]], growing: Collection[JobId], cache: RightsCache
) -> dict[JobId, Denial]:
    """Return the denials of waiting jobs, and of running ones that wait for more tasks.

    ``rows`` are the columns of waiting jobs. The number of queries does not depend on how many they are.
    """
    runs = cache.runs.of(rows, None, lambda _, row: run_of(row))
    more = Job.objects.filter(public_id__in=growing).values("public_id", *RUN_COLUMNS) if growing else ()
    grow = {JobId(row["public_id"]): run_of(row) for row in more}
    denied = cache.denied_among([*runs, *grow.values()])
    if not denied:
        return {}
    waiting = zip(rows.values(), runs, strict=True)
    found = {JobId(row["public_id"]): denied[run] for row, run in waiting if run in denied}
    return found | {job: denied[run] for job, run in grow.items() if run in denied}


def permitted(
    pending: tuple[PendingRow, ...], growing: tuple[PendingRow, ...], denied: Mapping[JobId, Denial]
) -> tuple[PendingRow, ...]:
    if not denied:
        return (*pending, *growing)
    return tuple(row for row in (*pending, *growing) if row.job not in denied)


def verdict_of(denied: tuple[JobId, Denial]) -> Verdict:
    job, denial = denied
    return Verdict(job, VerdictCode.OWNER_NOT_PERMITTED, str(denial), {"right": denial.right.value})
