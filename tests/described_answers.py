"""Every JSON answer that a test client gets from ``/api/`` is compared with the OpenAPI document."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from django.http import HttpResponse
from django.test import Client

NOT_DESCRIBED = {500}
"""Statuses of defects, which no operation describes."""


def check_every_answer() -> None:
    """Make each request of a test client fail when its answer is not as described."""
    get_answer = Client.request

    def request(self: Client, **given: Any) -> Any:
        answer = get_answer(self, **given)
        if given["PATH_INFO"].startswith("/api/"):
            check_described(given["REQUEST_METHOD"].lower(), answer)
        return answer

    Client.request = request  # type: ignore[method-assign]


def check_described(method: str, answer: Any) -> None:
    """Raise AssertionError with the operation, the field and the problem."""
    match = answer.wsgi_request.resolver_match
    path = re.sub(r"<(\w+:)?(\w+)>", r"{\2}", f"/{match.route}") if match else ""
    operation = _operation(path, method)
    status = answer.status_code
    if operation is None or status in NOT_DESCRIBED:
        return
    name = f"{operation['operationId']}, {status}"
    described = operation["responses"].get(str(status))
    assert described is not None, f"{name}: the document does not describe this status"
    kind = answer.headers.get("Content-Type", "").partition(";")[0]
    content = described.get("content")
    if content is None or answer.streaming or not kind.endswith("json"):
        return
    assert kind in content, f"{name}: {kind} is not described, but {', '.join(content)}"
    problem = _first_problem(path, method, str(status), kind, answer)
    assert problem is None, f"{name}: {problem}"


def _first_problem(path: str, method: str, status: str, kind: str, answer: HttpResponse) -> str | None:
    from jsonschema.exceptions import best_match

    error = best_match(_validator(path, method, status, kind).iter_errors(json.loads(answer.content)))
    return f"{error.json_path}: {error.message[:500]}" if error else None


def _operation(path: str, method: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = _document()["paths"].get(path, {}).get(method)
    return found


@cache
def _document() -> dict[str, Any]:
    """Return the document, in which no answer may have properties beyond those that are described."""
    from portal.api.schema import openapi_document

    document: dict[str, Any] = json.loads(json.dumps(openapi_document()))
    for name, schema in document["components"]["schemas"].items():
        if "properties" in schema and not name.endswith("Request"):
            schema.setdefault("additionalProperties", False)
    return document


@cache
def _registry() -> Any:
    from referencing import Registry, Resource
    from referencing.jsonschema import DRAFT202012

    return Registry().with_resource("urn:openapi", Resource(contents=_document(), specification=DRAFT202012))


@cache
def _validator(path: str, method: str, status: str, kind: str) -> Any:
    from jsonschema import Draft202012Validator

    schema = _document()["paths"][path][method]["responses"][status]["content"][kind]["schema"]
    text = json.dumps(schema).replace('"#/', '"urn:openapi#/')
    return Draft202012Validator(json.loads(text), registry=_registry())
