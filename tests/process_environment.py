"""The environments of the processes that tests start."""

from __future__ import annotations

import os
from urllib.parse import urlsplit, urlunsplit

from django.db import connection

COMMANDS = {
    "web": ("-m", "uvicorn", "portal.asgi:application", "--uds", "/nonexistent/web.sock"),
    "gateway": ("-m", "portal.gateway", "--port", "1"),
    "worker": ("-m", "celery", "-A", "scheduler.worker", "worker", "-Q", "cycle", "-P", "solo"),
    "beat": ("-m", "celery", "-A", "scheduler.worker", "beat", "-s", "/nonexistent/beat"),
    "collector": ("manage.py", "collect"),
    "prepare": ("manage.py", "prepare"),
    "up": ("manage.py", "up", "--data-dir", "/nonexistent"),
}
"""Python arguments of processes that end at their start, because their environment is refused."""

SERVER_VARIABLES = frozenset({"DATABASE_URL", "DATABASE_OWNER_URL", "REDIS_URL"})


def without_servers() -> dict[str, str]:
    """Return the environment for a portal with servers of its own."""
    return {name: value for name, value in os.environ.items() if name not in SERVER_VARIABLES}


def service_environment() -> dict[str, str]:
    """Return the environment of one process of the portal, on the database of this lane.

    As in an installation it names the services' role, and not the owner of the tables.
    """
    environment = {name: value for name, value in os.environ.items() if name != "DATABASE_OWNER_URL"}
    return environment | {"DATABASE_URL": database_url()}


def database_url() -> str:
    """Return the address of the test database: that of the settings, with the name of the lane's.

    Only the last part of the path is the name: before it may stand the folder of a unix socket.
    """
    parts = urlsplit(os.environ["DATABASE_URL"])
    folder = parts.path.rpartition("/")[0]
    return urlunsplit(parts._replace(path=f"{folder}/{connection.settings_dict['NAME']}"))
