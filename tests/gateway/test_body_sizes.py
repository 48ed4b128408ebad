"""A body that is too long is refused while it comes: for the portal always, for workspaces where it is set so."""

from __future__ import annotations

import json
import select
import socket
import time

import pytest

from portal.domain.storage.uploads import is_upload_path
from portal.gateway.apps.portal_app import MAX_BODY_BYTES
from portal.gateway.proxy import http_proxy
from portal.services.workspaces.access import do_open_workspace
from tests.gateway.gateway_harness import Testbed, running_workspace
from tests.time_budget import budget_s

MIB = 1024 * 1024


def _talk(
    testbed: Testbed, head: str, *pieces: bytes, count: int = 1
) -> tuple[int, dict[str, str], bytes, int]:
    """Status, headers and body of the answer, and how many bytes of the body went out before it came."""
    with socket.create_connection(("127.0.0.1", testbed.port), timeout=10) as wire:
        wire.sendall(head.encode() + b"\r\n")
        sent = _send(wire, [*pieces] * count)
        wire.settimeout(10)
        answer = b""
        while chunk := wire.recv(65536):
            answer += chunk
            head_end = answer.find(b"\r\n\r\n")
            if head_end > 0 and b"content-length: " in answer[:head_end]:
                length = int(answer.split(b"content-length: ")[1].split(b"\r\n")[0])
                if len(answer) >= head_end + 4 + length:
                    break
    first, _, rest_of = answer.partition(b"\r\n")
    raw_head, _, body = rest_of.partition(b"\r\n\r\n")
    headers = dict(line.decode().lower().split(": ", 1) for line in raw_head.split(b"\r\n"))
    return int(first.split()[1]), headers, body, sent


def _send(wire: socket.socket, pieces: list[bytes]) -> int:
    """Sends until all is gone or the other side speaks; how much went out."""
    sent = 0
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            heard, free, _ = select.select([wire], [wire], [], 10)
            if heard or not free:
                return sent
            try:
                size = wire.send(rest, socket.MSG_DONTWAIT)
            except (BlockingIOError, ConnectionError):
                continue
            rest, sent = rest[size:], sent + size
    return sent


def _head(host: str, *lines: str, path: str = "/api/v1/jobs/") -> str:
    return "".join(f"{line}\r\n" for line in (f"POST {path} HTTP/1.1", f"Host: {host}", *lines))


CHUNK = b"10000\r\n" + b"x" * 65536 + b"\r\n"


def test_a_body_with_a_large_declared_length_is_refused_before_reading(testbed) -> None:
    began_s = time.monotonic()
    status, headers, body, _ = _talk(
        testbed, _head("localhost:8000", f"Content-Length: {MAX_BODY_BYTES + 1}")
    )
    assert status == 413
    assert time.monotonic() - began_s < budget_s(3)
    assert headers["content-type"] == "application/problem+json"
    assert headers["connection"] == "close"
    assert json.loads(body)["code"] == "too_large"


def test_a_body_without_a_length_is_refused_where_it_grows_too_long(testbed) -> None:
    status, _, body, sent = _talk(
        testbed, _head("localhost:8000", "Transfer-Encoding: chunked"), CHUNK, count=2000
    )
    assert status == 413
    assert json.loads(body)["detail"] == "At most 2 MiB are allowed. Nothing was stored."
    assert sent < 64 * MIB  # of 125: nobody read to the end


def test_a_browser_gets_a_page(testbed) -> None:
    lines = ("Accept: text/html", f"Content-Length: {MAX_BODY_BYTES + 1}")
    status, headers, body, _ = _talk(testbed, _head("localhost:8000", *lines, path="/jobs/"), b"x" * 1000)
    assert status == 413
    assert headers["content-type"].startswith("text/html")
    assert b"Request too large" in body


@pytest.mark.parametrize("chunked", [True, False])
def test_the_longest_body_passes(testbed, chunked) -> None:
    if chunked:
        pieces = [CHUNK] * (MAX_BODY_BYTES // 65536) + [b"0\r\n\r\n"]
        head = _head("localhost:8000", "Transfer-Encoding: chunked")
    else:
        pieces, head = [b"x" * MAX_BODY_BYTES], _head("localhost:8000", f"Content-Length: {MAX_BODY_BYTES}")
    assert _talk(testbed, head, *pieces)[0] == 200


@pytest.mark.parametrize(("path", "status"), [("/jobs/j1/files/upload/", 200), ("/jobs/j1/files/", 413)])
def test_only_the_routes_of_uploads_accept_a_file(testbed, path, status) -> None:
    size = 3 * MIB
    head = _head("localhost:8000", f"Content-Length: {size}", path=path)
    assert _talk(testbed, head, b"x" * size)[0] == status


def test_the_routes_of_uploads() -> None:
    uploads = (
        "/launch/",
        "/jobs/j1/files/upload/",
        "/api/v1/jobs/j1/files/content/",
        "/api/v1/projects/p/code/",
    )
    others = ("/launch/check/", "/jobs/j1/files/", "/api/v1/jobs/", "/x/launch/", "/jobs/a/b/files/upload/")
    assert all(map(is_upload_path, uploads)) and not any(map(is_upload_path, others))


def test_data_beyond_the_declared_length_is_not_part_of_the_body(testbed) -> None:
    """What follows the ten bytes can only be another request, and is none."""
    status, _, body, _ = _talk(testbed, _head("localhost:8000", "Content-Length: 10"), b"y" * 10 + b"z" * MIB)
    assert status == 400 or json.loads(body)["body"] == "eXl5eXl5eXl5eQ=="


def test_workspaces_accept_what_their_tool_accepts(testbed, workspace, cookie) -> None:
    lines = (f"Cookie: {cookie}", f"Content-Length: {16 * MIB}")
    status, _, body, _ = _talk(
        testbed, _head(testbed.host(workspace), *lines, path="/upload"), b"x" * 16 * MIB
    )
    assert (status, json.loads(body)["bytes"]) == (200, 16 * MIB)


def test_a_limit_for_uploads_to_workspaces_can_be_set(
    monkeypatch, transactional_db, tmp_path, owner, session
) -> None:
    monkeypatch.setenv("FAIRWAY_WORKSPACE_UPLOAD_MIB", "4")
    with Testbed(tmp_path) as testbed:
        job = running_workspace(owner, port=testbed.tool.port)
        _, ticket = do_open_workspace(owner, job, session)
        cookie = testbed.enter(job, ticket).headers["set-cookie"].partition(";")[0]
        host = testbed.host(job)
        small = _head(host, f"Cookie: {cookie}", f"Content-Length: {4 * MIB}", path="/upload")
        assert _talk(testbed, small, b"x" * 4 * MIB)[0] == 200
        large = _head(host, f"Cookie: {cookie}", "Transfer-Encoding: chunked", path="/upload")
        status, _, body, _ = _talk(testbed, large, CHUNK, count=2000)
        assert status == 413
        assert b"At most 4 MiB" in body
        with testbed.browser(job) as browser:  # the next one is none the worse
            assert browser.get("/lab", headers={"Cookie": cookie}).status_code == 200


def test_a_stalled_body_is_abandoned(testbed, monkeypatch):
    monkeypatch.setattr(http_proxy, "BODY_IDLE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(http_proxy, "WATCH_AFTER_S", 0.2)
    head = "POST /echo HTTP/1.1\r\nHost: localhost:8000\r\nContent-Length: 100\r\n"
    status, headers, _, _ = _talk(testbed, head, b"only this")
    assert (status, headers["connection"]) == (408, "close")
