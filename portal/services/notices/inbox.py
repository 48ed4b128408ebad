"""What users do with their notices: reading, preferences, tests; and the deletion of old ones."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence

from django.db import transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.domain.cluster.retention_settings import NOTICE_RETENTION
from portal.domain.notices.notices import (
    CHANNEL_LABELS,
    EVENTS,
    MAIL_CHANNELS,
    Channel,
    DeliveryState,
    NoticeKind,
)
from portal.domain.scheduling.policy_settings import default_value
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict, InvalidRequest
from portal.live_events import publish_on_commit
from portal.models import Notice, NoticeDelivery, NoticePreferences, User
from portal.outbox import enqueue_task
from portal.selectors.lookup import get_first
from portal.selectors.notices.notices import shared_webhooks
from portal.selectors.scheduling.settings import cluster_settings
from portal.services.audit import record_action
from portal.services.notices.write import (
    NoticeDraft,
    available_channels,
    recipients,
    write_notices,
)

UNREAD_RETENTION = dt.timedelta(days=365)
MAX_DELETED = 20_000


def do_mark_read(user: User, notices: QuerySet[Notice]) -> int:
    """Mark those of one's own notices as read; return how many were unread. Repeatable."""
    with transaction.atomic():
        count = notices.filter(recipient=user, read_at__isnull=True).update(read_at=Now())
        if count:
            publish_on_commit(f"inbox.{user.public_id}", {"kind": "notices_read"})
    return count


def do_save_preferences(
    user: User,
    channels: Mapping[str, Sequence[str]],
    *,
    quiet_start: dt.time | None,
    quiet_end: dt.time | None,
    digest_at: dt.time,
) -> NoticePreferences:
    """Set one's own channels by event, quiet hours and time of the digest; other events have the default.

    Raise InvalidRequest by field.
    """
    wrong: dict[str, str] = {}
    for name, chosen in channels.items():
        if name not in EVENTS or not set(chosen) <= set(Channel):
            wrong["channels"] = _("There is no such event or channel.")
        elif set(chosen) >= MAIL_CHANNELS:
            wrong["channels"] = _("Choose e-mail at once or in the digest, not both.")
    if (quiet_start is None) != (quiet_end is None):
        wrong["quiet_end" if quiet_end is None else "quiet_start"] = _("Enter both times, or none.")
    elif quiet_start is not None and quiet_start == quiet_end:
        wrong["quiet_end"] = _("Must differ from the start.")
    if wrong:
        raise InvalidRequest(fields=wrong)
    values = {"quiet_start": quiet_start, "quiet_end": quiet_end, "digest_at": digest_at}
    stored = {name: sorted(set(chosen)) for name, chosen in channels.items()}
    with transaction.atomic():
        row, __ = NoticePreferences.objects.update_or_create(
            user=user, defaults=values | {"channels": stored}
        )
        times = {name: at.isoformat("minutes") if at else None for name, at in values.items()}
        record_action(user, "user.notice_preferences", user, after={"channels": stored} | times)
    return row


def do_send_test(user: User, channel: Channel) -> Notice:
    """Send oneself a notice over one channel. Raise Conflict if it is not set up, or a test is on its way."""
    channel_text = CHANNEL_LABELS[channel]
    with transaction.atomic():
        User.objects.select_for_update(no_key=True).get(pk=user.pk)
        if channel not in available_channels(recipients().get(pk=user.pk)) or channel is Channel.DIGEST:
            raise Conflict(
                _("The channel {label} is not set up.").format(label=channel_text), code="channel_unavailable"
            )
        pending = NoticeDelivery.objects.filter(notice__recipient=user, state=DeliveryState.PENDING.value)
        if pending.filter(channel=channel.value, notice__kind=NoticeKind.TEST.value).exists():
            raise Conflict(
                _("A test over {label} is already on its way.").format(label=channel_text),
                code="test_pending",
            )
        message = stored_text("You asked for this test on the page Inbox.")
        draft = NoticeDraft(NoticeKind.TEST, user.pk, stored_text(f"Test of {channel_text}"), message)
        (notice,) = write_notices([draft], only=channel)
    return notice


def do_retry_delivery(user: User, public_id: str) -> None:
    """Try a failed delivery again now: one's own, or to a webhook that one manages. Raise NotFound.

    A claim of a sender stays.
    """
    deliveries = NoticeDelivery.objects.filter(
        Q(notice__recipient=user) | Q(webhook__in=shared_webhooks(user).values("pk"))
    )
    with transaction.atomic():
        locked = deliveries.select_for_update(of=("self",), no_key=True)
        failed = locked.exclude(state=DeliveryState.SENT.value).exclude(last_error="")
        row = get_first(failed.filter(public_id=public_id), _("There is no such delivery to try again."))
        row.state, row.due_at, row.finished_at = DeliveryState.PENDING.value, timezone.now(), None
        row.save(update_fields=["state", "due_at", "finished_at"])
        enqueue_task("scheduler.deliver_notices", [], "nodes")


def delete_old_notices() -> int:
    """Delete notices that were read and are older than the setting, and those that nobody read in a year."""
    days = float(cluster_settings().get(NOTICE_RETENTION, default_value(NOTICE_RETENTION)))
    now = timezone.now()
    read = Q(read_at__isnull=False) | Q(in_inbox=False)
    old = Q(read, created_at__lt=now - dt.timedelta(days=days)) | Q(created_at__lt=now - UNREAD_RETENTION)
    ids = list(Notice.objects.filter(old).order_by("created_at").values_list("pk", flat=True)[:MAX_DELETED])
    Notice.objects.filter(pk__in=ids).delete()
    return len(ids)
