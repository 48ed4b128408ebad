"""`manage.py migrate`: Django's, as the owner of the tables; then MLflow's tables, and the services' privileges."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.core.management.base import CommandError
from django.core.management.commands import migrate
from django.db import OperationalError

from portal.database.migration_session import retry_for_locks
from portal.database.roles import as_owner, grant_service_privileges, take_over_tables
from portal.database.schema_version import UnknownSchemaError, check_schema, is_newer, write_version
from portal.database.unfinished_restore import UnfinishedRestore, is_restoring
from portal.standalone.errors import StartError
from portal.standalone.tracking_tables import migrate_tracking_tables


class Command(migrate.Command):
    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the checks as the owner, too: they connect, and the services' role may not exist yet."""
        try:
            with as_owner():
                return super().execute(*args, **options)
        except (StartError, UnknownSchemaError) as error:
            raise CommandError(str(error)) from error
        except OperationalError as error:
            if isinstance(error.__cause__, UnfinishedRestore):
                raise CommandError(str(error)) from error
            raise

    def handle(self, *args: Any, **options: Any) -> None:
        check_schema()
        if options["plan"] or options["check_unapplied"]:
            super().handle(*args, **options)
            return
        if is_newer():  # and allows this version: its tables and privileges stay as they are
            self.stdout.write("The database was migrated by a newer version, which this one can use.")
            return
        take_over_tables()
        retry_for_locks(partial(super().handle, *args, **options))
        migrate_tracking_tables()
        write_version()
        if not is_restoring():  # at its end, a restore grants them itself
            grant_service_privileges()
