"""Where sessions are kept: the database, asked only for keys that can be one."""

from __future__ import annotations

import re

from django.contrib.sessions.backends.db import SessionStore as DatabaseStore

_KEY = re.compile(r"[a-z0-9]{32}")


class SessionStore(DatabaseStore):
    """A cookie may hold anything, also what PostgreSQL refuses in a text, which would be a failure of ours."""

    def _validate_session_key(self, key: str | None) -> bool:
        return bool(key) and _KEY.fullmatch(str(key)) is not None
