"""Puts the gateway together from the settings of this process."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from django.conf import settings

from portal.gateway.activity import EVERY_S, Lookout
from portal.gateway.app import Gateway
from portal.gateway.door import Places, WorkspaceDoor
from portal.gateway.guard import Guard
from portal.gateway.rights import Rights
from portal.gateway.terminals import TerminalDoor, decide_terminal
from portal.gateway.upstream import Upstreams
from portal.gateway.web import WebDoor

log = logging.getLogger(__name__)


def build_gateway(web_socket: str | None = None, look_every_s: float = EVERY_S) -> Gateway:
    """The gateway of this process, by its settings and environment: FAIRWAY_WEB_SOCKET, FAIRWAY_TUNNEL_KEY,
    FAIRWAY_TRUSTED_PROXIES, FAIRWAY_WORKSPACE_UPLOAD_MIB. So often it looks whether workspaces are used.
    """
    if settings.SAME_SITE_WARNING:
        log.warning(settings.SAME_SITE_WARNING)
    socket = web_socket or os.environ.get("FAIRWAY_WEB_SOCKET") or str(settings.DATA_DIR / "run" / "web.sock")
    trusted = os.environ.get("FAIRWAY_TRUSTED_PROXIES", "")
    key = settings.KEY_FILES["tunnel"]
    rights = Rights()
    guard = Guard(rights)
    upstreams = Upstreams(socket, Path(key) if key else None, settings.DATA_DIR / "run" / "tunnels")
    lookout = Lookout(rights, guard, upstreams, look_every_s)
    upload_mib = int(os.environ.get("FAIRWAY_WORKSPACE_UPLOAD_MIB") or 0)
    terminal_rights = Rights(decide_terminal, used=None, threads=2)  # who types is told of by the door
    places = Places(
        settings.PORTAL_URL.rstrip("/"), settings.APPS_DOMAIN, settings.SECURE, upload_mib * 1024**2 or None
    )
    return Gateway(
        settings.APPS_DOMAIN,
        web=WebDoor(
            upstreams,
            secure=settings.SECURE,
            trusted_peers=frozenset(peer.strip() for peer in trusted.split(",") if peer.strip()),
        ),
        workspaces=WorkspaceDoor(places, rights, guard, upstreams, lookout),
        terminals=TerminalDoor(places, terminal_rights, upstreams, lookout),
        rights=rights,
        guard=guard,
        upstreams=upstreams,
        lookout=lookout,
    )
