"""Where sessions are kept: the database, asked only for keys that can be one, and by their hash."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from django.contrib.sessions.backends.db import SessionStore as DatabaseStore
from django.contrib.sessions.base_session import AbstractBaseSession
from django.utils import timezone

from portal.models import BrowserSession

_KEY_PATTERN = re.compile(r"[a-z0-9]{32}")


def session_id(key: str | None) -> str:
    """The primary key of a session's row, from the key in the cookie: its SHA-256; blank for no key.

    A key is random and long enough that a plain hash cannot be guessed back.
    """
    return hashlib.sha256(key.encode()).hexdigest() if key else ""


class SessionStore(DatabaseStore):
    """A cookie may hold anything, also what PostgreSQL refuses in a text, which would be a failure of ours.

    Only the synchronous methods look rows up by hash; the asynchronous ones are not used, and refuse.
    """

    @classmethod
    def get_model_class(cls) -> type[BrowserSession]:
        """The rows."""
        return BrowserSession

    def _validate_session_key(self, key: str | None) -> bool:
        return bool(key) and _KEY_PATTERN.fullmatch(str(key)) is not None

    def _get_session_from_db(self) -> BrowserSession | None:
        row = BrowserSession.objects.filter(
            session_key=session_id(self.session_key), expire_date__gt=timezone.now()
        ).first()
        if row is None:
            self._session_key = None
        return row

    def exists(self, session_key: str) -> bool:
        """Whether the key is taken."""
        return super().exists(session_id(session_key))

    def create_model_instance(self, data: dict[str, Any]) -> AbstractBaseSession:
        """The row of this session."""
        row = super().create_model_instance(data)
        row.session_key = session_id(row.session_key)
        return row

    def delete(self, session_key: str | None = None) -> None:
        """Ends this session, or the one with the key."""
        key = session_key or self.session_key
        if key is not None:
            super().delete(session_id(key))

    async def _aget_session_from_db(self) -> BrowserSession | None:
        raise NotImplementedError

    async def aexists(self, session_key: str) -> bool:
        """Not offered."""
        raise NotImplementedError

    async def acreate_model_instance(self, data: dict[str, Any]) -> AbstractBaseSession:
        """Not offered."""
        raise NotImplementedError

    async def adelete(self, session_key: str | None = None) -> None:
        """Not offered."""
        raise NotImplementedError
