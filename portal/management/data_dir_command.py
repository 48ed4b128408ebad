"""The base of commands that work on the data folder: `--data-dir`, and refusals without a traceback."""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from agents.node.host.atomic_files import PRIVATE_UMASK
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
        parser.add_argument("--data-dir", type=path_argument, help="the data folder of this installation")

    def create_parser(self, prog_name: str, subcommand: str, **options: Any) -> CommandParser:
        # manage.py would not recognize an abbreviated --data-dir
        return super().create_parser(prog_name, subcommand, allow_abbrev=False, **options)

    def execute(self, *args: Any, **options: Any) -> str | None:
        os.umask(PRIVATE_UMASK)  # inherited by all processes that `up` starts
        try:
            return super().execute(*args, **options)
        except (StartError, FrontendError, FairwayError) as error:
            raise CommandError(str(error)) from error
        except OSError as error:  # such as a full disk
            where = f"{error.filename}: " if error.filename else ""
            raise CommandError(f"{where}{error.strerror or error}.") from error


def shown(text: str) -> str:
    """Return a text of the command line for a message."""
    return f"{text[:100]!a}" + ("..." if len(text) > 100 else "")


def path_argument(text: str) -> Path:
    """Return the path that an argument names, for argparse."""
    if not text or not text.isprintable():
        raise ArgumentTypeError(f"{shown(text)} is not a path.")
    return Path(text).absolute()


def installed_data_dir() -> DataDir:
    """Return the data folder of this installation, with the account of its servers. Raise StartError."""
    folder = DataDir(data_paths.data_dir(), service_account())
    folder.check_path()
    return folder
