"""`manage.py backup FILE`: database, keys and secret key in one file of mode 600."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from portal.config import data_paths
from portal.standalone.account import service_account
from portal.standalone.backup import write_backup
from portal.standalone.command_database import command_database
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError


class Command(BaseCommand):
    help = "Writes the database, the keys and the secret key to a new file; Fairway may keep running."
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", type=Path)
        parser.add_argument("--data-dir", type=Path)

    def handle(self, *args: Any, **options: Any) -> None:
        target = options["file"].absolute()
        folder = DataDir(data_paths.data_dir(), service_account())
        try:
            with command_database(folder, exclusive=False):
                manifest = write_backup(target, folder)
        except StartError as trouble:
            raise CommandError(str(trouble)) from trouble
        self.stdout.write(
            f"{target}: {target.stat().st_size / 1e6:.1f} MB, cluster {manifest.cluster}, "
            f"{len(manifest.files)} files. Whoever can read it can act as this portal: protect it like a private key."
        )
