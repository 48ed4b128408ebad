"""The current connection's server as environment variables of libpq, for PostgreSQL's programs and MLflow."""

from __future__ import annotations

from django.db import connection

_NAMES = {
    "HOST": "PGHOST",
    "PORT": "PGPORT",
    "USER": "PGUSER",
    "PASSWORD": "PGPASSWORD",
    "NAME": "PGDATABASE",
}
_OPTIONS = ("sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl", "gssencmode", "channel_binding")
CONNECT_TIMEOUT_S = 10


def libpq_environment() -> dict[str, str]:
    """Return the variables that lead to the database and role of the current connection."""
    named = {variable: str(connection.settings_dict.get(name) or "") for name, variable in _NAMES.items()} | {
        f"PG{name.replace('_', '').upper()}": str(connection.settings_dict["OPTIONS"].get(name) or "")
        for name in _OPTIONS
    }
    return {name: value for name, value in named.items() if value} | {
        "PGCONNECT_TIMEOUT": str(CONNECT_TIMEOUT_S),
        "LC_ALL": "C",  # messages in English
    }
