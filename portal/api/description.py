"""The API described: the OpenAPI 3.1 document, and the page that shows it, which runs under a strict CSP."""

from __future__ import annotations

from functools import cache
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.templatetags.static import static
from django.urls import reverse
from django.views.decorators.http import require_safe
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.generators import SchemaGenerator
from rest_framework.request import Request

from portal.access import Policy, policy
from portal.api.route import Route, operation
from portal.services.tokens import Scope

UI = "drf_spectacular_sidecar/swagger-ui-dist"
DOCS_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
)


class BearerScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """How tokens are described."""

    target_class = "portal.api.credentials.BearerToken"
    name = "token"

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        """An HTTP bearer token."""
        return {"type": "http", "scheme": "bearer", "bearerFormat": "fw_<id>_<secret>_<crc>"}


class SessionScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """How the portal's session is described."""

    target_class = "portal.api.credentials.Session"
    name = "session"

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        """The session cookie; unsafe methods also need X-CSRFToken."""
        return {"type": "apiKey", "in": "cookie", "name": settings.SESSION_COOKIE_NAME}


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document of everything under /api/v1/; the same as long as the process lives."""
    generator = SchemaGenerator()  # type: ignore[no-untyped-call]
    described: dict[str, Any] = generator.get_schema(public=True)  # type: ignore[no-untyped-call]
    return described


@policy(Policy.SIGNED_IN)
class SchemaRoute(Route):
    """The document."""

    @operation("schema", "This document", tag="schema", scope=Scope.READ, answer=None)
    def get(self, request: Request) -> HttpResponse:
        """OpenAPI 3.1 as JSON."""
        return self.answer(document())


@policy(Policy.SIGNED_IN)
@require_safe
def docs(request: HttpRequest) -> HttpResponse:
    """The page that shows the document and tries requests with the reader's own session."""
    answer = render(
        request,
        "api/docs.html",
        {
            "stylesheet": static(f"{UI}/swagger-ui.css"),
            "bundle": static(f"{UI}/swagger-ui-bundle.js"),
            "icon": static(f"{UI}/favicon-32x32.png"),
            "start": reverse("api-docs-start"),
        },
    )
    answer["Content-Security-Policy"] = DOCS_CSP
    return answer


@policy(Policy.SIGNED_IN)
@require_safe
def docs_start(request: HttpRequest) -> HttpResponse:
    """The few lines that start the page: a script of its own, since none may stand in the page."""
    answer = render(request, "api/docs.js", {"schema": reverse("api-schema")}, content_type="text/javascript")
    answer["Cache-Control"] = "no-store"
    return answer
