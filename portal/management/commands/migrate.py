"""`manage.py migrate`: Django's, as the owner of the tables; then grants the services' role access."""

from __future__ import annotations

from typing import Any

from django.core.management.commands import migrate

from portal.database.roles import as_owner, grant_service_privileges


class Command(migrate.Command):
    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the checks as the owner, too: they connect, and the services' role may not exist yet."""
        with as_owner():
            return super().execute(*args, **options)

    def handle(self, *args: Any, **options: Any) -> None:
        super().handle(*args, **options)
        if not options["plan"] and not options["check_unapplied"]:
            grant_service_privileges()
