"""Sets the security headers of every response, including a content security policy with a nonce."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest, HttpResponseBase

from portal.static_error_page import PERMISSIONS_POLICY

STATIC_HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": PERMISSIONS_POLICY,
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class SecurityHeadersMiddleware:
    """The outermost middleware, so that responses of other middleware, such as for a wrong host, pass it too.

    A view may set its own ``Content-Security-Policy`` or ``Referrer-Policy``.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        request.csp_nonce = secrets.token_urlsafe(18)  # type: ignore[attr-defined]
        response = self.get_response(request)
        response.headers.setdefault("Content-Security-Policy", content_security_policy(request))
        for name, value in STATIC_HEADERS.items():
            response.headers.setdefault(name, value)
        if response.status_code >= 400 or not request.path.startswith(settings.STATIC_URL):
            response.headers.setdefault("Cache-Control", "no-store")
        return response


def content_security_policy(request: HttpRequest) -> str:
    """Return the policy of a page: own files, scripts by nonce, forms to portal and workspace origins."""
    nonce = f"'nonce-{request.csp_nonce}'"  # type: ignore[attr-defined]
    scheme = "https" if settings.HTTPS_ENABLED else "http"
    # the only origin that /live/ accepts
    socket = "ws" + settings.PORTAL_URL.rstrip("/").removeprefix("http")
    rules = {
        "default-src": "'none'",
        "script-src": f"'self' {nonce}",
        "style-src": f"'self' {nonce}",
        "img-src": "'self' data:",
        "font-src": "'self'",
        "connect-src": f"'self' {socket}",
        "manifest-src": "'self'",
        "form-action": f"'self' {scheme}://*.{settings.APPS_DOMAIN}",
        "base-uri": "'none'",
        "object-src": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())
