"""Finds pending jobs whose owner may no longer run them; they are left out of the snapshot."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from portal.domain.jobs.reasons import VerdictCode
from portal.models import Job
from portal.selectors.jobs.rights import (
    USAGE_COLUMNS,
    Denial,
    JobUsage,
    read_rights,
    rights_version,
    usage_from_columns,
)
from scheduler.core.model.plan import Verdict
from scheduler.core.model.snapshot import JobId
from scheduler.snapshot.row_cache import DerivedCache


class RightsCache:
    """Denials of the last query, valid until a row that grants rights changes."""

    def __init__(self) -> None:
        self.runs = DerivedCache[dict[str, Any], JobUsage]()
        self._version: object = None
        self._denials: dict[JobUsage, Denial | None] = {}

    def find_denials(self, runs: Iterable[JobUsage]) -> dict[JobUsage, Denial]:
        version = rights_version()
        known = self._denials if version == self._version else {}
        alike = set(runs)
        new = alike.difference(known)
        if new:
            rights = read_rights(new)
            known = {**known, **{run: rights.first_denial(run) for run in new}}
        self._version, self._denials = version, {run: known[run] for run in alike}
        return {run: denial for run, denial in self._denials.items() if denial is not None}


def read_denials(
    rows: Mapping[int, dict[str, Any]], scale_ups: Collection[JobId], cache: RightsCache
) -> dict[JobId, Denial]:
    """Return the denials of pending jobs, and of running ones that are pending for more tasks.

    ``rows`` are the columns of pending jobs. The number of queries is constant.
    """
    runs = cache.runs.map(rows, None, lambda _, row: usage_from_columns(row))
    more = (
        Job.objects.filter(public_id__in=scale_ups).values("public_id", *USAGE_COLUMNS) if scale_ups else ()
    )
    grow = {JobId(row["public_id"]): usage_from_columns(row) for row in more}
    denied = cache.find_denials([*runs, *grow.values()])
    if not denied:
        return {}
    waiting = zip(rows.values(), runs, strict=True)
    found = {JobId(row["public_id"]): denied[run] for row, run in waiting if run in denied}
    return found | {job: denied[run] for job, run in grow.items() if run in denied}


def denial_verdict(job: JobId, denial: Denial) -> Verdict:
    return Verdict(job, VerdictCode.OWNER_NOT_PERMITTED, str(denial), {"right": denial.requirement.value})
