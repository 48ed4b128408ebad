"""Keeps the newest verdict of each waiting job in the record: written in bulk, and only where it changed."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

from django.db import connection, transaction
from django.utils import timezone

from portal.events import announce
from portal.models import JobEvent, Standing
from scheduler import leases
from scheduler.core.plan import Change, Verdict
from scheduler.leases import Held
from scheduler.snapshot import Photo

RENEWED_AT_ONCE = 500
"""Of the verdicts with the same code as before, at most so many are written anew in a cycle, the oldest first.

Each sentence holds numbers of its whole pool, so that one start changes those of every job that waits there.
"""
TOLD_AT_ONCE = 200
"""Open pages are told of at most this many changes a cycle; the others poll."""

_PLAIN = (str, int, float, bool, type(None))  # equal to themselves after JSON
_COLUMNS = ("code", "sentence", "numbers", "ahead", "cheapest", "decided_at", "since")


def write_standings(leader: Held, photo: Photo, verdicts: tuple[Verdict, ...]) -> int:
    """Writes the verdicts that changed since the photo, and gives how many it wrote. Raises Deposed."""
    now = timezone.now()
    changed: list[Standing] = []
    renewed: list[tuple[dt.datetime, Standing]] = []  # with when each was last written
    events: list[JobEvent] = []
    told: list[Verdict] = []
    for verdict in verdicts:
        fields = verdict_fields(verdict)
        before = photo.standings.get(verdict.job)
        if before is not None and all(before[key] == value for key, value in fields.items()):
            continue
        row = photo.pending_rows[verdict.job]
        if before is not None and before["code"] == fields["code"]:
            standing = Standing(job_id=row, decided_at=now, since=before["since"], **fields)
            renewed.append((before["decided_at"], standing))
            continue
        changed.append(Standing(job_id=row, decided_at=now, since=now, **fields))
        events.append(
            JobEvent(
                job_id=row,
                kind="verdict",
                reason=fields["code"],
                sentence=fields["sentence"],
                facts=fields["numbers"],
            )
        )
        told.append(verdict)
    renewed.sort(key=lambda each: (each[0], each[1].job_id))
    changed += [standing for _, standing in renewed[:RENEWED_AT_ONCE]]
    if changed:
        with transaction.atomic():
            leases.check(leader)
            Standing.objects.bulk_create(
                changed,
                batch_size=1000,
                update_conflicts=True,
                unique_fields=["job"],
                update_fields=list(_COLUMNS),
            )
            JobEvent.objects.bulk_create(events, batch_size=1000)
            _drop_of_started()
            for verdict in told[:TOLD_AT_ONCE]:
                announce(
                    f"job.{verdict.job}",
                    {"kind": "verdict", "code": verdict.code.value, "sentence": verdict.sentence},
                )
    return len(changed)


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """A verdict as the columns of a Standing, times left out."""
    return {
        "code": verdict.code.value,
        "sentence": verdict.sentence[:1000],
        "numbers": _as_json(verdict.numbers),
        "ahead": list(verdict.ahead),
        "cheapest": change_fields(verdict.cheapest),
    }


def change_fields(change: Change | None) -> dict[str, Any] | None:
    """A change to a request as JSON."""
    if change is None:
        return None
    return {"kind": change.kind.value, "sentence": change.sentence, "fields": _as_json(change.fields)}


def _as_json(value: Any) -> Any:
    """What the value is after it has been through a JSON column, so that it compares equal."""
    if type(value) is dict and all(type(each) in _PLAIN for each in value.values()):
        return value
    return json.loads(json.dumps(value))


def _drop_of_started() -> None:
    """Verdicts of jobs that left the queue while the plan was made."""
    with connection.cursor() as cursor:
        cursor.execute(
            "DELETE FROM portal_standing USING portal_job job"
            " WHERE job.id = portal_standing.job_id AND job.state <> 'PENDING'"
        )
