"""How long a sign-in lasts: it ends after hours without use, and after days in any case.

The row's ``expire_date`` carries both, so pages, sockets and workspaces ask nothing else.
"""

from __future__ import annotations

import datetime as dt
import time

from django.conf import settings
from django.contrib.sessions.backends.base import SessionBase
from django.contrib.sessions.models import Session
from django.utils import timezone
from django.utils.dateparse import parse_datetime

KEPT_EVERY_S = 300
"""A session in use is written at most this often."""


def begin_session(session: SessionBase, *, address: str, agent: str) -> None:
    """Notes when and from where somebody came in."""
    session["since"] = timezone.now().isoformat()
    session["address"], session["agent"] = address, agent[:300]
    session["seen"] = int(time.time())


def keep_session(session: SessionBase) -> None:
    """The person asked for a page: the session lasts on, but never longer than its longest life."""
    since = _since(session.get("since"))
    if since is None or time.time() - session.get("seen", 0) < KEPT_EVERY_S:
        return
    session["seen"] = int(time.time())
    session.set_expiry(max(1, round((_end(since) - timezone.now()).total_seconds())))


def keep_session_of_workspace(session_key: str) -> None:
    """The person works in a workspace, whose traffic never reaches the portal's pages: it lasts on likewise."""
    row = Session.objects.filter(session_key=session_key, expire_date__gt=timezone.now()).first()
    since = _since(row.get_decoded().get("since")) if row else None
    if row is not None and since is not None and _end(since) > row.expire_date:
        # only this column: what a page writes into the session meanwhile must not be undone
        Session.objects.filter(session_key=session_key).update(expire_date=_end(since))


def longest_end() -> dt.datetime:
    """When a session that begins now ends at the latest."""
    return timezone.now() + dt.timedelta(seconds=settings.SESSION_LONGEST_S)


def _since(noted: object) -> dt.datetime | None:
    return parse_datetime(str(noted)) if noted else None


def _end(since: dt.datetime) -> dt.datetime:
    idle = timezone.now() + dt.timedelta(seconds=settings.SESSION_COOKIE_AGE)
    return min(idle, since + dt.timedelta(seconds=settings.SESSION_LONGEST_S))
