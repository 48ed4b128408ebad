"""The base of commands that work on the data folder: `--data-dir`, and refusals without a traceback."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from portal.bootstrap.frontend import FrontendError
from portal.config import data_paths
from portal.errors import FairwayError
from portal.standalone.account import service_account
from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError


class DataDirCommand(BaseCommand):
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        # manage.py has already applied it (portal.config.data_paths)
        parser.add_argument("--data-dir", type=Path, help="the data folder of this installation")

    def execute(self, *args: Any, **options: Any) -> str | None:
        try:
            return super().execute(*args, **options)
        except (StartError, FrontendError, FairwayError) as trouble:
            raise CommandError(str(trouble)) from trouble


def installed_data_dir() -> DataDir:
    """Return the data folder of this installation, with the account of its servers."""
    return DataDir(data_paths.data_dir(), service_account())
