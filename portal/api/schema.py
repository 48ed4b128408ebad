"""The OpenAPI 3.1 document, and the documentation page, which runs under a strict CSP."""

from __future__ import annotations

from functools import cache
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.templatetags.static import static
from django.urls import reverse
from django.views.decorators.http import require_safe
from drf_spectacular.extensions import (
    OpenApiAuthenticationExtension,
    OpenApiSerializerExtension,
    OpenApiSerializerFieldExtension,
)
from drf_spectacular.generators import SchemaGenerator
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.framework.problems import MEDIA_TYPE
from portal.api.framework.request_parsing import STORABLE_PATTERN
from portal.api.framework.views import SignedInView, operation, status_description
from portal.services.accounts.tokens import Scope

SWAGGER_DIST = "drf_spectacular_sidecar/swagger-ui-dist"
PROBLEM_REF = {"$ref": "#/components/schemas/Problem"}
DOCS_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
)


class BearerScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = "portal.api.framework.authentication.BearerTokenAuthentication"
    name = "token"

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        return {"type": "http", "scheme": "bearer", "bearerFormat": "fw_<id>_<secret>_<crc>"}


class SessionScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = "portal.api.framework.authentication.PortalSessionAuthentication"
    name = "session"

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        """Return the scheme of the session cookie; unsafe methods also need X-CSRFToken."""
        return {"type": "apiKey", "in": "cookie", "name": settings.SESSION_COOKIE_NAME}


class _ClosedSchema(OpenApiSerializerExtension):  # type: ignore[no-untyped-call]
    match_subclasses = True

    def map_serializer(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        described: dict[str, Any] = auto_schema._map_serializer(
            self.target, direction, bypass_extensions=True
        )
        return {**described, "additionalProperties": False}


class StrictSerializerSchema(_ClosedSchema):  # type: ignore[no-untyped-call]
    """Document that bodies with unknown fields are refused."""

    target_class = "portal.api.framework.request_parsing.StrictSerializer"


class ResponseSerializerSchema(_ClosedSchema):  # type: ignore[no-untyped-call]
    """Document that answers have all described properties and no others."""

    target_class = "portal.api.framework.responses.ResponseSerializer"

    def map_serializer(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        described = super().map_serializer(auto_schema, direction)
        required = sorted(set(described.get("properties", {})) - self.target.optional_fields)
        return {**described, "required": required}


def _field_schema(field: Any, auto_schema: Any, direction: Any) -> dict[str, Any]:
    """Return the schema of a field without ``null``, which drf-spectacular adds afterwards."""
    described: dict[str, Any] = auto_schema._map_serializer_field(field, direction, bypass_extensions=True)
    if isinstance(described.get("type"), list):
        described["type"] = next(kind for kind in described["type"] if kind != "null")
    return described


class StrictCharFieldSchema(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]
    """Add the pattern of string fields."""

    target_class = "portal.api.framework.request_parsing.StrictCharField"
    match_subclasses = True

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        return {**_field_schema(self.target, auto_schema, direction), "pattern": self.target.pattern}


class ListSchema(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]
    """Add the minimum length of lists."""

    target_class = "rest_framework.serializers.ListField"

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        described = _field_schema(self.target, auto_schema, direction)
        return described if self.target.allow_empty else {**described, "minItems": 1}


class DictSchema(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]
    """Add the pattern of property names that clients choose."""

    target_class = "rest_framework.serializers.DictField"

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> dict[str, Any]:
        described = _field_schema(self.target, auto_schema, direction)
        names = {"propertyNames": {"pattern": f"^{STORABLE_PATTERN}$"}} if direction == "request" else {}
        return {**described, **names}


def _add_not_found(document: dict[str, Any]) -> None:
    """Add 404 to every route with a path parameter."""
    example = {"description": status_description(404), "content": {MEDIA_TYPE: {"schema": PROBLEM_REF}}}
    for path, operations in document["paths"].items():
        if "{" in path:
            for described in operations.values():
                described["responses"].setdefault("404", example)


@cache
def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document of /api/v1/, which is constant for the life of the process."""
    generator = SchemaGenerator()  # type: ignore[no-untyped-call]
    described: dict[str, Any] = generator.get_schema(public=True)  # type: ignore[no-untyped-call]
    _add_not_found(described)
    return described


class SchemaView(SignedInView):
    @operation("schema", "Get this OpenAPI document", tag="schema", scope=Scope.READ, response=None)
    def get(self, request: Request) -> HttpResponse:
        return self.json_response(openapi_document())


@access_policy(AccessPolicy.SIGNED_IN)
@require_safe
def docs(request: HttpRequest) -> HttpResponse:
    """Return the documentation page, which can send requests with the reader's session."""
    answer = render(
        request,
        "api/docs.html",
        {
            "stylesheet": static(f"{SWAGGER_DIST}/swagger-ui.css"),
            "bundle": static(f"{SWAGGER_DIST}/swagger-ui-bundle.js"),
            "icon": static(f"{SWAGGER_DIST}/favicon-32x32.png"),
            "start": reverse("api-docs-start"),
        },
    )
    answer["Content-Security-Policy"] = DOCS_CSP
    return answer


@access_policy(AccessPolicy.SIGNED_IN)
@require_safe
def docs_script(request: HttpRequest) -> HttpResponse:
    """Return the script that starts the page: a separate file, since the CSP forbids inline scripts."""
    answer = render(request, "api/docs.js", {"schema": reverse("api-schema")}, content_type="text/javascript")
    answer["Cache-Control"] = "no-store"
    return answer
