"""Keeps the newest verdict of each waiting job in the record: written in bulk, and only where it changed."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop
from typing import Any

from django.db import connection, transaction
from django.utils import timezone

from portal.live_events import publish_all_on_commit
from portal.models import JobVerdict
from scheduler import leases
from scheduler.core.model.plan import Alternative, Verdict
from scheduler.leases import HeldLease
from scheduler.snapshot.row_cache import RowCache, row_version_blocks

MAX_REFRESHED = 500
"""Of the verdicts with the same code as before, at most so many are written anew in a cycle, the oldest first.

Each message holds numbers of its whole pool, so that one start changes those of every job that waits there.
"""
MAX_ANNOUNCED = 200
"""Open pages are told of at most this many changes a cycle; the others poll."""

MAX_BATCH = 2_000
"""So many share a transaction at most."""

_PLAIN = (str, int, float, bool, type(None))  # equal to themselves after JSON


@dataclass(frozen=True, slots=True)
class StoredVerdict:
    """What the record says of a waiting job, and since when."""

    columns: dict[str, Any]
    decided_at: dt.datetime
    since: dt.datetime


class VerdictStore:
    """The verdicts of the record as this process knows them: it reads again only those written by others."""

    def __init__(self) -> None:
        self._cache = RowCache[StoredVerdict]()
        self._announced_count = 0  # of changes, since what goes on began

    def read(self) -> dict[int, StoredVerdict]:
        """By row number of the job."""
        return self._cache.refresh_blocks(row_version_blocks("portal_jobverdict", "job_id"), _fetch_verdicts)

    def write(
        self,
        leader: HeldLease,
        jobs: Mapping[str, int],
        verdicts: Sequence[Verdict],
        max_refreshed: int | None = None,
        *,
        continued: bool = False,
    ) -> int:
        """Writes the verdicts that changed and gives how many; raises LeaseLostError.

        ``jobs`` by id the rows of all that wait; of the verdicts whose numbers alone changed ``max_refreshed`` are
        written, or ``MAX_REFRESHED``. A piece that ``continued`` looks at what was read for the one before.
        """
        now = timezone.now()
        before = self._cache.rows if continued else self.read()
        fields = _VerdictColumns()
        changed: list[tuple[int, StoredVerdict]] = []
        code_changes: list[Verdict] = []
        others: list[tuple[dt.datetime, int, Verdict]] = []  # with when each was last written
        for verdict in verdicts:
            row = jobs.get(verdict.job)
            if row is None:  # it runs, and waits only for more tasks
                continue
            old = before.get(row)
            if old is None or old.columns["code"] != verdict.code.value:
                changed.append((row, StoredVerdict(fields.build(verdict), now, now)))
                code_changes.append(verdict)
            else:
                others.append((old.decided_at, row, verdict))
        changed += _refreshed(
            others, before, fields, now, MAX_REFRESHED if max_refreshed is None else max_refreshed
        )
        left = before.keys() - set(jobs.values())
        for first in range(0, len(changed), MAX_BATCH):
            self._write(leader, dict(changed[first : first + MAX_BATCH]), left)
        self._announce(code_changes, continued=continued)
        return len(changed)

    def _announce(self, changes: Sequence[Verdict], *, continued: bool) -> None:
        before = self._announced_count if continued else 0
        announced = changes[: max(0, MAX_ANNOUNCED - before)]
        self._announced_count = before + len(announced)
        publish_all_on_commit(
            [
                (f"job.{each.job}", {"kind": "verdict", "code": each.code.value, "message": each.message})
                for each in announced
            ]
        )

    def _write(self, leader: HeldLease, changed: dict[int, StoredVerdict], left: Collection[int]) -> None:
        """One transaction; drops the verdicts of jobs that left the queue while the plan was made."""
        text = cache(dt.datetime.isoformat)  # all but a few were decided at the same moment
        rows = [
            {
                "job_id": row,
                "decided_at": text(stored.decided_at),
                "since": text(stored.since),
                **stored.columns,
            }
            for row, stored in changed.items()
        ]
        with transaction.atomic(), connection.cursor() as cursor:
            leases.check(leader)
            cursor.execute(_WRITE, [json.dumps(rows)])
            versions = cursor.fetchall()
            cursor.execute(
                "DELETE FROM portal_jobverdict USING portal_job job WHERE job.id = portal_jobverdict.job_id"
                " AND job.state <> 'PENDING' AND job.id = ANY(%s)",
                [[*changed, *left]],
            )
        self._cache.put(versions, changed)


def _refreshed(
    others: list[tuple[dt.datetime, int, Verdict]],
    before: Mapping[int, StoredVerdict],
    fields: _VerdictColumns,
    now: dt.datetime,
    limit: int,
) -> list[tuple[int, StoredVerdict]]:
    """Of the verdicts with the same code those that say something else, the oldest first and only so many."""
    found: list[tuple[int, StoredVerdict]] = []
    heapify(others)
    while others and len(found) < limit:
        _, row, verdict = heappop(others)
        if not fields.matches(before[row].columns, verdict):
            found.append((row, StoredVerdict(fields.build(verdict), now, before[row].since)))
    return found


_WRITE = """
    WITH verdict AS MATERIALIZED (
        SELECT * FROM json_to_recordset(%s::json) AS row(
            job_id bigint, code text, message text, details jsonb, jobs_ahead jsonb, suggestion jsonb,
            decided_at timestamptz, code_since timestamptz)
    ), events AS (
        INSERT INTO portal_jobevent (job_id, at, kind, reason, message, details, before, after, actor)
        SELECT job_id, decided_at, 'verdict', code, message, details, '', '', ''
          FROM verdict WHERE since = decided_at
    )
    INSERT INTO portal_jobverdict AS verdict
           (job_id, code, message, details, jobs_ahead, suggestion, decided_at, code_since)
    SELECT job_id, code, message, numbers, ahead, cheapest, decided_at, since FROM verdict
        ON CONFLICT (job_id) DO UPDATE
       SET code = excluded.code, message = excluded.message, details = excluded.details,
           jobs_ahead = excluded.jobs_ahead, suggestion = excluded.suggestion,
           decided_at = excluded.decided_at, code_since = excluded.code_since
    RETURNING job_id, xmin::text
