"""Replaces Django's HTML errors below /api/ by problem+json."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest
from django.http.response import HttpResponseBase

from portal.api.framework import problems

MLFLOW_PREFIX = "/api/mlflow/"
PRESERVED_HEADERS = {"Allow", "Content-Range", "Retry-After", "WWW-Authenticate"}
"""Headers that belong to the status (RFC 9110) rather than to the replaced body."""


class ApiProblemMiddleware:
    """Return error responses below /api/ (bad host, crash, 404) as problem+json."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        answer = self.get_response(request)
        if answer.status_code < 400 or not request.path.startswith("/api/"):
            return answer
        if answer.get("Content-Type", "").startswith(problems.MEDIA_TYPE):
            return answer
        if request.path.startswith(MLFLOW_PREFIX) and answer.get("Content-Type") == "application/json":
            return answer  # an error in the form that MLflow's client reads
        problem = problems.response_for_status(answer.status_code)
        for name in PRESERVED_HEADERS & {name for name, _ in answer.items()}:
            problem[name] = answer[name]
        return problem
