"""Reads a user's own notices and their deliveries."""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from portal.access import Requester, own_notices, project_ids, require_user
from portal.domain.notices.notices import EVENTS, NoticeSubject
from portal.domain.states import Role
from portal.models import Notice, NoticeDelivery, NoticeWebhook
from portal.selectors.lookup import get_first


def list_notices(
    requester: Requester, *, unread: bool = False, subject: NoticeSubject | None = None
) -> QuerySet[Notice]:
    """Return the user's inbox, newest first."""
    rows = own_notices(requester).filter(in_inbox=True)
    if unread:
        rows = rows.filter(read_at__isnull=True)
    if subject is not None:
        rows = rows.filter(kind__in=[kind for kind, event in EVENTS.items() if event.subject is subject])
    return rows.select_related("job", "node", "project").order_by("-id")


def get_notice(requester: Requester, public_id: str) -> Notice:
    """Return a notice of the user. Raise NotFound."""
    return get_first(list_notices(requester).filter(public_id=public_id), _("There is no such notice."))


def list_deliveries(requester: Requester) -> QuerySet[NoticeDelivery]:
    """Return the deliveries of the user's notices, newest first."""
    rows = NoticeDelivery.objects.filter(notice__recipient=require_user(requester))
    return rows.select_related("notice").order_by("-id")


def shared_webhooks(requester: Requester) -> QuerySet[NoticeWebhook]:
    """Return the webhooks of projects that the user manages; for administrators also those of the cluster."""
    user = require_user(requester)
    rows = NoticeWebhook.objects.filter(user=None).select_related("project").order_by("-id")
    return rows if user.is_admin else rows.filter(project__in=project_ids(user, Role.MANAGER))


def get_shared_webhook(requester: Requester, public_id: str) -> NoticeWebhook:
    """Raise NotFound."""
    return get_first(shared_webhooks(requester).filter(public_id=public_id), _("There is no such webhook."))


def list_webhook_deliveries(webhooks: Iterable[NoticeWebhook]) -> QuerySet[NoticeDelivery]:
    """Return the deliveries to these webhooks, newest first."""
    return NoticeDelivery.objects.filter(webhook__in=webhooks).select_related("notice").order_by("-id")
