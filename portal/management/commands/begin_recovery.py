"""`manage.py begin-recovery`: after PostgreSQL was set back, starts no job until nodes are reconciled."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import connections, transaction

from portal.config import data_paths
from portal.services.cluster.recovery import begin_recovery
from portal.standalone.account import service_account
from portal.standalone.command_database import command_database
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError


class Command(BaseCommand):
    help = (
        "Starts recovery after the database was restored without manage.py restore, for example by point-in-time "
        "recovery."
    )
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--data-dir", type=Path)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            with command_database(DataDir(data_paths.data_dir(), service_account()), exclusive=True):
                with transaction.atomic():
                    begin_recovery()
                connections.close_all()
        except StartError as trouble:
            raise CommandError(str(trouble)) from trouble
        self.stdout.write(
            "No job starts until every node has been compared once, or an administrator has fenced it."
        )
