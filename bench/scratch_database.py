"""A temporary database for one benchmark, beside the one in DATABASE_URL."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def scratch_database() -> Iterator[str]:
    """Set Django up on a fresh database, yield its URL for other processes, and drop it at the end."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.config.settings")
    os.environ.setdefault("FAIRWAY_SECRET_KEY", secrets.token_urlsafe(48))
    os.environ.setdefault("FAIRWAY_LOG_LEVEL", "ERROR")

    import django
    from django.db import connection

    django.setup()
    old = connection.settings_dict["NAME"]
    connection.creation.create_test_db(verbosity=0, autoclobber=True)
    try:
        yield os.environ["DATABASE_URL"].rpartition("/")[0] + "/" + connection.settings_dict["NAME"]
    finally:
        connection.creation.destroy_test_db(old, verbosity=0)
