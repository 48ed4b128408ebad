"""Writes notices to users, with the deliveries that they chose, in the transaction of the event."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone

from portal.domain.notices.notices import (
    DEFAULT_DIGEST_AT,
    EVENTS,
    JOB_EVENTS,
    MAIL_CHANNELS,
    Channel,
    DeliveryState,
    NoticeKind,
    QuietHours,
    delivery_time,
    job_channels,
)
from portal.domain.projects.project_tree import path_to_root
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
    """A notice to a user (primary key). ``times`` replace their names in braces, in the user's time zone.

    ``hold``: outside of the portal it is sent after this time, or when ``send_held`` is called.
    """

    kind: NoticeKind
    recipient: int | None
    title: str
    message: str = ""
    job: Job | None = None
    node: Node | None = None
    project: Project | None = None
    times: Mapping[str, dt.datetime] = field(default_factory=dict)
    hold: dt.timedelta = dt.timedelta(0)


def write_notices(drafts: Sequence[NoticeDraft], only: Channel | None = None) -> list[Notice]:
    """Write notices in the current transaction; open pages and the sender learn of them after commit.

    ``only``: use this channel instead of those that the user chose. Inactive users get none. Webhooks of projects
    and the cluster get each event once, also one without a recipient.
    """
    if not drafts:
        return []
    user_ids = {draft.recipient for draft in drafts if draft.recipient is not None}
    users = {user.pk: user for user in recipients().filter(pk__in=user_ids)}
    now = timezone.now()
    notices: list[Notice] = []
    deliveries: list[NoticeDelivery] = []
    news: list[tuple[str, dict[str, Any]]] = []
    for draft in drafts:
        user = users.get(draft.recipient or 0)
        channels = _channels(user, draft) if only is None and user else {only}
        if user is None or not channels:
            continue
        notice = _notice(draft, user, in_inbox=Channel.INBOX in channels or only is not None)
        notices.append(notice)
        due = {
            channel: max(_due_at(channel, draft.kind, user, now), now + draft.hold)
            for channel in channels
            if channel
        }
        deliveries += [
            NoticeDelivery(notice=notice, channel=channel.value, due_at=due[channel])
            for channel in sorted(MAIL_CHANNELS & due.keys())
        ]
        deliveries += [
            NoticeDelivery(
                notice=notice, channel=hook.channel, due_at=due[Channel(hook.channel)], webhook=hook
            )
            for hook in user.notice_webhooks.all()
            if hook.channel in due
        ]
        on_desktop = Channel.DESKTOP in channels and _due_at(Channel.EMAIL, draft.kind, user, now) == now
        frame = {
            "kind": "notice",
            "notice": notice.public_id,
            "title": notice.title,
            "message": notice.message,
        }
        news.append((f"inbox.{user.public_id}", frame | {"desktop": on_desktop}))
    for draft, notice, hooks in _webhook_notices(drafts):
        notices.append(notice)
        deliveries += [
            NoticeDelivery(notice=notice, channel=hook.channel, due_at=now + draft.hold, webhook=hook)
            for hook in hooks
        ]
    Notice.objects.bulk_create(notices)
    NoticeDelivery.objects.bulk_create(deliveries)
    publish_all_on_commit(news)
    if any(delivery.due_at <= now for delivery in deliveries):
        enqueue_task("scheduler.deliver_notices", [], "nodes")
    return notices


def send_held(notices: QuerySet[Notice], hold: dt.timedelta) -> None:
    """Send what still waits of notices that were written with ``hold``. Must run in a transaction."""
    now = timezone.now()
    waiting = NoticeDelivery.objects.filter(
        notice__in=notices,
        state=DeliveryState.PENDING.value,
        attempt_count=0,
        due_at__gt=now,
        due_at__lte=now + hold,
    )
    if waiting.update(due_at=now):
        enqueue_task("scheduler.deliver_notices", [], "nodes")


def notify_job_owner(
    job: Job, kind: NoticeKind, title: str, message: str, *, actor: str = "", recipient: int | None = None
) -> None:
    """Notify the owner of a job, or ``recipient``, unless the owner did it (``actor`` is the user name)."""
    if not actor or actor != job.owner.username:
        write_notices([NoticeDraft(kind, recipient or job.owner_id, title, message, job=job)])


def set_up_webhooks(owner: User | Project | None) -> QuerySet[NoticeWebhook]:
    """Return the webhooks of a user, a project, or the cluster (None), without browsers."""
    rows = NoticeWebhook.objects.exclude(channel=Channel.PUSH.value)
    if isinstance(owner, User):
        return rows.filter(user=owner)
    return rows.filter(user=None, project=owner)


def write_test(hook: NoticeWebhook, title: str, message: str) -> Notice:
    """Write a test for a webhook of a project or the cluster."""
    draft = NoticeDraft(NoticeKind.TEST, None, title, message, project=hook.project)
    notice = _notice(draft, None, in_inbox=False)
    notice.save()
    NoticeDelivery.objects.create(notice=notice, channel=hook.channel, due_at=timezone.now(), webhook=hook)
    enqueue_task("scheduler.deliver_notices", [], "nodes")
    return notice


def notify_users_of_nodes(
    nodes: Sequence[Node], title: str, message: str, times: Mapping[str, dt.datetime] | None = None
) -> None:
    """Notify the owners of the jobs that run on these nodes now."""
    rows = Task.objects.filter(node__in=nodes, container_removed=False).order_by()
    owners = rows.values_list("attempt__job__owner_id", flat=True).distinct()
    node = nodes[0] if len(nodes) == 1 else None
    kind = NoticeKind.NODE_MAINTENANCE
    write_notices(
        [NoticeDraft(kind, owner, title, message, node=node, times=times or {}) for owner in (*owners, None)]
    )


def recipients() -> QuerySet[Any]:
    """Return the active users with their preferences, and with the channels of their webhooks."""
    rows = User.objects.filter(is_active=True).select_related("notice_preferences")
    return rows.prefetch_related("notice_webhooks")


def preferences_of(user: User) -> NoticePreferences:
    """Return what the user chose, or an unsaved row with the defaults."""
    chosen: NoticePreferences | None = getattr(user, "notice_preferences", None)
    return chosen or NoticePreferences(user=user, digest_at=DEFAULT_DIGEST_AT)


def can_mail(user: User) -> bool:
    return bool(settings.SMTP_URL and user.email)


def available_channels(user: Any) -> set[Channel]:
    """Return the channels that work for a row of ``recipients``."""
    channels = {Channel.INBOX, Channel.DESKTOP} | {
        Channel(hook.channel) for hook in user.notice_webhooks.all()
    }
    return channels | MAIL_CHANNELS if can_mail(user) else channels


def _channels(user: User, draft: NoticeDraft) -> set[Channel]:
    chosen = preferences_of(user).channels.get(draft.kind.value)
    notify = draft.job.notify if draft.job and draft.kind in JOB_EVENTS else ()
    return job_channels(draft.kind, chosen, notify) & available_channels(user)


def _webhook_notices(
    drafts: Sequence[NoticeDraft],
) -> Iterator[tuple[NoticeDraft, Notice, list[NoticeWebhook]]]:
    """Return a notice of each event that webhooks of the project, of one above it, or of the cluster get."""
    hooks = list(NoticeWebhook.objects.filter(user=None, events__has_any_keys=[d.kind.value for d in drafts]))
    if not hooks:
        return
    parents: dict[int, int | None] = {}
    if any(hook.project_id for hook in hooks):
        parents = dict(Project.objects.values_list("id", "parent_id"))
    seen = set()
    for draft in drafts:
        subject = (draft.kind, draft.title, draft.job and draft.job.pk, draft.project and draft.project.pk)
        if subject in seen:  # to another user
            continue
        seen.add(subject)
        direct = draft.project.pk if draft.project else None
        project: int | None = draft.job.project_id if draft.job else direct
        line = {None, *path_to_root(project, parents.get)}
        mine = [hook for hook in hooks if draft.kind in hook.events and hook.project_id in line]
        if mine:
            yield draft, _notice(draft, None, in_inbox=False), mine


def _due_at(channel: Channel, kind: NoticeKind, user: User, now: dt.datetime) -> dt.datetime:
    preferences = preferences_of(user)
    quiet = None
    if preferences.quiet_start is not None and preferences.quiet_end is not None:
        quiet = QuietHours(preferences.quiet_start, preferences.quiet_end)
    urgent = kind is NoticeKind.TEST or EVENTS[kind].urgent
    local_now = now.astimezone(zoneinfo.ZoneInfo(user.timezone))
    return delivery_time(channel, urgent, local_now, quiet, preferences.digest_at).astimezone(dt.UTC)


def _notice(draft: NoticeDraft, user: User | None, *, in_inbox: bool) -> Notice:
    title, message = draft.title, draft.message
    for name, at in draft.times.items():
        zone = zoneinfo.ZoneInfo(user.timezone) if user else dt.UTC
        text = f"{at.astimezone(zone):%d %b %H:%M}{'' if user else ' UTC'}"
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
