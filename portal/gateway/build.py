"""Builds the gateway from the settings of this process."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from django.conf import settings

from portal.gateway.access.authorization import Authorizer
from portal.gateway.access.authorization_monitor import AuthorizationMonitor
from portal.gateway.activity import POLL_INTERVAL_S, ActivityTracker
from portal.gateway.app import Gateway
from portal.gateway.apps.portal_app import PortalApp
from portal.gateway.apps.terminal_app import TerminalApp, decide_terminal_access
from portal.gateway.apps.workspace_app import GatewayAddresses, WorkspaceApp
from portal.gateway.proxy.upstreams import Upstreams

log = logging.getLogger(__name__)


def build_gateway(web_socket: str | None = None, activity_poll_s: float = POLL_INTERVAL_S) -> Gateway:
    """Build the gateway from settings and environment.

    Variables: FAIRWAY_WEB_SOCKET, FAIRWAY_TUNNEL_KEY, FAIRWAY_TRUSTED_PROXIES, FAIRWAY_WORKSPACE_UPLOAD_MIB.
    ``activity_poll_s`` is the interval of activity polls.
    """
    if settings.SAME_SITE_WARNING:
        log.warning(settings.SAME_SITE_WARNING)
    socket = web_socket or os.environ.get("FAIRWAY_WEB_SOCKET") or str(settings.DATA_DIR / "run" / "web.sock")
    trusted = os.environ.get("FAIRWAY_TRUSTED_PROXIES", "")
    key = settings.KEY_FILES["tunnel"]
    authorizer = Authorizer()
    monitor = AuthorizationMonitor(authorizer)
    upstreams = Upstreams(socket, Path(key) if key else None, settings.DATA_DIR / "run" / "tunnels")
    activity = ActivityTracker(authorizer, monitor, upstreams, activity_poll_s)
    upload_mib = int(os.environ.get("FAIRWAY_WORKSPACE_UPLOAD_MIB") or 0)
    terminal_authorizer = Authorizer(
        decide_terminal_access, on_use=None, threads=2
    )  # TerminalApp extends the session on input
    addresses = GatewayAddresses(
        settings.PORTAL_URL.rstrip("/"),
        settings.APPS_DOMAIN,
        settings.HTTPS_ENABLED,
        upload_mib * 1024**2 or None,
    )
    return Gateway(
        settings.APPS_DOMAIN,
        web=PortalApp(
            upstreams,
            secure=settings.HTTPS_ENABLED,
            trusted_peers=frozenset(peer.strip() for peer in trusted.split(",") if peer.strip()),
        ),
        workspaces=WorkspaceApp(addresses, authorizer, monitor, upstreams, activity),
        terminals=TerminalApp(addresses, terminal_authorizer, upstreams, activity),
        authorizer=authorizer,
        monitor=monitor,
        upstreams=upstreams,
        activity=activity,
    )
