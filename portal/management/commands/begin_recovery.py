"""`manage.py begin-recovery`: after PostgreSQL was set back, starts no job until nodes are reconciled."""

from __future__ import annotations

import os
from typing import Any

from django.db import connections, transaction

from portal.management.data_dir_command import DataDirCommand, installed_data_dir
from portal.services.cluster.recovery import begin_recovery
from portal.standalone.command_database import command_database
from portal.standalone.original_folder import accept_folder


class Command(DataDirCommand):
    help = (
        "Starts recovery after the database was restored without manage.py restore, for example by point-in-time "
        "recovery, and accepts a copied data folder."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        folder = installed_data_dir()
        with command_database(folder, exclusive=True):
            with transaction.atomic():
                begin_recovery()
            connections.close_all()
            if not os.environ.get("DATABASE_URL"):
                accept_folder(folder.root)
        self.stdout.write(
            "No job starts until every node has been compared once, or an administrator has fenced it."
        )
