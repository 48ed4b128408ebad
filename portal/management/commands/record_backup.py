"""`manage.py record-backup`: reports a backup that was made by other means than `manage.py backup`."""

from __future__ import annotations

import datetime as dt
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from portal.config.last_backup import record_backup
from portal.management.data_dir_command import DataDirCommand, installed_data_dir


class Command(DataDirCommand):
    help = (
        "Reports that this installation was backed up, such as by pg_dump; administrators are warned if not."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--at", help="When, as in 2030-01-31T02:00:00Z; now if not given.")

    def handle(self, *args: Any, **options: Any) -> None:
        at = timezone.now() if options["at"] is None else _time(options["at"])
        if at > timezone.now() + dt.timedelta(minutes=1):
            raise CommandError(f"{at.isoformat()} is in the future.")
        record_backup(installed_data_dir().root, at.timestamp())
        self.stdout.write(f"Recorded: this installation was backed up at {at.isoformat(timespec='seconds')}.")


def _time(text: str) -> dt.datetime:
    try:
        at = parse_datetime(text)
    except ValueError:
        at = None
    if at is None:
        raise CommandError(f"{text!r} is not a time such as 2030-01-31T02:00:00Z.")
    return at if timezone.is_aware(at) else at.replace(tzinfo=dt.UTC)
