"""Records when attempts saved checkpoints, as reported by nodes: the only writer of ``checkpoint_at``."""

from __future__ import annotations

import datetime as dt

from django.db.models import Q

from portal.domain.states import LIVE_ATTEMPT_STATES
from portal.live_events import publish_all_on_commit
from portal.models import Attempt
from portal.services.lifecycle.state_events import attempt_topic_event

MIN_UPDATE_INTERVAL = dt.timedelta(seconds=30)
"""Minimum step of ``checkpoint_at``: at most two writes per minute, and at most this much out of date."""


def reported_at(running_at: dt.datetime, ago_s: float, polled_at: dt.datetime) -> dt.datetime:
    """Return the time of a report that was made ``ago_s`` before the node answered.

    Not later than ``polled_at``, when the node was polled, and not earlier than ``running_at``.
    """
    ran_s = max(0.0, (polled_at - running_at).total_seconds())
    return polled_at - dt.timedelta(seconds=min(max(0.0, ago_s), ran_s))


def record_checkpoint(attempt: Attempt, ago_s: float, *, polled_at: dt.datetime) -> bool:
    """Record a checkpoint ``ago_s`` seconds before the node answered; return True if written.

    ``attempt``, with its job, must have been read before ``polled_at``, so that no checkpoint is dated too
    late. The time never decreases. No event is written, because a job may save thousands of checkpoints.
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
    publish_all_on_commit([attempt_topic_event(attempt, "checkpoint", "It saved a checkpoint.")])
    return True
