"""`manage.py restore FILE`: restores a backup into an empty database."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from portal.database.roles import as_owner
from portal.management.data_dir_command import DataDirCommand, installed_data_dir, path_argument
from portal.standalone.backup import read_manifest
from portal.standalone.command_database import command_database
from portal.standalone.restores.access import describe_access
from portal.standalone.restores.restore import check_data_folder, restore_backup


class Command(DataDirCommand):
    help = "Restores a backup into an empty data folder and database."

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("file", type=path_argument)

    def handle(self, *args: Any, **options: Any) -> None:
        folder = installed_data_dir()
        manifest = read_manifest(options["file"])
        check_data_folder(folder)
        with command_database(folder, exclusive=True):
            try:
                said = restore_backup(options["file"], manifest, folder)
            except KeyboardInterrupt:
                raise CommandError("Interrupted: nothing was restored.") from None
            with as_owner():
                access = describe_access(manifest.made_at)
        for message in said:
            self.stdout.write(message)
        self.stdout.write(
            f"Restored cluster {manifest.cluster} as of {manifest.made_at}. No job starts until every "
            f"node has been compared once, or an administrator has fenced it.\n"
        )
        for message in access:
            self.stdout.write(f"- {message}")
