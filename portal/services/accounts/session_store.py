"""Session store in the database: rows are found by the hash of a valid session key."""

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
