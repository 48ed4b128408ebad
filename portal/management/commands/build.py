"""`manage.py build`: what an installation with systemd needs before its first start and after an upgrade."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError

from portal.bootstrap.frontend import FrontendError, build_frontend


class Command(BaseCommand):
    help = "Builds the front end and collects the static files, which `up` and the image do by themselves."
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            build_frontend(settings.BASE_DIR)
        except FrontendError as error:
            raise CommandError(str(error)) from error
        call_command("collectstatic", interactive=False, verbosity=0)
