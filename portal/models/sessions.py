"""Browser sessions, stored by a hash of the cookie's key."""

from __future__ import annotations

from importlib import import_module

from django.conf import settings
from django.contrib.sessions.backends.base import SessionBase
from django.contrib.sessions.base_session import AbstractBaseSession
from django.db import models


class BrowserSession(AbstractBaseSession):
    """One session. A cookie cannot be made from this table or a backup of it."""

    session_key = models.CharField(max_length=64, primary_key=True, help_text="SHA-256 of the cookie's key.")

    class Meta:
        pass

    @classmethod
    def get_session_store_class(cls) -> type[SessionBase]:
        store: type[SessionBase] = import_module(settings.SESSION_ENGINE).SessionStore
        return store
