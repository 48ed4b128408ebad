"""Serves static files with WhiteNoise, which under ASGI would read each file before its first byte."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase
from whitenoise.middleware import WhiteNoiseMiddleware

from portal.selectors.jobs.logs.files import iterate_in_thread

CHUNK_BYTES = 256 * 1024
IMMUTABLE = f"max-age={WhiteNoiseMiddleware.FOREVER}, public, immutable"


class StaticFilesMiddleware(WhiteNoiseMiddleware):  # type: ignore[misc]
    """WhiteNoise that streams files; it scans them once at start."""

    def add_files(self, root: str | Path, prefix: str | None = None) -> None:
        """Ignore a missing folder, as before ``collectstatic``."""
        if Path(root).is_dir():
            super().add_files(root, prefix)

    @staticmethod
    def serve(static_file: Any, request: HttpRequest) -> HttpResponseBase:
        """Return the file, a range of it, or 304; browsers keep a URL with a version (tag ``asset``) for years."""
        answer = StaticFilesMiddleware._open(static_file, request)
        if "v" in request.GET and "Cache-Control" in answer.headers:
            answer.headers["Cache-Control"] = IMMUTABLE
        return answer

    @staticmethod
    def _open(static_file: Any, request: HttpRequest) -> HttpResponseBase:
        if not isinstance(request, ASGIRequest):
            answered: HttpResponseBase = WhiteNoiseMiddleware.serve(static_file, request)
            return answered
        found = static_file.get_response(request.method, request.META)
        answer = StreamingHttpResponse(_FileStream(found.file or io.BytesIO()), status=int(found.status))
        del answer.headers["Content-Type"]
        for name, value in found.headers:
            answer.headers[name] = value
        return answer


class _FileStream:
    """The bytes of a file; Django closes it with the response, also when none of them was sent."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.close = file.close

    def __aiter__(self) -> AsyncIterator[bytes]:
        return iterate_in_thread(iter(lambda: self._file.read(CHUNK_BYTES), b""))
