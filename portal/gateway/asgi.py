"""The ASGI entry of the gateway process; ``python -m portal.gateway`` serves it."""

from __future__ import annotations

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.config.settings")
django.setup()

from portal.gateway.app import Gateway  # noqa: E402

application = Gateway()
