"""Checks for settings that are unsafe in an installation behind https. Standard library only."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from urllib.parse import parse_qs, urlsplit

SECOND_LEVEL_DOMAINS = frozenset(
    {
        "ac",
        "co",
        "com",
        "edu",
        "gen",
        "go",
        "gob",
        "gouv",
        "gov",
        "id",
        "info",
        "ltd",
        "me",
        "mil",
        "ne",
        "net",
    }
    | {"nhs", "nom", "or", "org", "plc", "police", "res", "sch"}
)
"""Labels below which country registries sell names, as in example.co.uk."""

SAME_SITE_WARNING = (
    "The workspaces' domain {apps} and the portal's host {portal} belong to one registrable domain, so a page in a "
    "workspace can set cookies for the portal. Give FAIRWAY_APPS_DOMAIN a registrable domain of its own."
)


def is_weak_key(key: str) -> bool:
    """Return True for a secret key that was probably typed by hand or copied from an example."""
    return len(key) < 50 or len(set(key)) < 16 or key.startswith("django-insecure-")


def unsafe_setting_errors(*, debug: bool, allowed_hosts: Iterable[str], redis_url: str) -> list[str]:
    """Return one message for each setting that is unsafe to serve over https."""
    found = []
    if debug:
        found.append("FAIRWAY_DEBUG is on: error pages would show settings and source code.")
    wide = [host for host in allowed_hosts if host.strip() in ("", "*") or host.strip().startswith(".")]
    if wide:
        found.append(
            f"FAIRWAY_ALLOWED_HOSTS contains {', '.join(map(repr, wide))}: list each host without wildcards."
        )
    if not _redis_is_private(redis_url):
        found.append(
            "REDIS_URL is reachable over the network without a password: "
            "use redis://:PASSWORD@HOST, or a unix socket."
        )
    return found


def same_site_warning(portal_url: str, apps_domain: str) -> str:
    """Return the warning if workspaces and portal share a registrable domain, else an empty string.

    Without a public suffix list this errs on the side of warning: names that share their last two labels
    count as one domain (the last three below a label such as co in co.uk). Local names and addresses are
    exempt.
    """
    portal, apps = _host(portal_url), _host(f"//{apps_domain}")
    if "localhost" in (portal.rpartition(".")[2], apps.rpartition(".")[2]) or is_address(portal):
        return ""
    shared = _registrable_domain(portal.split(".")) == _registrable_domain(apps.split("."))
    return SAME_SITE_WARNING.format(apps=apps, portal=portal) if shared else ""


def _redis_is_private(url: str) -> bool:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return True
    return bool(parts.password or parse_qs(parts.query).get("password"))


def _host(url: str) -> str:
    return (urlsplit(url).hostname or "").rstrip(".").lower()


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _registrable_domain(labels: Sequence[str]) -> Sequence[str]:
    by_country = len(labels) > 2 and len(labels[-1]) == 2 and labels[-2] in SECOND_LEVEL_DOMAINS
    return labels[-3:] if by_country else labels[-2:]
