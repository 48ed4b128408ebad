"""Files over HTTP that no browser renders: logs (whole, a byte range by RFC 9110 section 14, or several as a ZIP
file), files of a job, and files that a run stored."""

from __future__ import annotations

import http.client
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote
from zipfile import ZIP_DEFLATED, ZipFile

from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.http import http_date

from portal.errors import NotFound
from portal.selectors.jobs.logs import text
from portal.selectors.jobs.logs.files import iterate_in_thread
from portal.selectors.jobs.logs.lines import LogFile
from portal.services.jobs.files import Download
from portal.tracking.client import read_chunks

_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})", re.IGNORECASE)
PLAIN_TEXT = "text/plain; charset=utf-8"
FILE_TYPE, ARCHIVE_TYPE = "application/octet-stream", "application/zip"


def log_download_response(
    request: HttpRequest, log: LogFile, *, job: str, timestamps: bool = False
) -> HttpResponseBase:
    """Return everything mirrored so far, or one byte range; a request for several ranges gets the whole log.

    A complete log has a strong ETag for If-Range; an incomplete one is append-only. Raise NotFound if the log
    does not exist or was removed.
    """
    if not log.path.is_file():
        if log.is_expired:
            raise NotFound("This log is older than logs are kept here.", code="log_expired")
        raise NotFound("This rank has written no log yet.", code="no_log_yet")
    upto = log.size_bytes
    tag = f'"{job}-{log.attempt}-{log.rank}-{upto}-{"s" if timestamps else "p"}"' if log.complete else ""
    asked = _asked_range(request)
    same = request.headers.get("If-Range", tag) == tag
    pieces: Iterator[bytes]
    if asked is None or not same:
        pieces = text.read_all(log, timestamps=timestamps, max_bytes=upto)
        answer: HttpResponseBase = _streaming_response(request, pieces)
    else:
        size = text.text_size(log, timestamps=timestamps, max_bytes=upto)
        span = _byte_range(asked, size)
        if span is None:
            return HttpResponse(
                status=416, headers={"Content-Range": f"bytes */{size}", "Cache-Control": "no-store"}
            )
        pieces = text.slice_chunks(
            text.read_all(log, timestamps=timestamps, max_bytes=upto), span.start, span.stop
        )
        answer = _streaming_response(request, pieces, status=206)
        answer["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{size}"
        answer["Content-Length"] = str(len(span))
    if tag:
        answer["ETag"] = tag
    answer["Accept-Ranges"] = "bytes"
    answer["Content-Disposition"] = f'attachment; filename="{job}-{log.attempt}-{log.rank}.log"'
    answer["Cache-Control"] = "no-store"
    return answer


def log_archive_response(request: HttpRequest, logs: Sequence[LogFile], *, job: str) -> HttpResponseBase:
    """Return what is mirrored of each log so far as a ZIP file; ranks without a log are left out."""
    present = [log for log in logs if log.path.is_file()]
    if not present:
        raise NotFound(
            "No rank has a log here: none was written yet, or they were removed.", code="no_log_yet"
        )
    answer = _streaming_response(request, _zip_pieces(present), content_type=ARCHIVE_TYPE)
    answer["Content-Disposition"] = f'attachment; filename="{job}-{present[0].attempt}.zip"'
    answer["Cache-Control"] = "no-store"
    return answer


class _Pieces:
    """A file for ``ZipFile`` that cannot seek; ``take`` returns what was written since the last call."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def flush(self) -> None:
        pass

    def take(self) -> bytes:
        data, self._data = bytes(self._data), bytearray()
        return data


def _zip_pieces(logs: Sequence[LogFile]) -> Iterator[bytes]:
    written = _Pieces()
    with ZipFile(written, "w", ZIP_DEFLATED) as archive:  # type: ignore[call-overload]
        for log in logs:
            with archive.open(f"{log.label.replace(' ', '-')}.log", "w", force_zip64=True) as entry:
                for piece in text.read_all(log, timestamps=False):
                    entry.write(piece)
                    yield written.take()
    yield written.take()


def _streaming_response(
    request: HttpRequest, pieces: Iterator[bytes], status: int = 200, content_type: str = PLAIN_TEXT
) -> StreamingHttpResponse:
    return StreamingHttpResponse(_response_body(request, pieces), content_type=content_type, status=status)


def _response_body(request: HttpRequest, pieces: Iterator[bytes]) -> Any:
    return iterate_in_thread(pieces) if isinstance(request, ASGIRequest) else pieces


class _AskedRange(NamedTuple):
    """First and last byte; without the first one, the number of bytes at the end."""

    first: int | None
    last: int | None


def _asked_range(request: HttpRequest) -> _AskedRange | None:
    """Return the one range that a GET asks for; None for everything else, which gets the whole file."""
    found = _RANGE.fullmatch(request.headers.get("Range", "").strip())
    if found is None or request.method != "GET":
        return None
    first, last = (int(each) if each else None for each in found.groups())
    is_invalid = last is None if first is None else last is not None and last < first
    return None if is_invalid else _AskedRange(first, last)


def _byte_range(asked: _AskedRange, size: int) -> range | None:
    """Return the byte range of a file of ``size`` bytes, or None if it is beyond the end or empty."""
    first, last = asked
    if first is None:
        start, stop = max(0, size - (last or 0)), size
    else:
        start, stop = first, size if last is None else min(last + 1, size)
    return range(start, stop) if start < stop else None


ARTIFACT_STATUSES = (200, 206, 416)
"""Of answers of the tracking server that are passed on: the file, a part of it, or that it has no such part."""
_ARTIFACT_HEADERS = ("Content-Length", "Content-Range", "Accept-Ranges", "ETag", "Last-Modified")


def range_headers(request: HttpRequest) -> dict[str, str]:
    """Return the headers of a request that decide which part of an artifact the tracking server sends."""
    if _asked_range(request) is None:
        return {}
    return {name: request.headers[name] for name in ("Range", "If-Range") if name in request.headers}


def artifact_response(
    request: HttpRequest, answer: http.client.HTTPResponse, name: str
) -> StreamingHttpResponse:
    """Return an artifact, or the part that ``range_headers`` asked for, as a download that no browser renders."""
    found = _streaming_response(request, read_chunks(answer), answer.status, FILE_TYPE)
    for header in _ARTIFACT_HEADERS:
        if value := answer.headers.get(header):
            found[header] = value
    found["Content-Security-Policy"] = "sandbox"
    found["Cache-Control"] = "no-store"
    found["Content-Disposition"] = attachment_name(name or "artifact")
    return found


def attachment_name(name: str) -> str:
    """Return a Content-Disposition that downloads under this name, by RFC 6266.

    Characters that no file system or browser takes are replaced; programs that only know ASCII get a second name.
    """
    safe = "".join(each if each.isprintable() and each not in "/\\" else "_" for each in name)
    plain = unicodedata.normalize("NFKD", safe).encode("ascii", "ignore").decode() or "download"
    plain = re.sub(r'["%;/\\]', "_", plain)  # some of them only since they were decomposed
    if plain == safe:
        return f'attachment; filename="{safe}"'
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(safe, safe='')}"


OpenDownload = Callable[[int], Download]
"""Opens a file at an offset in bytes."""


def file_response(request: HttpRequest, open_at: OpenDownload) -> HttpResponseBase:
    """Return a file of a job, or one byte range of it; a request for several ranges gets the whole file.

    The ETag, of size and time of change, decides for If-Range, so that a download that was interrupted is
    continued only while the file is the same. From nodes that cannot begin inside a file, all is sent.
    """
    asked = _asked_range(request)
    opened = open_at((asked.first or 0) if asked else 0)
    size, tag = opened.size_bytes, _file_tag(opened)
    if size is None or opened.offset is None or asked is None:
        return _FileResponse(request, opened, FILE_TYPE)
    if request.headers.get("If-Range", tag) != tag:
        return _FileResponse(request, _opened_at(0, opened, open_at), FILE_TYPE)
    span = _byte_range(asked, size)
    if span is None:
        opened.chunks.close()
        headers = {"Content-Range": f"bytes */{size}", "Cache-Control": "no-store"}
        return HttpResponse(status=416, headers=headers)
    opened = _opened_at(span.start, opened, open_at)
    if _file_tag(opened) != tag:
        return _FileResponse(request, _opened_at(0, opened, open_at), FILE_TYPE)
    return _FileResponse(request, opened, FILE_TYPE, span)


def _opened_at(offset: int, opened: Download, open_at: OpenDownload) -> Download:
    if opened.offset == offset:
        return opened
    opened.chunks.close()
    return open_at(offset)


def _file_tag(opened: Download) -> str:
    return f'"{opened.size_bytes}-{opened.saved_s.hex()}"'


def archive_response(request: HttpRequest, opened: Download) -> HttpResponseBase:
    return _FileResponse(request, opened, ARCHIVE_TYPE)


class _FileResponse(StreamingHttpResponse):
    """A response that ends the reading on the node when it is closed."""

    def __init__(
        self, request: HttpRequest, download: Download, content_type: str, span: range | None = None
    ) -> None:
        self._chunks = download.chunks
        pieces = self._chunks if span is None else text.slice_chunks(self._chunks, 0, len(span))
        status = 200 if span is None else 206
        super().__init__(_response_body(request, pieces), content_type=content_type, status=status)
        self["Content-Disposition"] = attachment_name(download.name)
        self["Content-Security-Policy"] = "sandbox"
        self["Cache-Control"] = "no-store"
        if download.size_bytes is not None:
            self["Content-Length"] = str(download.size_bytes if span is None else len(span))
        if download.offset is not None:
            self["Accept-Ranges"] = "bytes"
            self["ETag"] = _file_tag(download)
            self["Last-Modified"] = http_date(download.saved_s)
        if span is not None:
            self["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{download.size_bytes}"

    def close(self) -> None:
        self._chunks.close()
        super().close()
