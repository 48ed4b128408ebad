"""Public addresses: the origins of portal, workspaces and services, and which of them a Host header names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from django.conf import settings

_APP = re.compile(r"(ws|svc)-([a-z][a-z0-9]{0,15})")


@dataclass(frozen=True, slots=True)
class AppHost:
    """``name`` is a well-formed public id, or "" for a name below the apps domain that cannot be one."""

    name: str
    is_service: bool = False


def public_scheme() -> str:
    return "https" if settings.HTTPS_ENABLED else "http"


def portal_origin() -> str:
    return str(settings.PORTAL_URL).rstrip("/")


def workspace_origin(job: str) -> str:
    return f"{public_scheme()}://ws-{job}.{settings.APPS_DOMAIN}"


def service_origin(service: str) -> str:
    return f"{public_scheme()}://svc-{service}.{settings.APPS_DOMAIN}"


def is_public_address(host: str, port: int) -> bool:
    """Return whether the portal, a workspace or a service of this installation answers there."""
    portal = urlsplit(portal_origin())
    default = 443 if settings.HTTPS_ENABLED else 80
    if (host, port) == (portal.hostname, portal.port or default):
        return True
    apps = urlsplit(f"//{settings.APPS_DOMAIN}")
    return port == (apps.port or default) and host.endswith(f".{apps.hostname}")


def strip_port(host: str) -> str:
    """Return a host name in lower case, without port and final dot."""
    name = host.strip().lower()
    if not name.startswith("["):
        name = name.partition(":")[0]
    return name.removesuffix(".")


def match_app_host(host: str, apps_domain: str) -> AppHost | None:
    """Return the workspace or service that a Host header names; None for the portal.

    Ports are ignored (the browser may use a forwarded port). Every ``ws-`` and ``svc-`` name below the apps
    domain is user content, also an invalid one, so that none of them reaches web.
    """
    label, _, parent = strip_port(host).partition(".")
    if parent != strip_port(apps_domain) or not label.startswith(("ws-", "svc-")):
        return None
    match = _APP.fullmatch(label)
    return AppHost(match.group(2) if match else "", is_service=label.startswith("svc-"))
