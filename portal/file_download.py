"""Files of a job over HTTP, for pages and REST: always a download that no browser renders, never a page."""

from __future__ import annotations

from typing import Any

from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, StreamingHttpResponse

from portal.artifact_download import attachment_name
from portal.selectors.logs.files import iterate_in_thread
from portal.services.jobs.files import Download

FILE_TYPE, ARCHIVE_TYPE = "application/octet-stream", "application/zip"


class FileResponse(StreamingHttpResponse):
    """A response that ends the reading on the node when it is closed."""

    def __init__(self, request: HttpRequest, download: Download, content_type: str) -> None:
        self._chunks = download.chunks
        served: Any = iterate_in_thread(self._chunks) if isinstance(request, ASGIRequest) else self._chunks
        super().__init__(served, content_type=content_type)
        self["Content-Disposition"] = attachment_name(download.name)
        self["Content-Security-Policy"] = "sandbox"
        self["Cache-Control"] = "no-store"
        if download.size_bytes is not None:
            self["Content-Length"] = str(download.size_bytes)

    def close(self) -> None:
        self._chunks.close()
        super().close()
