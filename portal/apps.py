"""The Django app of the portal."""

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core import checks

from portal.catalogues import compile_catalogues


class PortalConfig(AppConfig):
    name = "portal"

    def ready(self) -> None:
        for folder in settings.LOCALE_PATHS:
            compile_catalogues(folder)
        checks.register(check_separate_site, checks.Tags.security)


def check_separate_site(app_configs: Sequence[AppConfig] | None, **options: Any) -> list[checks.CheckMessage]:
    """Warn if pages of workspaces can set cookies for the portal."""
    found = settings.SAME_SITE_WARNING
    return [checks.Warning(found, id="portal.W001")] if found else []
