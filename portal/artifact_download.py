"""A file that a run stored as a download over HTTP, for pages and the MLflow API."""

from __future__ import annotations

import http.client

from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, StreamingHttpResponse

from portal.selectors.logs.files import iterate_in_thread
from portal.tracking.client import read_chunks


def artifact_response(
    request: HttpRequest, answer: http.client.HTTPResponse, name: str
) -> StreamingHttpResponse:
    """Return a file of a user as a download that no browser renders."""
    chunks = read_chunks(answer)
    found = StreamingHttpResponse(
        iterate_in_thread(iter(chunks)) if isinstance(request, ASGIRequest) else chunks,
        content_type="application/octet-stream",
        headers={"Content-Security-Policy": "sandbox", "Cache-Control": "no-store"},
    )
    found["Content-Disposition"] = attachment_name(name or "artifact")
    return found


def attachment_name(name: str) -> str:
    """Return a Content-Disposition that downloads, with only letters, digits, dots and hyphens of the name."""
    safe = "".join(each if each.isalnum() or each in "._-" else "_" for each in name)
    return f'attachment; filename="{safe.encode("ascii", "replace").decode()}"'
