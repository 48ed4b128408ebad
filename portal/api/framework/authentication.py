"""Authentication of REST requests: a bearer token, or the portal's session with its CSRF token."""

from __future__ import annotations

from typing import cast

from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import PermissionDenied, Throttled
from rest_framework.request import Request

from portal.errors import Forbidden, Unauthenticated
from portal.models import ApiToken, User
from portal.services.accounts.tokens import get_token
from portal.services.audit import request_address
from portal.valkey import rate_limits


class BearerTokenAuthentication(BaseAuthentication):
    """``Authorization: Bearer fw_...``. An invalid header is refused, also when a session exists."""

    def authenticate(self, request: Request) -> tuple[User, ApiToken] | None:
        """Return owner and token; None without the header. Raise Unauthenticated for an invalid token."""
        header = request.META.get("HTTP_AUTHORIZATION", "")
        if not header:
            return None
        kind, _, text = header.partition(" ")
        if kind.lower() != "bearer":
            raise Unauthenticated("Use 'Authorization: Bearer fw_...'.", code="invalid_token")
        try:
            token = get_token(text.strip())
        except Unauthenticated:
            wait_s = rate_limits.consume(rate_limits.INVALID_TOKENS, client_key(request))
            if wait_s > 0:
                raise Throttled(wait_s) from None
            raise
        return token.owner, token

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="fairway"'


class PortalSessionAuthentication(SessionAuthentication):
    """The portal's session cookie; unsafe methods need the CSRF token in X-CSRFToken."""

    def enforce_csrf(self, request: Request) -> None:
        """Raise Forbidden where Django's CSRF check refuses."""
        try:
            # of Django's request: the parsers of REST would read the body, which may be a file
            super().enforce_csrf(cast("Request", request._request))
        except PermissionDenied as error:
            raise Forbidden(
                "The CSRF token is missing or wrong. Reload the page and try again.", code="csrf_failed"
            ) from error


def client_key(request: Request) -> str:
    """Return the rate-limit key of an anonymous request: the client address set by the middleware."""
    return rate_limits.rate_limit_address(request_address.get() or str(request.META.get("REMOTE_ADDR") or ""))
