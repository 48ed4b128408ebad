"""`manage.py begin-recovery`: after PostgreSQL was set back, starts no job until nodes are reconciled."""

from __future__ import annotations

from typing import Any

from django.db import connections, transaction

from portal.management.data_dir_command import DataDirCommand, installed_data_dir
from portal.services.cluster.recovery import begin_recovery
from portal.standalone.command_database import command_database


class Command(DataDirCommand):
    help = (
        "Starts recovery after the database was restored without manage.py restore, for example by point-in-time "
        "recovery."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        with command_database(installed_data_dir(), exclusive=True):
            with transaction.atomic():
                begin_recovery()
            connections.close_all()
        self.stdout.write(
            "No job starts until every node has been compared once, or an administrator has fenced it."
        )
