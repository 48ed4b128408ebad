"""The URL table of the web process."""

from __future__ import annotations

from django.urls import URLPattern, URLResolver, include, path

urlpatterns: list[URLPattern | URLResolver] = [
    path("", include("portal.api.urls")),
    path("", include("portal.web.urls")),
]

handler400 = "portal.web.middleware.error_pages.bad_request"
handler403 = "portal.web.middleware.error_pages.permission_denied"
handler404 = "portal.web.middleware.error_pages.not_found"
handler500 = "portal.web.middleware.error_pages.server_error"
