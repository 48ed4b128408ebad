"""Every route and every socket says who may use it; one that says nothing fails here and is closed at run time."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from channels.consumer import AsyncConsumer, SyncConsumer
from django.urls import URLPattern, URLResolver, get_resolver

import portal
from portal.access import AccessPolicy
from portal.gateway.apps.portal_app import PortalApp
from portal.gateway.apps.service_app import ServiceApp
from portal.gateway.apps.terminal_app import TerminalApp
from portal.gateway.apps.workspace_app import WorkspaceApp
from portal.live.websocket.consumer import WEBSOCKET_ROUTES
from portal.policy_middleware import policy_of

PUBLIC = {
    "healthz",
    "sign-in/",
    "sign-in/link/",
    "sign-out/",
    "translations.js",
    "invitation/",
    "readyz",
    "^api(?!/mlflow/(?:[a-z0-9]{10}/)?$)(?:/.*)?$",
}
"""Routes that need no sign-in, on purpose. A new one is added here with its reason in the commit."""


def routes(patterns: list[URLPattern | URLResolver], above: str = "") -> Iterator[tuple[str, URLPattern]]:
    """Every URL pattern of the project with its whole address."""
    for pattern in patterns:
        address = above + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            yield from routes(pattern.url_patterns, address)
        else:
            yield address, pattern


ROUTES = list(routes(get_resolver().url_patterns))


@pytest.mark.parametrize(("address", "route"), ROUTES, ids=[address for address, _ in ROUTES])
def test_every_route_declares_a_policy(address: str, route: URLPattern) -> None:
    assert policy_of(route.callback) in set(AccessPolicy), f"{address} declares no policy"


def test_public_routes_are_listed() -> None:
    public = {address for address, route in ROUTES if policy_of(route.callback) is AccessPolicy.PUBLIC}
    assert public == PUBLIC


def consumers() -> list[type]:
    """Every Channels consumer that our code defines."""
    found = set()
    for module in pkgutil.walk_packages(portal.__path__, "portal."):
        found_at = module.module_finder.find_spec(module.name, None)  # type: ignore[call-arg]
        if found_at is None or not found_at.origin or "onsumer" not in Path(found_at.origin).read_text():
            continue
        loaded = importlib.import_module(module.name)
        for _, held in inspect.getmembers(loaded, inspect.isclass):
            ours = held.__module__.startswith("portal.")
            if ours and issubclass(held, AsyncConsumer | SyncConsumer):
                found.add(held)
    return sorted(found, key=lambda held: held.__qualname__)


def test_every_consumer_declares_a_policy() -> None:
    for consumer in [
        *consumers(),
        *WEBSOCKET_ROUTES.values(),
        PortalApp,
        WorkspaceApp,
        ServiceApp,
        TerminalApp,
    ]:
        declared = getattr(consumer, "access_policy", None)
        assert isinstance(declared, AccessPolicy), f"{consumer.__qualname__} declares no policy"
