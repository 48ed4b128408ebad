"""Notices to users: which events and channels exist, who gets what by default, and when it is sent."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class NoticeKind(StrEnum):
    """The event that a notice is about."""

    JOB_STARTED = "job_started"
    JOB_ENDED = "job_ended"
    JOB_FAILED = "job_failed"
    JOB_PREEMPTED = "job_preempted"
    RECLAIM_WARNING = "reclaim_warning"
    IDLE_WARNING = "idle_warning"
    TIME_LIMIT_WARNING = "time_limit_warning"
    QUOTA_CHANGED = "quota_changed"
    FOLDER_NEARLY_FULL = "folder_nearly_full"
    REQUEST_ANSWERED = "request_answered"
    NODE_MAINTENANCE = "node_maintenance"
    TEST = "test"


class Channel(StrEnum):
    """A way to a user. ``digest`` is e-mail once a day."""

    INBOX = "inbox"
    DESKTOP = "desktop"
    PUSH = "push"
    EMAIL = "email"
    DIGEST = "digest"
    WEBHOOK = "webhook"
    SLACK = "slack"
    TEAMS = "teams"


MAIL_CHANNELS = frozenset({Channel.EMAIL, Channel.DIGEST})
WEBHOOK_CHANNELS = (Channel.WEBHOOK, Channel.SLACK, Channel.TEAMS)
DELIVERED_CHANNELS = (*sorted(MAIL_CHANNELS), *WEBHOOK_CHANNELS, Channel.PUSH)
"""Channels with a row for each delivery; the others are in the portal itself."""
CHANNEL_LABELS = {
    Channel.INBOX: "Inbox",
    Channel.DESKTOP: "Desktop",
    Channel.PUSH: "Push",
    Channel.EMAIL: "E-mail",
    Channel.DIGEST: "Digest",
    Channel.WEBHOOK: "Webhook",
    Channel.SLACK: "Slack",
    Channel.TEAMS: "Teams",
}


class DeliveryState(StrEnum):
    PENDING = "pending"
    SENT = "sent"
    FAILED = "failed"


class NoticeSubject(StrEnum):
    """The filter of the inbox to which an event belongs."""

    JOBS = "jobs"
    QUOTAS = "quotas"
    REQUESTS = "requests"
    NODES = "nodes"


@dataclass(frozen=True)
class NoticeEvent:
    """An event that users choose channels for. An ``urgent`` one is always in the inbox and ignores quiet hours."""

    label: str
    subject: NoticeSubject
    icon: str
    default: frozenset[Channel]
    urgent: bool = False


_QUIET = frozenset({Channel.INBOX})
_MAILED = _QUIET | {Channel.EMAIL}
EVENTS: dict[NoticeKind, NoticeEvent] = {
    NoticeKind.JOB_STARTED: NoticeEvent("Job started", NoticeSubject.JOBS, "running", _QUIET),
    NoticeKind.JOB_ENDED: NoticeEvent("Job ended", NoticeSubject.JOBS, "done", _QUIET),
    NoticeKind.JOB_FAILED: NoticeEvent("Job failed", NoticeSubject.JOBS, "failed", _MAILED, urgent=True),
    NoticeKind.JOB_PREEMPTED: NoticeEvent(
        "Job preempted or queued again", NoticeSubject.JOBS, "waiting", _QUIET
    ),
    NoticeKind.RECLAIM_WARNING: NoticeEvent(
        "GPUs are taken back", NoticeSubject.JOBS, "warning", _MAILED, urgent=True
    ),
    NoticeKind.IDLE_WARNING: NoticeEvent("Idle workspace", NoticeSubject.JOBS, "idle", _MAILED),
    NoticeKind.TIME_LIMIT_WARNING: NoticeEvent("Time limit is near", NoticeSubject.JOBS, "warning", _MAILED),
    NoticeKind.QUOTA_CHANGED: NoticeEvent("Quota changed", NoticeSubject.QUOTAS, "reserved", _QUIET),
    NoticeKind.FOLDER_NEARLY_FULL: NoticeEvent(
        "Folder nearly full", NoticeSubject.QUOTAS, "warning", _MAILED
    ),
    NoticeKind.REQUEST_ANSWERED: NoticeEvent("Request answered", NoticeSubject.REQUESTS, "done", _QUIET),
    NoticeKind.NODE_MAINTENANCE: NoticeEvent("Node maintenance", NoticeSubject.NODES, "reserved", _QUIET),
}
PROJECT_EVENTS = [
    kind for kind, event in EVENTS.items() if event.subject in (NoticeSubject.JOBS, NoticeSubject.QUOTAS)
]
"""Events of the webhooks of a project."""
CLUSTER_EVENTS = [*PROJECT_EVENTS, NoticeKind.NODE_MAINTENANCE]
NO_NOTICES = "none"
JOB_EVENTS = [kind.value for kind, event in EVENTS.items() if event.subject is NoticeSubject.JOBS]
"""Events that a job may name in ``notify``."""
DEFAULT_DIGEST_AT = dt.time(8)

RETRY_BASE_S, RETRY_MAX_S = 30.0, 900.0
MAX_DELIVERY_ATTEMPTS = 200
"""About two days; a server that is down for less loses nothing."""


class QuietHours(NamedTuple):
    """Local times between which e-mails and push messages are held; may pass midnight."""

    start: dt.time
    end: dt.time

    def includes(self, at: dt.time) -> bool:
        if self.start < self.end:
            return self.start <= at < self.end
        return at >= self.start or at < self.end


def subscribed_channels(kind: NoticeKind, chosen: Collection[str] | None) -> set[Channel]:
    """Return the channels of an event, given the user's choice; None: the default."""
    event = EVENTS[kind]
    channels = set(event.default) if chosen is None else {Channel(name) for name in chosen}
    return channels | {Channel.INBOX} if event.urgent else channels


def job_channels(kind: NoticeKind, chosen: Collection[str] | None, notify: Collection[str]) -> set[Channel]:
    """Return the channels of an event of a job that names its events in ``notify``; empty: as the user chose.

    A named event is also sent by e-mail, at once. Others are at most in the inbox, where urgent ones always are.
    """
    channels = subscribed_channels(kind, chosen)
    if not notify:
        return channels
    if kind in notify:
        return channels - MAIL_CHANNELS | {Channel.INBOX, Channel.EMAIL}
    return {Channel.INBOX} if EVENTS[kind].urgent else set()


def delivery_time(
    channel: Channel, urgent: bool, local_now: dt.datetime, quiet: QuietHours | None, digest_at: dt.time
) -> dt.datetime:
    """Return when a delivery is due; ``local_now`` is in the user's time zone, and so is the result."""
    if channel is Channel.DIGEST:
        return _next(local_now, digest_at)
    if channel in (Channel.EMAIL, Channel.PUSH) and quiet and not urgent and quiet.includes(local_now.time()):
        return _next(local_now, quiet.end)
    return local_now


def _next(local_now: dt.datetime, at: dt.time) -> dt.datetime:
    """Return the next occurrence of a wall-clock time."""
    found = local_now.replace(hour=at.hour, minute=at.minute, second=0, microsecond=0)
    return found if found > local_now else found + dt.timedelta(days=1)
