"""Schemathesis sends generated requests to every operation: what the document allows is accepted."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from django.core.wsgi import get_wsgi_application
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    missing_required_header,
    negative_data_rejection,
    positive_data_acceptance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from portal.api.schema import openapi_document
from portal.services.accounts.tokens import Scope
from portal.valkey import rate_limits
from tests.api.fixture_data import FixtureData

LONG = "--long" in sys.argv
EXAMPLES = 60 if LONG else 1
"""For each operation and actor, with --long beside each boundary of each field."""
LEAST_CASES = 20_000
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    positive_data_acceptance,
    negative_data_rejection,
    missing_required_header,
    unsupported_method,
]

pytest_plugins = ["schemathesis.pytest.plugin"]  # importing it takes half a second, so only here

schema = schemathesis.openapi.from_dict(openapi_document())
schema.app = get_wsgi_application()
schema.config.update(base_url="http://localhost")
schema.config.phases.coverage.enabled = LONG
# the description cannot exclude null characters from the names of a free-form object
schema.config.generation.allow_x00 = False
# 400 says that a request does not have the described shape, so it is no answer to one that has it.
schema.config.checks.positive_data_acceptance.expected_statuses = [
    *("2xx", "401", "403", "404", "409", "412", "422"),
]
schema.config.checks.negative_data_rejection.expected_statuses = [
    *("400", "401", "403", "404", "405", "409", "412", "413", "415", "422", "428"),
]
schema.config.checks.missing_required_header.expected_statuses = ["403", "428"]
_sent = itertools.count(1)
pytestmark = pytest.mark.usefixtures("wsgi_on_one_connection")


@pytest.fixture
def no_rate_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "consume", lambda rate, who: 0.0)


@pytest.fixture
def signed_agent(tmp_path: Path, settings: Any) -> None:
    """The program for nodes, which `manage.py up` makes."""
    settings.DATA_DIR = tmp_path
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "agent.pyz").write_bytes(b"program")
    (tmp_path / "agent" / "agent.pyz.sig").write_text("signature")


@pytest.mark.parametrize("actor", ["admin", pytest.param("member", marks=pytest.mark.long)])
@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@pytest.mark.usefixtures("no_rate_limits", "signed_agent")
def test_generated_requests_get_documented_answers(case: Any, actor: str, fixture_data: FixtureData) -> None:
    if next(_sent) % 2:  # every other request names rows that exist
        known = {
            name: fixture_data.names[name]
            for name in case.path_parameters or {}
            if name in fixture_data.names
        }
        case.path_parameters = {**(case.path_parameters or {}), **known}
    case.call_and_validate(headers=headers_of(fixture_data, actor), checks=CHECKS)


def headers_of(fixture_data: FixtureData, actor: str) -> dict[str, str]:
    """A token of the actor that may do everything, made once for all examples of a test."""
    kept: dict[str, dict[str, str]] = fixture_data.rows.setdefault("fuzz_headers", {})
    if actor not in kept:
        kept[actor] = fixture_data.bearer(actor, Scope.ADMIN)
    return kept[actor]


@pytest.mark.long
def test_long_suite_sends_many_requests() -> None:
    """Runs last in this file; a single lane runs the whole file."""
    assert next(_sent) > LEAST_CASES, os.environ.get("PYTEST_XDIST_WORKER")
