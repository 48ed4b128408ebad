"""`manage.py restore FILE`: restores a backup into an empty database."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from portal.config import data_paths
from portal.standalone.account import service_account
from portal.standalone.backup import read_manifest, restore_backup
from portal.standalone.command_database import command_database
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError


class Command(BaseCommand):
    help = "Restores a backup into an empty data folder and database."
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", type=Path)
        parser.add_argument("--data-dir", type=Path)

    def handle(self, *args: Any, **options: Any) -> None:
        folder = DataDir(data_paths.data_dir(), service_account())
        try:
            manifest = read_manifest(options["file"], folder)
            with command_database(folder, exclusive=True):
                restore_backup(options["file"], manifest, folder)
        except StartError as trouble:
            raise CommandError(str(trouble)) from trouble
        self.stdout.write(
            f"Restored cluster {manifest.cluster} as of {manifest.made_at}. No job starts until every "
            f"node has been compared once, or an administrator has fenced it."
        )
