"""`manage.py backup FILE`: database, keys and secret key in one file of mode 600."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from portal.config import variables
from portal.config.data_paths import read_secret_key
from portal.config.last_backup import record_backup
from portal.management.data_dir_command import DataDirCommand, installed_data_dir, path_argument
from portal.standalone.backup import check_target, write_backup
from portal.standalone.command_database import command_database


class Command(DataDirCommand):
    help = "Writes the database, the keys and the secret key to a new file; Fairway may keep running."

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("file", type=path_argument)

    def handle(self, *args: Any, **options: Any) -> None:
        target: Path = options["file"]
        folder = installed_data_dir()
        check_target(target)
        folder.check_installed()
        with command_database(folder, exclusive=False):
            began_s = time.time()
            manifest = write_backup(target, folder)
        try:
            record_backup(folder.root, began_s)
        except OSError as error:  # such as a full disk: the backup itself is complete
            self.stderr.write(f"The backup is complete, but it could not be recorded: {error}.")
        self.stdout.write(
            f"{target}: {target.stat().st_size / 1e6:.1f} MB, cluster {manifest.cluster}, "
            f"{len(manifest.files)} files. Whoever can read it can act as this portal: protect it like a private key."
        )
        if variables.SECRET_KEY.read() not in ("", read_secret_key(folder.root)):
            self.stdout.write(
                "It does not contain FAIRWAY_SECRET_KEY, without which secrets cannot be read: keep that, too."
            )