"""
"""The verdicts of a JSON list; one that is new since then is an event of its job as well."""


def _fetch_verdicts(jobs: Sequence[int] | None) -> Iterator[tuple[int, StoredVerdict]]:
    rows = JobVerdict.objects.all() if jobs is None else JobVerdict.objects.filter(job__in=jobs)
    columns = ("code", "message", "details", "jobs_ahead", "suggestion")
    for row in rows.values("job_id", "decided_at", "code_since", *columns):
        yield (
            row["job_id"],
            StoredVerdict({name: row[name] for name in columns}, row["decided_at"], row["since"]),
        )


class _VerdictColumns:
    """Verdicts as columns; jobs that ask the same share most of theirs."""

    def __init__(self) -> None:
        self._numbers: dict[int, Any] = {}
        self._changes: dict[int, Any] = {}

    def matches(self, stored: dict[str, Any], verdict: Verdict) -> bool:
        """True when these columns say what the verdict of the same code says."""
        return bool(
            stored["message"] == verdict.message[:1000]
            and (stored["numbers"] == verdict.details or stored["numbers"] == self._as_numbers(verdict))
            and stored["ahead"] == list(verdict.jobs_ahead)
            and stored["cheapest"] == self._as_change(verdict)
        )

    def build(self, verdict: Verdict) -> dict[str, Any]:
        """As ``verdict_fields``."""
        return {
            "code": verdict.code.value,
            "message": verdict.message[:1000],
            "numbers": self._as_numbers(verdict),
            "ahead": list(verdict.jobs_ahead),
            "cheapest": self._as_change(verdict),
        }

    def _as_numbers(self, verdict: Verdict) -> Any:
        key = id(verdict.details)
        if key not in self._numbers:
            self._numbers[key] = _as_json(verdict.details)
        return self._numbers[key]

    def _as_change(self, verdict: Verdict) -> Any:
        key = id(verdict.suggestion)
        if key not in self._changes:
            self._changes[key] = change_fields(verdict.suggestion)
        return self._changes[key]


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """A verdict as the columns of a Standing, times left out."""
    return _VerdictColumns().build(verdict)


def change_fields(change: Alternative | None) -> dict[str, Any] | None:
    """A change to a request as JSON."""
    if change is None:
        return None
    return {"kind": change.kind.value, "message": change.message, "fields": _as_json(change.fields)}


def _as_json(value: Any) -> Any:
    """What the value is after it has been through a JSON column, so that it compares equal."""
    if type(value) is dict and all(type(each) in _PLAIN for each in value.values()):
        return value
    return json.loads(json.dumps(value))
