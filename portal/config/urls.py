"""The URL table of the web process."""

from __future__ import annotations

from django.urls import URLPattern, URLResolver, include, path

urlpatterns: list[URLPattern | URLResolver] = [
    path("", include("portal.api.urls")),
    path("", include("portal.web.urls")),
]

handler400 = "portal.web.refusals.bad_request"
handler403 = "portal.web.refusals.permission_denied"
handler404 = "portal.web.refusals.not_found"
handler500 = "portal.web.refusals.server_error"
