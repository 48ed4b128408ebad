"""Default-deny middleware: a route without a declared access policy is closed to everyone.

Pages are checked here, before the view runs. REST views must read bearer tokens first, so they set
``checks_policy_itself`` and call ``portal.access.enforce`` once they know the user; their declaration is
still required here.
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
"""Methods that cannot change cached answers, such as projects and memberships."""


def policy_of(view: ViewCallable) -> AccessPolicy | None:
    """Return the declared policy of a view function or of its class."""
    for holder in (view, getattr(view, "view_class", None), getattr(view, "cls", None)):
        declared = getattr(holder, "access_policy", None)
        if declared is not None:
            return AccessPolicy(declared)
    return None


def enforces_policy_itself(view: ViewCallable) -> bool:
    """Return True for views that enforce the policy themselves, after reading a token."""
    holders = (view, getattr(view, "view_class", None), getattr(view, "cls", None))
    return any(getattr(holder, "checks_policy_itself", False) for holder in holders)


class PolicyMiddleware:
    """Reject routes without a policy, redirect anonymous users to sign-in, and record the client address."""

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
        wanted = policy_of(view)
        if wanted is None:
            raise RuntimeError(f"the route {request.path} declares no policy")
        if enforces_policy_itself(view):
            return None
        try:
            enforce(request.user, wanted)
            if request.user.is_authenticated:
                renew_session(request.session)
        except Forbidden as error:
            raise PermissionDenied(error.message) from error
        except Unauthenticated:
            if request.headers.get("HX-Request"):
                answer = HttpResponse(status=401)
                answer["HX-Redirect"] = settings.LOGIN_URL
                return answer
            back = request.get_full_path() if request.method == "GET" else "/"
            return HttpResponseRedirect(f"{settings.LOGIN_URL}?{urlencode({'next': back})}")
        return None


def _record_denied_request(request: HttpRequest) -> None:
    """Write an audit row for a denied change, or for any denied request to a route of administrators."""
    match, user = request.resolver_match, request.user
    if match is None or not isinstance(user, User):
        return
    if request.method in SAFE_METHODS and policy_of(match.func) is not AccessPolicy.ADMIN:
        return
    try:
        record_denied_request(user, method=request.method or "", path=request.path, route=match.view_name)
    except DatabaseError as error:
        log.error("a refused request is not in the audit trail: %s", error)
