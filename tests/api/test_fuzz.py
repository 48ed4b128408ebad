"""Schemathesis throws generated requests at every operation: no failure of ours, only described answers."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from portal import throttle
from portal.api.description import document
from portal.services.tokens import Scope
from tests.api.world import World

EXAMPLES = 8
"""For each of some fifty operations: 400 examples."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]

schema = schemathesis.openapi.from_dict(document())
schema.app = get_wsgi_application()
schema.config.update(base_url="http://localhost")
# with --long also each boundary of each field, some 2,600 requests more
schema.config.phases.coverage.enabled = "--long" in sys.argv
_turns = itertools.count()


@pytest.fixture(autouse=True)
def one_connection() -> Iterator[None]:
    """Requests stay on the connection that holds the test's transaction, as with Django's own test client."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


@pytest.fixture
def headers(world: World, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An admin's token, and rates that let a storm pass."""
    for name in ("ANYTHING", "SUBMIT", "TOKENS"):
        monkeypatch.setattr(throttle, name, throttle.Rate(name, 1_000_000, 60))
    return world.bearer("admin", Scope.ADMIN)


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_whatever_comes(case: Any, world: World, headers: dict[str, str]) -> None:
    if next(_turns) % 2:  # every other request names rows that are there
        known = {name: world.names[name] for name in case.path_parameters or {} if name in world.names}
        case.path_parameters = {**(case.path_parameters or {}), **known}
    case.call_and_validate(headers=headers, checks=CHECKS)
