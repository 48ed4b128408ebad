"""Turns exceptions into problem+json (RFC 9457) with a stable code, never a traceback or HTML."""

from __future__ import annotations

import http
import logging
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from django.core.exceptions import PermissionDenied, RequestDataTooBig, SuspiciousOperation
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpResponse, JsonResponse
from redis.exceptions import RedisError
from rest_framework import exceptions

from portal.database.failures import VALKEY_AWAY, database_failure_message
from portal.errors import FairwayError, InvalidRequest, MalformedRequest, ServiceUnavailable, Unauthenticated
from portal.services.yaml_input import line_of

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
UNPROCESSABLE = 422
"""Status of a request that is well-formed but cannot be executed."""
CODES = {
    400: "bad_request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    413: "too_large",
    415: "unsupported_media_type",
    416: "range_not_satisfiable",
    429: "too_many_requests",
    500: "internal",
    503: "unavailable",
}
MESSAGES = {
    400: "The request is invalid.",
    403: "This is not allowed.",
    404: "The requested object does not exist.",
    413: "The request is too large.",
    416: "The range begins beyond the end.",
    500: "An internal error occurred. It has been logged.",
    503: "A required service is unavailable. Try again later.",
}


def problem_response(
    status: int,
    code: str,
    message: str,
    *,
    errors: list[dict[str, str]] | None = None,
    details: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> HttpResponse:
    body: dict[str, Any] = {
        "type": f"urn:fairway:problem:{code}",
        "title": http.HTTPStatus(status).phrase,
        "status": status,
        "detail": message,
        "code": code,
    }
    if errors:
        body["errors"] = errors
    if details:
        body["details"] = dict(details)
    answer = JsonResponse(body, status=status, headers=dict(headers or {}), content_type=MEDIA_TYPE)
    answer["Cache-Control"] = "no-store"
    return answer


def response_for(failure: Exception, lines: Mapping[str, int] | None = None) -> HttpResponse | None:
    """Return the response for an exception; None for an unexpected one. ``lines`` are those of a YAML body."""
    match failure:
        case FairwayError():
            return _error_response(failure, lines or {})
        case exceptions.ValidationError():
            errors = [_with_line(each, lines or {}) for each in field_errors(failure.detail)]
            message = " ".join(dict.fromkeys(error["message"] for error in errors))
            return problem_response(400, "invalid", message or "The request is not valid.", errors=errors)
        case exceptions.Throttled():
            wait_s = max(1, math.ceil(getattr(failure, "wait", None) or 1))
            message = f"Too many requests. Try again in {wait_s} s."
            return problem_response(429, CODES[429], message, headers={"Retry-After": str(wait_s)})
        case exceptions.APIException():
            code = CODES.get(failure.status_code, "error")
            if isinstance(failure, exceptions.ParseError):
                code = "malformed"
            return problem_response(failure.status_code, code, str(failure.detail))
        case Http404():
            return response_for_status(404)
        case PermissionDenied():
            return response_for_status(403)
        case RequestDataTooBig():
            return response_for_status(413)
        case SuspiciousOperation():
            return response_for_status(400)
        case OperationalError() | InterfaceError():
            log.warning("the database failed: %s", failure)
            return _error_response(ServiceUnavailable(database_failure_message(failure)))
        case RedisError():
            log.warning("Redis does not answer: %s", failure)
            return _error_response(ServiceUnavailable(VALKEY_AWAY))
    return None


def response_for_status(status: int) -> HttpResponse:
    """Return the problem for a status without an exception of ours, such as Django's own 400 or 500."""
    code = CODES.get(status, "error")
    return problem_response(status, code, MESSAGES.get(status, http.HTTPStatus(status).phrase + "."))


def _error_response(refusal: FairwayError, lines: Mapping[str, int] = MappingProxyType({})) -> HttpResponse:
    headers: dict[str, str] = {}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(refusal.retry_after_s)
    if isinstance(refusal, Unauthenticated):
        headers["WWW-Authenticate"] = 'Bearer realm="fairway"'
        if refusal.code != Unauthenticated.code:
            headers["WWW-Authenticate"] += ', error="invalid_token"'
    errors = None
    if isinstance(refusal, InvalidRequest) and refusal.fields:
        errors = [_field_error(field, refusal.code, message) for field, message in refusal.fields.items()]
        errors = [_with_line(each, lines) for each in errors]
    shapeless = isinstance(refusal, MalformedRequest)
    status = UNPROCESSABLE if isinstance(refusal, InvalidRequest) and not shapeless else refusal.status
    return problem_response(
        status, refusal.code, refusal.message, errors=errors, details=refusal.details, headers=headers
    )


def field_errors(detail: Any, path: str = "") -> Iterator[dict[str, str]]:
    """Flatten DRF's nested errors into entries with field path, code and message."""
    if isinstance(detail, Mapping):
        for key, inner in detail.items():
            name = str(key)
            whole = name == "non_field_errors"
            yield from field_errors(inner, path if whole else f"{path}.{name}" if path else name)
    elif isinstance(detail, list | tuple):
        for inner in detail:
            yield from field_errors(inner, path)
    else:
        yield _field_error(path, str(getattr(detail, "code", "invalid")), str(detail))


def _with_line(error: dict[str, str], lines: Mapping[str, int]) -> dict[str, str]:
    """Return the error with the line of its field in a YAML body, if it is there."""
    line = line_of(error["field"], lines)
    return error | {"message": f"{error['message']} (line {line})"} if line else error


def _field_error(field: str, code: str, message: str) -> dict[str, str]:
    return {"field": field, "code": code, "message": message}
