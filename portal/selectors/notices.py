"""Reads a user's own notices and their deliveries."""

from __future__ import annotations

from django.db.models import QuerySet

from portal.access import Requester, own_notices, require_user
from portal.domain.notices import EVENTS, NoticeSubject
from portal.models import Notice, NoticeDelivery
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
    return get_first(list_notices(requester).filter(public_id=public_id), "There is no such notice.")


def list_deliveries(requester: Requester) -> QuerySet[NoticeDelivery]:
    """Return the deliveries of the user's notices, newest first."""
    rows = NoticeDelivery.objects.filter(notice__recipient=require_user(requester))
    return rows.select_related("notice").order_by("-id")
