"""The door of every HTTP route: a route without a declared policy is closed, whoever asks. Refusals are logged.

Pages are checked here, before their view runs. REST views read bearer tokens first, so they set
``checks_policy_itself`` and ask ``portal.access.demand`` once they know the person; the declaration is still
demanded here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from portal.access import AccessPolicy, enforce
from portal.errors import Forbidden, Unauthenticated
from portal.models import User
from portal.request_cache import request_cache
from portal.services.accounts.sessions import renew_session
from portal.services.audit import request_address
from portal.services.audit_denials import record_denied_request

log = logging.getLogger(__name__)

ViewCallable = Callable[..., Any]

SAFE_METHODS = frozenset({"GET", "HEAD"})
"""Requests that change nothing of what is asked once in a look: projects, and who is in them."""


def policy_of(view: ViewCallable) -> AccessPolicy | None:
    """The declared policy of a view function or of the class behind it."""
    for holder in (view, getattr(view, "view_class", None), getattr(view, "cls", None)):
        declared = getattr(holder, "access_policy", None)
        if declared is not None:
            return AccessPolicy(declared)
    return None


def enforces_policy_itself(view: ViewCallable) -> bool:
    """True for views that ask for the policy themselves, after they have read a token."""
    holders = (view, getattr(view, "view_class", None), getattr(view, "cls", None))
    return any(getattr(holder, "checks_policy_itself", False) for holder in holders)


class PolicyMiddleware:
    """Refuses routes without a policy, sends the signed-out to sign in, notes the caller's address."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        token = request_address.set(request.META.get("REMOTE_ADDR") or None)
        try:
            with request_cache() if request.method in SAFE_METHODS else nullcontext():
                answer = self.get_response(request)
            if answer.status_code == HTTPStatus.FORBIDDEN:
                _record_denied_request(request)
                who = getattr(request.user, "username", "") or "nobody"
                log.warning(
                    "refused %s %r to %s from %s", request.method, request.path, who, request_address.get()
                )
            return answer
        finally:
            request_address.reset(token)

    def process_view(
        self, request: HttpRequest, view: ViewCallable, args: Any, kwargs: Any
    ) -> HttpResponse | None:
        """None lets the view run."""
        wanted = policy_of(view)
        if wanted is None:
            raise RuntimeError(f"the route {request.path} declares no policy")
        if enforces_policy_itself(view):
            return None
        try:
            enforce(request.user, wanted)
            if request.user.is_authenticated:
                renew_session(request.session)
        except Forbidden as refusal:
            raise PermissionDenied(refusal.message) from refusal  # the 403 page
        except Unauthenticated:
            if request.headers.get("HX-Request"):
                answer = HttpResponse(status=401)
                answer["HX-Redirect"] = settings.LOGIN_URL
                return answer
            back = request.get_full_path() if request.method == "GET" else "/"
            return HttpResponseRedirect(f"{settings.LOGIN_URL}?{urlencode({'next': back})}")
        return None


def _record_denied_request(request: HttpRequest) -> None:
    """Leave an audit row of a refused change, or of any refused request to a route of administrators."""
    match, user = request.resolver_match, request.user
    if match is None or not isinstance(user, User):
        return
    if request.method in SAFE_METHODS and policy_of(match.func) is not AccessPolicy.ADMIN:
        return
    try:
        record_denied_request(user, method=request.method or "", path=request.path, route=match.view_name)
    except DatabaseError as problem:
        log.error("a refused request is not in the audit trail: %s", problem)
