"""Sessions of browsers: the row is found by a hash of the key that the cookie holds."""

from __future__ import annotations

from importlib import import_module

from django.conf import settings
from django.contrib.sessions.backends.base import SessionBase
from django.contrib.sessions.base_session import AbstractBaseSession
from django.db import models


class BrowserSession(AbstractBaseSession):
    """One session. Whoever reads this table, or a backup of it, cannot make a cookie from it."""

    session_key = models.CharField(max_length=64, primary_key=True, help_text="SHA-256 of the cookie's key.")

    class Meta:
        pass

    @classmethod
    def get_session_store_class(cls) -> type[SessionBase]:
        """The store that reads and writes these rows."""
        store: type[SessionBase] = import_module(settings.SESSION_ENGINE).SessionStore
        return store
