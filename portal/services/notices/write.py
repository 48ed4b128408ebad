"""Writes notices to users, with the deliveries that they chose, in the transaction of the event."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.contrib.postgres.expressions import ArraySubquery
from django.db.models import OuterRef, QuerySet
from django.utils import timezone

from portal.domain.notices import (
    DEFAULT_DIGEST_AT,
    DELIVERED_CHANNELS,
    EVENTS,
    MAIL_CHANNELS,
    Channel,
    NoticeKind,
    QuietHours,
    delivery_time,
    subscribed_channels,
)
from portal.live_events import publish_all_on_commit
from portal.models import (
    Job,
    Node,
    Notice,
    NoticeDelivery,
    NoticePreferences,
    NoticeWebhook,
    Project,
    Task,
    User,
)
from portal.outbox import enqueue_task


@dataclass(frozen=True)
class NoticeDraft:
    """A notice to a user (primary key). ``times`` replace their names in braces, in the user's time zone."""

    kind: NoticeKind
    recipient: int
    title: str
    message: str = ""
    job: Job | None = None
    node: Node | None = None
    project: Project | None = None
    times: Mapping[str, dt.datetime] = field(default_factory=dict)


def write_notices(drafts: Sequence[NoticeDraft], only: Channel | None = None) -> list[Notice]:
    """Write notices in the current transaction; open pages and the sender learn of them after commit.

    ``only``: use this channel instead of those that the user chose. Inactive users get none.
    """
    if not drafts:
        return []
    users = {user.pk: user for user in recipients().filter(pk__in={draft.recipient for draft in drafts})}
    now = timezone.now()
    notices: list[Notice] = []
    deliveries: list[NoticeDelivery] = []
    news: list[tuple[str, dict[str, Any]]] = []
    for draft in drafts:
        user = users.get(draft.recipient)
        channels = _channels(user, draft.kind) if only is None and user else {only}
        if user is None or not channels:
            continue
        notice = _notice(draft, user, in_inbox=Channel.INBOX in channels or only is not None)
        notices.append(notice)
        due = {channel: _due_at(channel, draft.kind, user, now) for channel in channels if channel}
        deliveries += [
            NoticeDelivery(notice=notice, channel=channel.value, due_at=due[channel])
            for channel in DELIVERED_CHANNELS
            if channel in due
        ]
        on_desktop = Channel.DESKTOP in channels and _due_at(Channel.EMAIL, draft.kind, user, now) == now
        frame = {
            "kind": "notice",
            "notice": notice.public_id,
            "title": notice.title,
            "message": notice.message,
        }
        news.append((f"inbox.{user.public_id}", frame | {"desktop": on_desktop}))
    Notice.objects.bulk_create(notices)
    NoticeDelivery.objects.bulk_create(deliveries)
    publish_all_on_commit(news)
    if any(delivery.due_at <= now for delivery in deliveries):
        enqueue_task("scheduler.deliver_notices", [], "nodes")
    return notices


def notify_job_owner(
    job: Job, kind: NoticeKind, title: str, message: str, *, actor: str = "", recipient: int | None = None
) -> None:
    """Notify the owner of a job, or ``recipient``, unless the owner did it (``actor`` is the user name)."""
    if not actor or actor != job.owner.username:
        write_notices([NoticeDraft(kind, recipient or job.owner_id, title, message, job=job)])


def notify_users_of_nodes(
    nodes: Sequence[Node], title: str, message: str, times: Mapping[str, dt.datetime] | None = None
) -> None:
    """Notify the owners of the jobs that run on these nodes now."""
    rows = Task.objects.filter(node__in=nodes, container_removed=False).order_by()
    owners = rows.values_list("attempt__job__owner_id", flat=True).distinct()
    node = nodes[0] if len(nodes) == 1 else None
    kind = NoticeKind.NODE_MAINTENANCE
    write_notices(
        [NoticeDraft(kind, owner, title, message, node=node, times=times or {}) for owner in owners]
    )


def recipients() -> QuerySet[Any]:
    """Return the active users with their preferences, and with the channels of their webhooks."""
    hooks = NoticeWebhook.objects.filter(user=OuterRef("pk")).values("channel")
    rows = User.objects.filter(is_active=True).select_related("notice_preferences")
    return rows.annotate(webhook_channels=ArraySubquery(hooks))


def preferences_of(user: User) -> NoticePreferences:
    """Return what the user chose, or an unsaved row with the defaults."""
    chosen: NoticePreferences | None = getattr(user, "notice_preferences", None)
    return chosen or NoticePreferences(user=user, digest_at=DEFAULT_DIGEST_AT)


def can_mail(user: User) -> bool:
    return bool(settings.SMTP_URL and user.email)


def available_channels(user: Any) -> set[Channel]:
    """Return the channels that work for a row of ``recipients``."""
    channels = {Channel.INBOX, Channel.DESKTOP} | {Channel(name) for name in user.webhook_channels}
    return channels | MAIL_CHANNELS if can_mail(user) else channels


def _channels(user: User, kind: NoticeKind) -> set[Channel]:
    chosen = preferences_of(user).channels.get(kind.value)
    return subscribed_channels(kind, chosen) & available_channels(user)


def _due_at(channel: Channel, kind: NoticeKind, user: User, now: dt.datetime) -> dt.datetime:
    preferences = preferences_of(user)
    quiet = None
    if preferences.quiet_start is not None and preferences.quiet_end is not None:
        quiet = QuietHours(preferences.quiet_start, preferences.quiet_end)
    urgent = kind is NoticeKind.TEST or EVENTS[kind].urgent
    local_now = now.astimezone(zoneinfo.ZoneInfo(user.timezone))
    return delivery_time(channel, urgent, local_now, quiet, preferences.digest_at).astimezone(dt.UTC)


def _notice(draft: NoticeDraft, user: User, *, in_inbox: bool) -> Notice:
    title, message = draft.title, draft.message
    for name, at in draft.times.items():
        text = f"{at.astimezone(zoneinfo.ZoneInfo(user.timezone)):%d %b %H:%M}"
        title, message = title.replace(f"{{{name}}}", text), message.replace(f"{{{name}}}", text)
    return Notice(
        recipient=user,
        kind=draft.kind.value,
        title=" ".join(title.split())[:200],
        message=message[:1000],
        job=draft.job,
        node=draft.node,
        project=draft.project,
        in_inbox=in_inbox,
    )
