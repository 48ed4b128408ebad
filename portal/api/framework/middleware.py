"""Keeps HTML out of the API: what Django answers by itself below /api/ becomes a problem."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest
from django.http.response import HttpResponseBase

from portal.api.framework import problems

PRESERVED_HEADERS = {"Allow", "Retry-After", "WWW-Authenticate"}
"""What belongs to a status (RFC 9110) and not to the page that came with it."""


class ApiProblemMiddleware:
    """Stands before whatever refuses: an error page below /api/ (bad host, crash, 404) goes out as problem+json."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        answer = self.get_response(request)
        if answer.status_code < 400 or not request.path.startswith("/api/"):
            return answer
        if answer.get("Content-Type", "").startswith(problems.MEDIA_TYPE):
            return answer
        problem = problems.response_for_status(answer.status_code)
        for name in PRESERVED_HEADERS & {name for name, _ in answer.items()}:
            problem[name] = answer[name]
        return problem
