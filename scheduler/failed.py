"""Keeps what a cycle had to decide on when it decided nothing, so that it can be replayed and explained."""

from __future__ import annotations

import datetime as dt
import gzip
import logging
from dataclasses import asdict

from django.db import transaction
from django.utils import timezone

from portal.models import ClusterSettings, FailedCycle
from scheduler import leases
from scheduler.core.check import SnapshotError
from scheduler.core.policy import PolicyError
from scheduler.core.saved import case_to_json
from scheduler.leases import Held
from scheduler.snapshot import Photo
from scheduler.totals import count_failed

log = logging.getLogger(__name__)

KEPT = 20
KEPT_FOR = dt.timedelta(days=30)


def keep_failed(
    leader: Held, settings: ClusterSettings, photo: Photo | None, wrong: Exception, woken_by: str
) -> str:
    """Saves the failed cycle, or counts it if it failed as the one before; gives the sentence of the alarm.

    Raises Deposed when this scheduler has been replaced.
    """
    kind, field, sentence = _told(wrong)
    log.error("a cycle decided nothing: %s", sentence, exc_info=wrong)
    now = timezone.now()
    with transaction.atomic():
        leases.check(leader)
        count_failed()
        newest = FailedCycle.objects.defer("content").order_by("-id").first()
        if newest is not None and settings.alarm and newest.sentence == sentence:
            newest.times, newest.last_at = newest.times + 1, now
            newest.save(update_fields=["times", "last_at"])
            return sentence
        content = _content(photo, settings)
        FailedCycle.objects.create(
            first_at=now,
            last_at=now,
            kind=kind,
            field=field[:300],
            sentence=sentence,
            woken_by=woken_by[:40],
            content=content,
            size_bytes=len(content),
        )
        drop_old_failures()
    return sentence


def drop_old_failures() -> None:
    """Deletes all but the newest 20 of the last 30 days."""
    kept = FailedCycle.objects.filter(last_at__gt=timezone.now() - KEPT_FOR).order_by("-id")
    FailedCycle.objects.exclude(pk__in=list(kept.values_list("pk", flat=True)[:KEPT])).delete()


def _told(wrong: Exception) -> tuple[str, str, str]:
    """Kind, field and the sentence that admins read."""
    match wrong:
        case SnapshotError():
            return "snapshot", wrong.field, _sentence("What it has to decide on cannot be true", str(wrong))
        case PolicyError():
            return "policy", wrong.field, _sentence("A knob of the policy cannot stand", str(wrong))
    fault = f"{type(wrong).__name__}: {wrong}" if str(wrong) else type(wrong).__name__
    return "fault", "", _sentence("Its decision broke with", fault)


def _sentence(what: str, why: str) -> str:
    return f"{what}: {why[:900].rstrip('.')}."


def _content(photo: Photo | None, settings: ClusterSettings) -> bytes:
    """The photograph and the knobs as gzip JSON; empty when even that cannot be written."""
    snapshot = photo.snapshot if photo else None
    knobs = asdict(photo.policy) if photo else settings.policy
    try:
        return gzip.compress(case_to_json(snapshot, knobs).encode(), mtime=0)
    except (TypeError, ValueError, RecursionError) as unsaved:
        log.warning("the failed cycle cannot be saved for replay: %s", unsaved)
        return b""
