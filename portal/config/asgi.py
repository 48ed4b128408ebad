"""ASGI entry of the web process: pages and REST; WebSockets join in ``portal.live``."""

from __future__ import annotations

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.config.settings")
application = get_asgi_application()
