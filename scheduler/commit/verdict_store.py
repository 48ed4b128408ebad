"""Stores the newest verdict of each pending job in bulk, and writes only changes."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop
from typing import Any, TypeVar

from django.db import connection, transaction
from django.utils import timezone

from portal.live_events import publish_all_on_commit
from portal.models import JobVerdict
from scheduler import leases
from scheduler.core.model.plan import Alternative, Verdict
from scheduler.leases import HeldLease
from scheduler.snapshot.row_cache import RowCache, row_version_blocks

MAX_REFRESHED = 500
"""Verdicts with an unchanged code that are rewritten per cycle at most, the oldest first.

Messages contain totals of the pool, so one start changes the message of every job pending there.
"""
MAX_ANNOUNCED = 200
"""Changes per cycle that are pushed to open pages at most; pages poll for the rest."""

MAX_BATCH = 2_000
"""Verdicts per transaction at most."""

Shared = TypeVar("Shared")

_PLAIN = (str, int, float, bool, type(None))  # types that a JSON round trip does not change


@dataclass(frozen=True, slots=True)
class StoredVerdict:
    """The stored verdict of a pending job; ``since`` is when its code last changed."""

    columns: dict[str, Any]
    decided_at: dt.datetime
    since: dt.datetime


class VerdictStore:
    """Access to the stored verdicts, with a cache that rereads only rows written by other processes."""

    def __init__(self) -> None:
        self._cache = RowCache[StoredVerdict]()
        self._announced_count = 0  # changes announced so far in this series of ``continued`` writes

    def read(self) -> dict[int, StoredVerdict]:
        """Return the stored verdicts by primary key of the job."""
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
        """Write the changed verdicts and return their number. Raise LeaseLostError.

        ``jobs`` maps the ids of all pending jobs to primary keys. Of verdicts whose code is unchanged, at
        most ``max_refreshed`` (default ``MAX_REFRESHED``) are rewritten. With ``continued``, rows are not
        read again.
        """
        now = timezone.now()
        before = self._cache.rows if continued else self.read()
        fields = _VerdictColumns()
        changed: list[tuple[int, StoredVerdict]] = []
        code_changes: list[Verdict] = []
        others: list[tuple[dt.datetime, int, Verdict]] = []  # with the time of the last write
        for verdict in verdicts:
            row = jobs.get(verdict.job)
            if row is None:  # a running elastic job that is pending only for more tasks
                continue
            old = before.get(row)
            if old is None or old.columns["code"] != verdict.code.value:
                changed.append((row, StoredVerdict(fields.build(verdict), now, now)))
                code_changes.append(verdict)
            else:
                others.append((old.decided_at, row, verdict))
        most = len(changed) + (MAX_REFRESHED if max_refreshed is None else max_refreshed)
        heapify(others)  # the oldest first
        while others and len(changed) < most:
            _, row, verdict = heappop(others)
            if not fields.matches(before[row].columns, verdict):
                changed.append((row, StoredVerdict(fields.build(verdict), now, before[row].since)))
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
        """Write in one transaction; delete the verdicts of jobs that are no longer pending."""
        text = cache(dt.datetime.isoformat)  # nearly all share one timestamp
        rows = [
            {
                "job_id": row,
                "decided_at": text(stored.decided_at),
                "code_since": text(stored.since),
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


_WRITE = """
    WITH verdict AS MATERIALIZED (
        SELECT * FROM json_to_recordset(%s::json) AS row(
            job_id bigint, code text, message text, details jsonb, jobs_ahead jsonb, suggestion jsonb,
            decided_at timestamptz, code_since timestamptz)
    ), events AS (
        INSERT INTO portal_jobevent (job_id, at, kind, reason, message, details, before, after, actor)
        SELECT job_id, decided_at, 'verdict', code, message, details, '', '', ''
          FROM verdict WHERE code_since = decided_at
    )
    INSERT INTO portal_jobverdict AS verdict
           (job_id, code, message, details, jobs_ahead, suggestion, decided_at, code_since)
    SELECT job_id, code, message, details, jobs_ahead, suggestion, decided_at, code_since FROM verdict
        ON CONFLICT (job_id) DO UPDATE
       SET code = excluded.code, message = excluded.message, details = excluded.details,
           jobs_ahead = excluded.jobs_ahead, suggestion = excluded.suggestion,
           decided_at = excluded.decided_at, code_since = excluded.code_since
    RETURNING job_id, xmin::text
"""
"""Upserts the verdicts of a JSON list, and adds an event to a job whose code changed."""


def _fetch_verdicts(jobs: Sequence[int] | None) -> Iterator[tuple[int, StoredVerdict]]:
    rows = JobVerdict.objects.all() if jobs is None else JobVerdict.objects.filter(job__in=jobs)
    columns = ("code", "message", "details", "jobs_ahead", "suggestion")
    for row in rows.values("job_id", "decided_at", "code_since", *columns):
        yield (
            row["job_id"],
            StoredVerdict({name: row[name] for name in columns}, row["decided_at"], row["code_since"]),
        )


class _VerdictColumns:
    """Builds verdict columns; the JSON of shared ``details`` and ``suggestion`` objects is built once."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def matches(self, stored: dict[str, Any], verdict: Verdict) -> bool:
        """Return True when the stored columns equal those of a verdict with the same code."""
        return bool(
            stored["message"] == verdict.message[:1000]
            and (
                stored["details"] == verdict.details
                or stored["details"] == self._json(verdict.details, _as_json)
            )
            and stored["jobs_ahead"] == list(verdict.jobs_ahead)
            and stored["suggestion"] == self._json(verdict.suggestion, change_fields)
        )

    def build(self, verdict: Verdict) -> dict[str, Any]:
        return {
            "code": verdict.code.value,
            "message": verdict.message[:1000],
            "details": self._json(verdict.details, _as_json),
            "jobs_ahead": list(verdict.jobs_ahead),
            "suggestion": self._json(verdict.suggestion, change_fields),
        }

    def _json(self, value: Shared, convert: Callable[[Shared], Any]) -> Any:
        key = id(value)
        if key not in self._known:
            self._known[key] = convert(value)
        return self._known[key]


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """Return the columns of a JobVerdict, without times."""
    return _VerdictColumns().build(verdict)


def change_fields(change: Alternative | None) -> dict[str, Any] | None:
    """Return a suggested change of a request as JSON."""
    if change is None:
        return None
    return {
        "kind": change.kind.value,
        "message": change.message,
        "change": change.change,
        "fields": _as_json(change.fields),
    }


def _as_json(value: Any) -> Any:
    """Return the value as it reads back from a JSON column, so that it compares equal."""
    if type(value) is dict and all(type(each) in _PLAIN for each in value.values()):
        return value
    return json.loads(json.dumps(value))
