"""Defaults that the OpenAPI document states: a client that sends each of them gets what one that sends none gets."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

import pytest
from django.db import transaction
from openapi_spec_validator import validate

from portal.api.schema import openapi_document
from tests.api import fixture_data as worlds
from tests.api.fixture_data import ACTORS, FixtureData
from tests.api.table import ROWS, Row

DOCUMENT = openapi_document()
OPERATIONS = {
    each["operationId"]: each for methods in DOCUMENT["paths"].values() for each in methods.values()
}


def test_an_independent_validator_accepts_the_document() -> None:
    """It also compares each default with its own schema."""
    validate(DOCUMENT)


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema that it refers to."""
    if "$ref" in schema:
        return resolved(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    parts = [each for name in ("allOf", "oneOf", "anyOf") for each in schema.get(name, ())]
    return {**resolved(parts[0]), **schema} if parts else schema


def with_defaults(schema: dict[str, Any], value: Any) -> Any:
    """The value with every default that the schema states for what it leaves out, at every level."""
    schema = resolved(schema)
    if isinstance(value, list):
        return [with_defaults(schema.get("items", {}), each) for each in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    stated = {name: each["default"] for name, each in properties.items() if "default" in each}
    return stated | {name: with_defaults(properties.get(name, {}), each) for name, each in value.items()}


def query_defaults(operation: dict[str, Any]) -> dict[str, Any]:
    return {
        each["name"]: each["schema"]["default"]
        for each in operation.get("parameters", ())
        if each["in"] == "query" and "default" in each["schema"]
    }


def body_with_defaults(operation: dict[str, Any], body: Any) -> Any:
    described = operation.get("requestBody", {}).get("content", {}).get("application/json")
    return with_defaults(described["schema"], body) if described else body


def as_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def states_defaults(row: Row) -> bool:
    operation = OPERATIONS[row.name]
    return bool(query_defaults(operation)) or body_with_defaults(operation, row.body) != row.body


@pytest.mark.parametrize("row", list(filter(states_defaults, ROWS)), ids=lambda row: row.name)
def test_every_default_is_accepted(row: Row, fixture_data: FixtureData) -> None:
    actor = next(each for each in ("member", *ACTORS) if each in row.allowed)
    operation, answers = OPERATIONS[row.name], []
    query = {name: as_text(value) for name, value in query_defaults(operation).items() if value != []}
    for sends_defaults in (False, True):
        path = row.path.format(**fixture_data.names_of(actor))
        path, sign, given = path.partition("?")
        body = row.body
        if sends_defaults:
            present = {each.partition("=")[0] for each in given.split("&")}
            rest = {name: value for name, value in query.items() if name not in present}
            path += f"?{'&'.join(filter(None, (given, urlencode(rest))))}"
            body = body_with_defaults(operation, body)
        else:
            path += sign + given
        text = json.dumps(body)
        for name, value in fixture_data.names_of(actor).items():
            text = text.replace(f"{{{name}}}", value)
        sent: dict[str, Any] = {} if body is None else {"data": text, "content_type": "application/json"}
        if row.if_match:
            match = row.if_match if isinstance(row.if_match, str) else worlds.etag(fixture_data)
            sent["headers"] = {"If-Match": match}
        with transaction.atomic():
            answer = getattr(fixture_data.client(actor), row.method)(f"/api/v1/{path}", **sent)
            answers.append((answer.status_code, b"" if answer.streaming else answer.content))
            transaction.set_rollback(True)
    assert answers[1][0] == answers[0][0] == row.status, answers[1]
