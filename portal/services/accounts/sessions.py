"""Browser sessions: found by the hash of a valid key; end after hours without use, and after days in any case.

The row's ``expire_date`` includes both ends, so pages, WebSockets and workspaces check only that.

A session that a one-time link started is *pending* until a browser sends its key: only then the link is used, so a
lost answer costs nobody the link. Of several pending sessions of one link, the first that is used remains.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
import time
from typing import Any

from django.conf import settings
from django.contrib.auth import HASH_SESSION_KEY, SESSION_KEY
from django.contrib.sessions.backends.base import SessionBase
from django.contrib.sessions.backends.db import SessionStore as DatabaseStore
from django.contrib.sessions.base_session import AbstractBaseSession
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.crypto import constant_time_compare
from django.utils.dateparse import parse_datetime

from portal.models import BrowserSession, MagicLink, User
from portal.services.audit import record_action

PENDING_LINK = "pending_link"
"""Id of the one-time link in the data of a session that no request has used yet."""
USED_LINK = "used_link"
"""Id of the one-time link that this session has used."""
PENDING_SESSION_S = 600
"""Maximum time between the answer to a one-time link and the first request of its session."""
RENEW_INTERVAL_S = 300
"""Minimum time between writes of a session in use."""


_KEY_PATTERN = re.compile(r"[a-z0-9]{32}")


def session_id(key: str | None) -> str:
    """Return the primary key of a session's row: the SHA-256 of the cookie's key; blank for no key.

    Keys are random and long, so a plain hash cannot be reversed.
    """
    return hashlib.sha256(key.encode()).hexdigest() if key else ""


class SessionStore(DatabaseStore):
    """Database store that rejects malformed keys, which PostgreSQL could refuse as text.

    Only the synchronous methods look up rows by hash; the asynchronous ones raise NotImplementedError,
    because unused.
    """

    @classmethod
    def get_model_class(cls) -> type[BrowserSession]:
        return BrowserSession

    def _validate_session_key(self, key: str | None) -> bool:
        return bool(key) and _KEY_PATTERN.fullmatch(str(key)) is not None

    def _get_session_from_db(self) -> BrowserSession | None:
        row = BrowserSession.objects.filter(
            session_key=session_id(self.session_key), expire_date__gt=timezone.now()
        ).first()
        if row is not None and not _use_link(row):
            row = None
        if row is None:
            self._session_key = None
        return row

    def exists(self, session_key: str) -> bool:
        return super().exists(session_id(session_key))

    def create_model_instance(self, data: dict[str, Any]) -> AbstractBaseSession:
        row = super().create_model_instance(data)
        row.session_key = session_id(row.session_key)
        return row

    def delete(self, session_key: str | None = None) -> None:
        """Delete this session, or the one with the key."""
        key = session_key or self.session_key
        if key is not None:
            super().delete(session_id(key))

    async def _aget_session_from_db(self) -> BrowserSession | None:
        raise NotImplementedError

    async def aexists(self, session_key: str) -> bool:
        raise NotImplementedError

    async def acreate_model_instance(self, data: dict[str, Any]) -> AbstractBaseSession:
        raise NotImplementedError

    async def adelete(self, session_key: str | None = None) -> None:
        raise NotImplementedError


def start_session(session: SessionBase, *, address: str, user_agent: str) -> None:
    """Store sign-in time, address and user agent."""
    session["since"] = timezone.now().isoformat()
    session["address"], session["agent"] = address, user_agent[:300]
    session["seen"] = int(time.time())


def start_link_session(session: SessionBase, link: MagicLink) -> None:
    """Make a started session pending: the first request that sends its key uses the link."""
    session[PENDING_LINK] = link.pk
    session.set_expiry(PENDING_SESSION_S)


def _use_link(row: BrowserSession) -> bool:
    """Use the link of a pending session; delete the session and return False if another one used it before.

    True for every other session. Concurrent requests of one session wait for each other at the row of the link.
    """
    facts = row.get_decoded()
    link = facts.pop(PENDING_LINK, None)
    if link is None:
        return True
    with transaction.atomic():
        opened = MagicLink.objects.filter(pk=link, used_at=None, expires_at__gt=timezone.now())
        if not opened.update(used_at=timezone.now()):
            current = BrowserSession.objects.filter(pk=row.pk).first()
            if current is not None and current.get_decoded().get(USED_LINK) == link:
                row.session_data, row.expire_date = current.session_data, current.expire_date
                return True
            BrowserSession.objects.filter(pk=row.pk).delete()
            return False
        since = _started_at(facts.get("since")) or timezone.now()
        facts.pop("_session_expiry", None)
        facts[USED_LINK] = link
        row.session_data, row.expire_date = SessionStore().encode(facts), _expiry(since)
        row.save(update_fields=["session_data", "expire_date"])
        user = User.objects.get(pk=facts[SESSION_KEY])
        record_action(user, "user.sign_in_by_magic_link", user)
    return True


def renew_session(session: SessionBase) -> None:
    """Extend the session after a page request, at most to its maximum age."""
    since = _started_at(session.get("since"))
    if since is None or time.time() - session.get("seen", 0) < RENEW_INTERVAL_S:
        return
    session["seen"] = int(time.time())
    session.set_expiry(max(1, round((_expiry(since) - timezone.now()).total_seconds())))


def renew_workspace_session(row_key: str) -> None:
    """Extend the session after traffic in a workspace, which does not reach the portal's pages."""
    row = live_sessions().filter(session_key=row_key).first()
    since = _started_at(row.get_decoded().get("since")) if row else None
    if row is not None and since is not None and _expiry(since) > row.expire_date:
        # only this column: do not overwrite what a page writes into the session concurrently
        BrowserSession.objects.filter(session_key=row_key).update(expire_date=_expiry(since))


def live_sessions() -> QuerySet[BrowserSession]:
    return BrowserSession.objects.filter(expire_date__gt=timezone.now())


def session_user(row_key: str) -> User | None:
    """Return the active user of a live session; None after sign-out, expiry or a password change, and while it is
    pending: the first request of a one-time link's session is a page.

    ``row_key`` is the result of ``session_id``. The session is not modified: only a
    request of its own browser may renew its key.
    """
    row = live_sessions().filter(session_key=row_key).first()
    facts = row.get_decoded() if row else {}
    user = User.objects.filter(pk=facts.get(SESSION_KEY) or 0, is_active=True).first()
    if user is None or PENDING_LINK in facts:
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
