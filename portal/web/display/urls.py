"""URLs of views with one short argument, such as a public id: resolved once per view, a page has hundreds."""

from __future__ import annotations

from functools import lru_cache

from django.urls import reverse


def short_url(view: str, argument: str) -> str:
    """Return the URL of a view; ``argument`` consists of ASCII letters and digits."""
    before, after = _url_parts(view)
    return f"{before}{argument}{after}"


@lru_cache(maxsize=256)
def _url_parts(view: str) -> tuple[str, str]:
    before, __, after = reverse(view, args=("publicid",)).partition("publicid")
    return before, after
