"""ASGI entry of the web process: pages and REST by Django, WebSockets by ``portal.live``."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.asgi import get_asgi_application
from django.template.loader import get_template
from django.urls import get_resolver

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.config.settings")
_django_app = get_asgi_application()

from portal.api.cluster.health import HEALTHZ_PATH, send_healthz  # noqa: E402
from portal.database.pool_middleware import enable_pooling  # noqa: E402
from portal.database.schema_version import check_service_start  # noqa: E402
from portal.live.websocket.consumer import websocket_app  # noqa: E402
from portal.request_timeout import RequestTimeoutApp  # noqa: E402

check_service_start()
enable_pooling()
_http_app = RequestTimeoutApp(_django_app)

# Load every page and template, and freeze them: scanning them in every full garbage collection took 0.1 s each time.
get_resolver().url_patterns  # noqa: B018
for _folder in map(Path, settings.TEMPLATES[0]["DIRS"]):
    for _path in _folder.rglob("*.html"):
        get_template(str(_path.relative_to(_folder)))
gc.collect()
gc.freeze()


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Dispatch each connection by type and path."""
    if scope["type"] == "websocket":
        await websocket_app(scope, receive, send)
    elif scope["type"] == "http" and scope["path"] == HEALTHZ_PATH and scope["method"] in ("GET", "HEAD"):
        await send_healthz(scope, send)
    elif scope["type"] == "http":
        await _http_app(scope, receive, send)
