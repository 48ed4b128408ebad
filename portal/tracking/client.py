"""Requests to the tracking server over its unix socket, each in the workspace of one project."""

from __future__ import annotations

import http.client
import json
import logging
import os
import socket
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlencode

from portal.admission import waiting_for_others
from portal.config import data_paths
from portal.errors import FairwayError, InvalidRequest, NotFound

log = logging.getLogger(__name__)

TIMEOUT_S = 7.0
"""Below the time limit of a request of the web process."""
WORKSPACE_HEADER = "X-MLFLOW-WORKSPACE"


class TrackingUnavailable(FairwayError):
    """The tracking server does not answer: 503."""

    status = 503
    code = "tracking_unavailable"
    retry_after_s = 5

    def __init__(self) -> None:
        super().__init__("The tracking server does not respond. Try again in a moment.")


def socket_path() -> Path:
    named = os.environ.get("FAIRWAY_TRACKING_SOCKET")
    return Path(named) if named else data_paths.tracking_socket(data_paths.data_dir())


class _Connection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(socket_path()))


def send(
    project: str,
    method: str,
    path: str,
    *,
    query: str = "",
    body: bytes | IO[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> http.client.HTTPResponse:
    """Send one request. Raise TrackingUnavailable.

    ``path`` starts with ``/api/`` and is not encoded yet; ``query`` is, but may have other characters in it.
    """
    connection = _Connection("localhost", timeout=timeout_s)
    sent = {WORKSPACE_HEADER: project, **(headers or {})}
    target = quote(path) + (f"?{quote(query, safe=string.punctuation)}" if query else "")
    try:
        with waiting_for_others():
            connection.request(method, target, body, sent)
            return connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        log.warning("the tracking server does not respond: %s", error)
        raise TrackingUnavailable from error


def call(
    project: str, method: str, name: str, body: Mapping[str, Any] | None = None, /, **query: Any
) -> dict[str, Any]:
    """Call an endpoint such as ``runs/get`` and return its JSON answer.

    Raise NotFound or InvalidRequest with MLflow's message, or TrackingUnavailable.
    """
    content = None if body is None else json.dumps(body).encode()
    given = urlencode({key: value for key, value in query.items() if value is not None}, doseq=True)
    headers = {"Content-Type": "application/json"} if content else None
    with send(
        project, method, f"/api/2.0/mlflow/{name}", query=given, body=content, headers=headers
    ) as answer:
        try:
            found = json.loads(answer.read() or b"{}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise TrackingUnavailable from error
    if answer.status == http.HTTPStatus.OK:
        return dict(found)
    if answer.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("the tracking server failed to answer %s: %s", name, found)
        raise TrackingUnavailable
    message = str(found.get("message", "The request is not valid."))
    raise NotFound(message) if answer.status == http.HTTPStatus.NOT_FOUND else InvalidRequest(message)


def read_chunks(answer: http.client.HTTPResponse, size: int = 256 * 1024) -> Iterator[bytes]:
    """Yield the body of an answer and close it."""
    with answer:
        while chunk := answer.read(size):
            yield chunk
