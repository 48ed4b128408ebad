"""Requests that two programs could read in two ways are refused, and never reach anything behind."""

from __future__ import annotations

import socket

import pytest

from portal.gateway.addresses import match_app_host
from portal.gateway.protocol.framing import framing_error
from tests.engine_harness import wait_for


def _send(testbed, raw: bytes, wait_s: float = 1.0) -> bytes:
    with socket.create_connection(("127.0.0.1", testbed.port), timeout=wait_s) as wire:
        wire.sendall(raw)
        answer = b""
        try:
            while chunk := wire.recv(65536):
                answer += chunk
        except (TimeoutError, ConnectionResetError):
            pass
    return answer


SMUGGLES = {
    "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "same length twice": b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "list of lengths": b"Content-Length: 5, 5\r\n\r\nhello",
    "length and chunks": b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "odd encoding": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked not last": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "identity": b"Transfer-Encoding: identity\r\nContent-Length: 5\r\n\r\nhello",
    "space before colon": b"Content-Length : 5\r\n\r\nhello",
    "negative": b"Content-Length: -5\r\n\r\nhello",
    "plus": b"Content-Length: +5\r\n\r\nhello",
    "hex": b"Content-Length: 0x5\r\n\r\nhello",
    "folded": b"Transfer-Encoding:\r\n chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "bad chunk size": b"Transfer-Encoding: chunked\r\n\r\n5;\r\nhelloGET /secret HTTP/1.1\r\n\r\n0\r\n\r\n",
    "null in value": b"X-A: a\x00b\r\nContent-Length: 0\r\n\r\n",
    "chunks in 1.0": b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "body of another protocol": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 23\r\n\r\n"
    b"GET /secret HTTP/1.1\r\n\r\n",
    "body of a handshake": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nContent-Length: 23\r\n\r\nGET /secret HTTP/1.1\r\n\r\n",
    "two hosts": b"Host: localhost:8000\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("what", SMUGGLES)
def test_ambiguous_framing_is_refused(testbed, workspace, cookie, what):
    version = "1.0" if what == "chunks in 1.0" else "1.1"
    head = f"POST /upload HTTP/{version}\r\nHost: {testbed.host(workspace)}\r\nCookie: {cookie}\r\n"
    answer = _send(testbed, head.encode() + SMUGGLES[what])
    assert answer.split()[1].startswith(b"4"), answer[:200]
    assert answer.count(b"HTTP/1.1 2") == 0
    assert all(entry.get("path") != "/secret" for entry in testbed.tool.seen)


def test_pipelined_requests_are_answered_separately(testbed, workspace, cookie):
    one = f"GET /one HTTP/1.1\r\nHost: {testbed.host(workspace)}\r\nCookie: {cookie}\r\n\r\n"
    two = f"GET /two HTTP/1.1\r\nHost: {testbed.host(workspace)}\r\n\r\n"
    three = "GET /three HTTP/1.1\r\nHost: localhost:8000\r\nConnection: close\r\n\r\n"
    answer = _send(testbed, (one + two + three).encode(), wait_s=3)
    assert answer.count(b"HTTP/1.1 ") == 3
    assert answer.index(b"tool at /one") < answer.index(b"HTTP/1.1 403") < answer.index(b'"/three"')
    assert [entry["path"] for entry in testbed.tool.seen] == ["/one"]


def test_bytes_after_a_refused_upgrade_are_not_a_request(testbed, workspace, cookie):
    head = (
        f"GET /socket HTTP/1.1\r\nHost: {testbed.host(workspace)}\r\nConnection: Upgrade\r\n"
        "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        f"GET /secret HTTP/1.1\r\nHost: {testbed.host(workspace)}\r\nCookie: {cookie}\r\n\r\n"
    )
    answer = _send(testbed, head.encode())
    assert b"HTTP/1.1 403" in answer
    assert not testbed.tool.seen


def test_an_upgrade_to_another_protocol_is_plain_http(testbed, workspace, cookie):
    head = (
        f"GET /plain HTTP/1.1\r\nHost: {testbed.host(workspace)}\r\nCookie: {cookie}\r\n"
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
    )
    _send(testbed, head.encode())
    for entry in testbed.tool.seen:
        assert b"upgrade" not in {name.lower() for name, _ in entry["headers"]}


def test_unknown_method_is_refused_with_allow(testbed):
    answer = _send(testbed, b"TRACE / HTTP/1.1\r\nHost: portal.localhost\r\n\r\n")
    assert b" 405 " in answer.split(b"\r\n")[0]
    assert b"allow: DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT\r\n" in answer


def test_a_missing_host_is_refused(testbed):
    assert b" 400 " in _send(testbed, b"GET / HTTP/1.1\r\n\r\n")
    assert b" 400 " in _send(testbed, b"GET / HTTP/1.0\r\n\r\n")


def test_an_absolute_target_names_its_host_and_no_other(testbed, workspace, cookie):
    rest = f"Host: {testbed.host(workspace)}\r\nCookie: {cookie}\r\nConnection: close\r\n\r\n"
    other = _send(testbed, f"GET http://127.77.0.1:22/x HTTP/1.1\r\n{rest}".encode())
    assert b"HTTP/1.1 400" in other
    assert not testbed.tool.seen
    assert b"tool at /x" in _send(
        testbed, f"GET http://{testbed.host(workspace).upper()}/x HTTP/1.1\r\n{rest}".encode()
    )
    assert testbed.tool.headers()["host"] == testbed.host(workspace)


def test_a_head_has_an_end(testbed, workspace, cookie, monkeypatch):
    monkeypatch.setattr("portal.gateway.protocol.http_protocol.HEAD_TIMEOUT_S", 0.3)
    start = f"GET /x HTTP/1.1\r\nHost: {testbed.host(workspace)}\r\nCookie: {cookie}\r\n"
    long = f"{start}X-A: {'a' * 70_000}\r\n\r\n".encode()
    assert b"HTTP/1.1 431" in _send(testbed, long)
    with socket.create_connection(("127.0.0.1", testbed.port), timeout=5) as wire:
        wire.sendall(start.encode())
        assert wire.recv(1000) == b""  # whoever does not go on is let go
    with socket.create_connection(("127.0.0.1", testbed.port), timeout=5) as wire:
        assert wire.recv(1000) == b""
    assert not testbed.tool.seen


def test_no_answer_falls_into_another(testbed, workspace, cookie):
    host = f"Host: {testbed.host(workspace)}\r\nCookie: {cookie}\r\n"
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nOrigin: http://{testbed.host(workspace)}\r\n"
    two = f"GET /one HTTP/1.1\r\n{host}\r\nGET /socket HTTP/1.1\r\n{host}{upgrade}{key}\r\n"
    assert b"101" not in _send(testbed, two.encode())
    wait_for("the first request has arrived", lambda: testbed.tool.seen)  # not during the next test


def test_bytes_invalid_in_a_url_are_refused(testbed, workspace, cookie):
    raw = f"GET /\xff HTTP/1.1\r\nHost: {testbed.host(workspace)}\r\nCookie: {cookie}\r\n\r\n"
    answer = _send(testbed, raw.encode("latin-1"))
    assert not answer or b"HTTP/1.1 2" not in answer
    assert not testbed.tool.seen


def test_framing_rules():
    host = (b"host", b"x")
    assert framing_error([host], b"/", b"") is None
    assert framing_error([host, (b"transfer-encoding", b"Chunked")], b"/", b"") is None
    assert framing_error([], b"/", b"")
    assert framing_error([host], b"*", b"")
    assert framing_error([host], b"/a b", b"")
    assert framing_error([host, (b"x", b"a\rb")], b"/", b"")


def test_hosts():
    assert match_app_host("localhost:8000", "localhost:8000") is None
    assert match_app_host("foo.localhost", "localhost:8000") is None
    assert match_app_host("WS-abc.LOCALHOST.:9", "localhost:8000").name == "abc"
    assert match_app_host("ws-abc.def.localhost", "localhost") is None
    assert match_app_host("ws-.localhost", "localhost").name == ""
    assert match_app_host("ws-a_b.localhost", "localhost").name == ""
    assert match_app_host("ws-abc.apps.example.org", "apps.example.org").name == "abc"
    assert match_app_host("ws-abc.localhost.evil.example", "localhost") is None
    assert match_app_host("[::1]:8000", "localhost") is None


def test_trailers_of_a_request_are_not_headers(testbed, workspace, cookie):
    head = (
        f"POST /x HTTP/1.1\r\nHost: {testbed.host(workspace)}\r\nCookie: {cookie}\r\n"
        "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    )
    trailers = b"X-Injected: 1\r\nHost: other\r\nOrigin: http://evil.example\r\n\r\n"
    answer = _send(testbed, head.encode() + b"2\r\nok\r\n0\r\n" + trailers)
    assert b"HTTP/1.1 200" in answer, answer[:200]
    assert not {"x-injected", "origin"} & set(testbed.tool.headers())


@pytest.mark.parametrize("where", ["one trailer", "many trailers", "chunk extension"])
def test_endless_framing_of_a_request_is_cut(testbed, workspace, cookie, where):
    head = (
        f"POST /upload HTTP/1.1\r\nHost: {testbed.host(workspace)}\r\nCookie: {cookie}\r\n"
        "Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n"
    )
    endless = {
        "one trailer": b"0\r\nX-A: " + b"a" * 600_000,
        "many trailers": b"0\r\n" + b"X-A: a\r\n" * 100_000,
        "chunk extension": b"2;x=" + b"a" * 600_000,
    }
    with socket.create_connection(("127.0.0.1", testbed.port), timeout=5) as wire:
        try:
            wire.sendall(head.encode() + endless[where])
            assert b"HTTP/1.1 2" not in wire.recv(65_536)
            assert wire.recv(65_536) == b"", "the connection is closed"
        except (ConnectionResetError, BrokenPipeError):
            pass
