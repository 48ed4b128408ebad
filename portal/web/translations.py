"""Texts of scripts in the language of the page, and labels of the domain that pages translate."""

from __future__ import annotations

from collections.abc import Iterator

from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import cache_control
from django.views.decorators.http import require_safe
from django.views.i18n import JavaScriptCatalog

from portal.access import AccessPolicy, access_policy

_catalogue = JavaScriptCatalog.as_view()


@access_policy(AccessPolicy.PUBLIC)
@require_safe
@cache_control(private=True, max_age=3600)
def script_translations(request: HttpRequest) -> HttpResponse:
    """Return the script that defines ``gettext`` for scripts; pages name their language in its address."""
    return _catalogue(request)  # type: ignore[return-value]


def translated_labels() -> Iterator[str]:
    """Return labels that are written in English in the domain, for the catalogues."""
    yield from ()
