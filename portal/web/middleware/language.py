"""The language of a page: that of the user, else that of the browser. REST answers in English."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.utils import translation
from django.utils.cache import patch_vary_headers

from portal.models import User
from portal.policy_middleware import ViewCallable, enforces_policy_itself

ENGLISH_PATHS = ("/api/",)


class LanguageMiddleware:
    """Activate the language of each page; behind the policy middleware, which reads the user of a page first."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if request.path.startswith(ENGLISH_PATHS):
            return self.get_response(request)
        with translation.override(translation.get_language_from_request(request)):
            answer = self.get_response(request)
        patch_vary_headers(answer, ("Accept-Language",))
        return answer

    def process_view(self, request: HttpRequest, view: ViewCallable, args: Any, kwargs: Any) -> None:
        if not enforces_policy_itself(view) and isinstance(request.user, User) and request.user.language:
            translation.activate(request.user.language)
