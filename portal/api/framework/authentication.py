"""Who asks: a bearer token in the Authorization header, or the portal's own session with its CSRF token."""

from __future__ import annotations

from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import PermissionDenied, Throttled
from rest_framework.request import Request

from portal.errors import Forbidden, Unauthenticated
from portal.models import ApiToken, User
from portal.services.accounts.tokens import get_token
from portal.services.audit import request_address
from portal.valkey import rate_limits


class BearerTokenAuthentication(BaseAuthentication):
    """``Authorization: Bearer fw_...``. A header that is there must be right; no session steps in."""

    def authenticate(self, request: Request) -> tuple[User, ApiToken] | None:
        """The owner and the token; None without the header, SignInNeeded when it is wrong."""
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
        """What a 401 asks for."""
        return 'Bearer realm="fairway"'


class PortalSessionAuthentication(SessionAuthentication):
    """The portal's session cookie; unsafe methods need the CSRF token in X-CSRFToken."""

    def enforce_csrf(self, request: Request) -> None:
        """Raises NotAllowed where Django's own check would refuse."""
        try:
            super().enforce_csrf(request)
        except PermissionDenied as refused:
            raise Forbidden(
                "The CSRF token is missing or wrong. Reload the page and try again.", code="csrf_failed"
            ) from refused


def client_key(request: Request) -> str:
    """Whom a request without a name counts for: the address that the middleware established."""
    return rate_limits.rate_limit_address(request_address.get() or str(request.META.get("REMOTE_ADDR") or ""))
