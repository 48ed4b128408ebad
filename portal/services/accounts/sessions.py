"""Session lifetime: ends after hours without use, and after days in any case.

The row's ``expire_date`` includes both, so pages, WebSockets and workspaces check only that.
"""

from __future__ import annotations

import datetime as dt
import time

from django.conf import settings
from django.contrib.auth import HASH_SESSION_KEY, SESSION_KEY
from django.contrib.sessions.backends.base import SessionBase
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.crypto import constant_time_compare
from django.utils.dateparse import parse_datetime

from portal.models import BrowserSession, User

RENEW_INTERVAL_S = 300
"""Minimum time between writes of a session in use."""


def start_session(session: SessionBase, *, address: str, user_agent: str) -> None:
    """Store sign-in time, address and user agent."""
    session["since"] = timezone.now().isoformat()
    session["address"], session["agent"] = address, user_agent[:300]
    session["seen"] = int(time.time())


def renew_session(session: SessionBase) -> None:
    """Extend the session after a page request, at most to its maximum age."""
    since = _started_at(session.get("since"))
    if since is None or time.time() - session.get("seen", 0) < RENEW_INTERVAL_S:
        return
    session["seen"] = int(time.time())
    session.set_expiry(max(1, round((_expiry(since) - timezone.now()).total_seconds())))


def renew_workspace_session(session_id: str) -> None:
    """Extend the session after traffic in a workspace, which does not reach the portal's pages."""
    row = live_sessions().filter(session_key=session_id).first()
    since = _started_at(row.get_decoded().get("since")) if row else None
    if row is not None and since is not None and _expiry(since) > row.expire_date:
        # only this column: do not overwrite what a page writes into the session concurrently
        BrowserSession.objects.filter(session_key=session_id).update(expire_date=_expiry(since))


def live_sessions() -> QuerySet[BrowserSession]:
    return BrowserSession.objects.filter(expire_date__gt=timezone.now())


def session_user(session_id: str) -> User | None:
    """Return the active user of a live session; None after sign-out, expiry or a password change.

    ``session_id`` is the row's key (``session_store.session_id``). The session is not modified: only a
    request of its own browser may renew its key.
    """
    row = live_sessions().filter(session_key=session_id).first()
    facts = row.get_decoded() if row else {}
    user = User.objects.filter(pk=facts.get(SESSION_KEY) or 0, is_active=True).first()
    if user is None:
        return None
    given = str(facts.get(HASH_SESSION_KEY, ""))
    hashes = (user.get_session_auth_hash(), *user.get_session_auth_fallback_hash())
    return user if any(constant_time_compare(given, known) for known in hashes) else None


def latest_expiry() -> dt.datetime:
    """Return the latest possible end of a session that starts now."""
    return timezone.now() + dt.timedelta(seconds=settings.SESSION_MAX_AGE_S)


def _started_at(noted: object) -> dt.datetime | None:
    return parse_datetime(str(noted)) if noted else None


def _expiry(since: dt.datetime) -> dt.datetime:
    idle = timezone.now() + dt.timedelta(seconds=settings.SESSION_COOKIE_AGE)
    return min(idle, since + dt.timedelta(seconds=settings.SESSION_MAX_AGE_S))
