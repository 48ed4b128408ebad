"""Writes announcements."""

from __future__ import annotations

import datetime as dt

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import require_admin
from portal.errors import InvalidRequest
from portal.models import Announcement, User
from portal.selectors.lookup import get_first
from portal.selectors.notices.announcements import current_announcements
from portal.services.audit import record_action

MAX_LENGTH = 500
MAX_PERIOD = dt.timedelta(days=366)


def do_announce(actor: User, message: str, ends_at: dt.datetime) -> Announcement:
    """Show a message to all users until ``ends_at``. Raise InvalidRequest by field."""
    require_admin(actor, "write announcements")
    text, now = message.strip(), timezone.now()
    wrong = {}
    if not text or len(text) > MAX_LENGTH or "\0" in text:
        wrong["message"] = _("Enter 1 to {max_length} characters.").format(max_length=MAX_LENGTH)
    if not now < ends_at <= now + MAX_PERIOD:
        wrong["ends_at"] = _("It must end within the next 366 days.")
    if wrong:
        raise InvalidRequest(fields=wrong)
    with transaction.atomic():
        row = Announcement.objects.create(message=text, ends_at=ends_at, created_by=actor)
        after = {"message": text, "ends_at": ends_at.isoformat()}
        record_action(actor, "announcement.create", row, after=after)
    return row


def do_withdraw_announcement(actor: User, public_id: str) -> None:
    """Delete an announcement that has not ended. Raise NotFound."""
    require_admin(actor, "withdraw announcements")
    with transaction.atomic():
        rows = current_announcements().select_for_update().filter(public_id=public_id)
        row = get_first(rows, _("There is no such announcement."))
        record_action(actor, "announcement.withdraw", row, before={"message": row.message})
        row.delete()
