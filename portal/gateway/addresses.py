"""Public addresses: the portal's origin, a workspace's, and which of them a Host header names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from django.conf import settings

_WORKSPACE = re.compile(r"ws-([a-z][a-z0-9]{0,15})")


@dataclass(frozen=True, slots=True)
class WorkspaceHost:
    """``workspace`` is a well-formed public id, or "" for a name below the apps domain that cannot be one."""

    workspace: str


def public_scheme() -> str:
    return "https" if settings.HTTPS_ENABLED else "http"


def portal_origin() -> str:
    return str(settings.PORTAL_URL).rstrip("/")


def workspace_origin(job: str) -> str:
    return f"{public_scheme()}://ws-{job}.{settings.APPS_DOMAIN}"


def strip_port(host: str) -> str:
    """Return a host name in lower case, without port and final dot."""
    name = host.strip().lower()
    if not name.startswith("["):
        name = name.partition(":")[0]
    return name.removesuffix(".")


def match_workspace_host(host: str, apps_domain: str) -> WorkspaceHost | None:
    """Return the workspace that a Host header names; None for the portal.

    Ports are ignored (the browser may use a forwarded port). Every ``ws-`` name below the apps domain is
    workspace traffic, also an invalid one, so that none of them reaches web.
    """
    label, _, parent = strip_port(host).partition(".")
    if parent != strip_port(apps_domain) or not label.startswith("ws-"):
        return None
    match = _WORKSPACE.fullmatch(label)
    return WorkspaceHost(match.group(1) if match else "")
