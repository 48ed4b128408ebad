"""Writes down when attempts saved their work, as their nodes tell it: the only writer of ``checkpoint_at``."""

from __future__ import annotations

import datetime as dt

from django.db.models import Q

from portal.domain.states import LIVE_ATTEMPT_STATES
from portal.live_events import publish_all_on_commit
from portal.models import Attempt
from portal.services.lifecycle.state_events import attempt_topic_event

MIN_UPDATE_INTERVAL = dt.timedelta(seconds=30)
"""The record moves forward by at least this much: who saves all the time is written down twice a minute at most,
and nobody's last save is recorded as more than this much older than it was."""


def reported_at(running_at: dt.datetime, ago_s: float, polled_at: dt.datetime) -> dt.datetime:
    """When an attempt that runs since ``running_at`` said something, ``ago_s`` before its node answered.

    Not later than ``asked_at``, when the node was asked, and not before the attempt ran.
    """
    ran_s = max(0.0, (polled_at - running_at).total_seconds())
    return polled_at - dt.timedelta(seconds=min(max(0.0, ago_s), ran_s))


def record_checkpoint(attempt: Attempt, ago_s: float, *, polled_at: dt.datetime) -> bool:
    """Notes that an attempt saved its work ``ago_s`` seconds before its node answered; True when it was written.

    ``attempt`` comes with its job, as it was read before ``asked_at``, when the node was asked: no save is recorded
    as later than it was. It never moves back, and leaves no event, since a job may save a thousand times.
    """
    if attempt.running_at is None:
        return False
    at = reported_at(attempt.running_at, ago_s, polled_at)
    if attempt.checkpoint_at is not None and at < attempt.checkpoint_at + MIN_UPDATE_INTERVAL:
        return False
    older = Q(checkpoint_at__isnull=True) | Q(checkpoint_at__lte=at - MIN_UPDATE_INTERVAL)
    live = Attempt.objects.filter(older, pk=attempt.pk, state__in=LIVE_ATTEMPT_STATES)
    if not live.update(checkpoint_at=at):
        return False
    publish_all_on_commit([attempt_topic_event(attempt, "checkpoint", "It saved its work.")])
    return True
