"""A tool cannot clear, stuff or name cookies beyond its host, hide headers in trailers, or redirect to loopback."""

from __future__ import annotations

import html
import socket
import threading
from collections.abc import Callable, Iterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portal.gateway.protocol.cookies import (
    COOKIE_BYTES,
    COOKIE_BYTES_PER_HOST,
    COOKIES_PER_HOST,
    ToolCookies,
    portal_headers,
    read_cookie,
    tool_headers,
)
from portal.gateway.protocol.locations import rewrite_location, rewrite_refresh
from portal.services.jobs.attempt_secrets import decrypt_attempt_secret
from portal.services.workspaces.access import do_open_workspace
from tests.gateway.gateway_harness import attempt_of, running_workspace

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"


@pytest.fixture
def answering(testbed, owner, session) -> Iterator[Callable[..., httpx.Response]]:
    """Opens a workspace whose server sends these very bytes, and gives what the browser gets."""
    servers: list[socket.socket] = []

    def serve(listener: socket.socket, raw: bytes, seen: list[bytes]) -> None:
        while True:
            try:
                wire, _ = listener.accept()
            except OSError:
                return
            with wire:
                seen.append(wire.recv(65_536))
                wire.sendall(raw)

    def answer(raw: bytes, cookies: str = "") -> httpx.Response:
        listener = socket.create_server(("127.77.0.1", 0))
        servers.append(listener)
        seen: list[bytes] = []
        port = listener.getsockname()[1]
        workspace = running_workspace(owner, port=port)
        raw = raw.replace(b"{port}", str(port).encode())
        raw = raw.replace(b"{secret}", decrypt_attempt_secret(attempt_of(workspace)).encode())
        threading.Thread(target=serve, args=(listener, raw, seen), daemon=True).start()
        _, ticket = do_open_workspace(owner, workspace, session)
        own = testbed.enter(workspace, ticket).headers["set-cookie"].partition(";")[0]
        with testbed.browser(workspace) as browser:
            got = browser.get("/", headers={"Cookie": own + cookies})
        got.extensions["request_at_tool"] = seen[0] if seen else b""
        return got

    yield answer
    for listener in servers:
        listener.close()


def test_tool_sends_clear_site_data_browser_does_not_get_it(answering):
    got = answering(OK + b'Clear-Site-Data: "cookies", "storage"\r\nClear-site-data: *\r\n\r\nok')
    assert got.status_code == 200
    assert "clear-site-data" not in got.headers


def test_tool_sets_nameless_cookies_browser_gets_the_named_one(answering):
    got = answering(
        OK
        + b"Set-Cookie: =__Host-fairway_session=stolen; Path=/\r\n"
        + b"Set-Cookie:  = fairway_csrf=x\r\n"
        + b"Set-Cookie: justavalue; Path=/\r\n"
        + b"Set-Cookie: ;\r\n"
        + b"Set-Cookie: theme=dark; Path=/; domain=localhost\r\n\r\nok"
    )
    assert got.headers.get_list("set-cookie") == ["theme=dark; Path=/"]


def test_tool_sets_more_cookies_than_a_host_may_have_rest_is_dropped(answering):
    many = b"".join(b"Set-Cookie: c%d=1\r\n" % number for number in range(COOKIES_PER_HOST + 30))
    assert len(answering(OK + many + b"\r\nok").headers.get_list("set-cookie")) == COOKIES_PER_HOST
    large = b"".join(b"Set-Cookie: c%d=%b\r\n" % (number, b"x" * 3000) for number in range(9))
    assert len(answering(OK + large + b"\r\nok").headers.get_list("set-cookie")) == 2


def test_cookies_already_in_the_browser_count_against_the_bound(answering):
    sent = "".join(f"; c{number}=1" for number in range(COOKIES_PER_HOST - 1))
    raw = OK + b"Set-Cookie: c0=2\r\nSet-Cookie: first=1\r\nSet-Cookie: second=1\r\n\r\nok"
    assert answering(raw, cookies=sent).headers.get_list("set-cookie") == ["c0=2", "first=1"]


def test_browser_sends_too_many_cookies_tool_gets_those_within_the_bound(answering):
    sent = "; nameless; =empty" + "".join(f"; c{number}={'x' * 300}" for number in range(150))
    got = answering(OK + b"\r\nok", cookies=sent)
    assert got.status_code == 200, "the workspace stays reachable"
    line = next(
        each for each in got.extensions["request_at_tool"].split(b"\r\n") if each.startswith(b"cookie: ")
    )
    assert len(line) < COOKIE_BYTES_PER_HOST + 200
    assert line.startswith(b"cookie: c0=x")


def test_portal_gets_its_own_cookies_only(testbed):
    junk = "".join(f"junk{number}={'x' * 500}; " for number in range(100))
    with testbed.browser() as browser:
        sent = {"Cookie": f"nameless; {junk}fairway_session=abc; =x; __Host-fairway_csrf=d"}
        seen = dict(browser.get("/jobs/", headers=sent).json()["headers"])
    assert seen["cookie"] == "fairway_session=abc; __Host-fairway_csrf=d"


def test_trailers_of_an_answer_are_not_headers(answering):
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n"
    got = answering(chunked + b"X-Injected: 1\r\nSet-Cookie: fairway_session=x\r\nLocation: /away\r\n\r\n")
    assert got.text == "ok"
    assert not {"x-injected", "set-cookie", "location"} & set(got.headers)


@pytest.mark.parametrize("where", ["one trailer", "many trailers", "chunk extension"])
def test_endless_framing_of_an_answer_is_cut(answering, where):
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n"
    endless = {
        "one trailer": b"0\r\nX-A: " + b"a" * 600_000 + b"\r\n\r\n",
        "many trailers": b"0\r\n" + b"X-A: a\r\n" * 100_000 + b"\r\n",
        "chunk extension": b"2;x=" + b"a" * 600_000 + b"\r\nok\r\n0\r\n\r\n",
    }
    with pytest.raises(httpx.RemoteProtocolError):
        answering(chunked + endless[where])


REDIRECT = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: "


def test_redirect_to_the_tools_own_loopback_port_stays_in_the_workspace(answering):
    for origin in (b"http://127.77.0.1:{port}", b"http://127.0.0.1:8888", b"http://localhost:8888"):
        got = answering(REDIRECT + origin + b"/lab?reset=1#top\r\n\r\n")
        assert (got.status_code, got.headers["location"]) == (302, "/lab?reset=1#top")


def test_a_redirect_that_is_not_followed_becomes_a_page_that_says_so(answering):
    for address in (
        b"http://127.0.0.1:631/admin",
        b"http://printer.localhost:631/",
        b"http://127.0.0.1%00.evil/",
        b"javascript:alert(1)",
        b"/a\r\nLocation: /b",
    ):
        got = answering(REDIRECT + address + b"\r\nRefresh: 0; url=http://[::1]:22/\r\n\r\n")
        assert got.status_code == 502 and not {"location", "refresh"} & set(got.headers)
        shown = html.unescape(got.text)
        assert address.partition(b"\r")[0].decode() in shown and "This redirect is not followed" in shown


def test_an_address_that_no_redirect_names_is_only_dropped(answering):
    got = answering(OK + b"Location: http://127.0.0.1:631/\r\nContent-Location: http://[::1]:1/\r\n\r\nok")
    assert (got.status_code, got.text) == (200, "ok")
    assert not {"location", "content-location"} & set(got.headers)


def test_a_page_about_a_dropped_redirect_does_not_show_the_secret(answering, owner):
    address = b"http://127.0.0.1:631/?token={secret}"
    got = answering(REDIRECT + address + b"\r\n\r\n")
    assert got.status_code == 502 and "?token=***" in got.text


def test_addresses_that_a_browser_loads_are_not_on_the_users_machine(answering):
    got = answering(
        OK
        + b"Link: </style.css>; rel=preload, <http://127.0.0.1:8888/a>; rel=preload\r\n"
        + b"Link: <https://example.org/>; rel=next, <http://127.1:631/>; rel=preconnect\r\n"
        + b"Content-Security-Policy: default-src *; Report-URI http://[::1]/ /x; img-src *, report-to a\r\n"
        + b"Link: <http:localhost\r\nSourceMap: http://[::1]/x\r\nX-SourceMap: /own.map\r\n\r\nok"
    )
    assert got.headers.get_list("link") == ["</style.css>; rel=preload, </a>; rel=preload"]
    policies = got.headers.get_list("content-security-policy")
    assert policies == ["default-src *;; img-src *,", "frame-ancestors 'self'"]
    assert "sourcemap" not in got.headers and got.headers["x-sourcemap"] == "/own.map"


def test_instructions_for_a_front_server_are_dropped(answering):
    names = "X-Accel-Redirect X-Accel-Buffering X-Sendfile X-SENDFILE2 X-Send-File X-LIGHTTPD-send-file"
    names += " X-Reproxy-URL Surrogate-Control CDN-Cache-Control X-Fairway-User Set-Cookie2 NEL"
    names += " Report-To Edge-Control X-LiteSpeed-Location Reporting-Endpoints Speculation-Rules"
    sent = b"".join(f"{name}: /etc/passwd\r\n".encode() for name in names.split())
    got = answering(OK + sent + b"X-Own: 1\r\n\r\nok")
    assert got.headers["x-own"] == "1"
    assert not set(names.lower().split()) & set(got.headers)


ENDS = {
    "before its head": b"",
    "in its head": b"HTTP/1.1 200 OK\r\nContent-",
    "in a body with a length": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok",
    "before a body with a length": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n",
    "in a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nok",
    "between chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
    "with an invalid chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nok\r\n",
    "with an invalid status": b"HTTP/9.9 banana\r\n\r\n",
}
INVALID = {
    "status 999": b"HTTP/1.1 999 X\r\nContent-Length: 2\r\n\r\nok",
    "status 600": b"HTTP/1.1 600 X\r\nContent-Length: 2\r\n\r\nok",
    "status 099": b"HTTP/1.1 099 X\r\nContent-Length: 2\r\n\r\nok",
    "status 000": b"HTTP/1.1 000 X\r\nContent-Length: 2\r\n\r\nok",
    "another protocol": b"HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nok",
    "no final response": b"HTTP/1.1 101 X\r\n\r\n",
    "transfer encoding": b"HTTP/1.1 200 X\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "two transfer encodings": b"HTTP/1.1 200 X\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\nok\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 X\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "a length and chunks": b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\nok",
    "a folded header": b"HTTP/1.1 302 X\r\nX-A: 1\r\n Location: /a\r\n\r\n",
    "a header that ends with CR": b"HTTP/1.1 302 X\r\nLocation: /a\rSet-Cookie: b=1\r\n\r\n",
    "a name with a space": b"HTTP/1.1 302 X\r\nLocation : /a\r\n\r\n",
    "a name outside ASCII": "HTTP/1.1 200 X\r\nü: /a\r\n\r\n".encode(),
    "a head of 70 KiB": b"HTTP/1.1 200 X\r\nX-A: " + b"a" * 70_000,
}


def test_an_invalid_response_becomes_a_page_of_the_gateway(answering, caplog):
    for what, raw in INVALID.items():
        got = answering(raw)
        assert got.status_code == 502 and "The workspace does not respond" in got.text, what
        assert not {"location", "set-cookie"} & set(got.headers), what
    assert [each for each in caplog.records if each.levelname in ("ERROR", "CRITICAL")] == []


def test_an_upstream_that_closes_early_is_no_error_of_the_gateway(answering, caplog):
    for end, raw in ENDS.items():
        try:
            assert answering(raw).status_code == 502, end
        except httpx.RemoteProtocolError:
            assert end not in ("before its head", "in its head")
    assert [each for each in caplog.records if each.levelname in ("ERROR", "CRITICAL")] == []


PORTS = {8888, 31000}


@pytest.mark.parametrize(
    ("address", "reaches"),
    [
        ("/lab", "/lab"),
        ("lab?x=http://127.0.0.1:1/", "lab?x=http://127.0.0.1:1/"),
        ("https://example.org/x", "https://example.org/x"),
        ("http://ws-abc.localhost:8000/lab", "http://ws-abc.localhost:8000/lab"),
        ("http://localhost:8000/jobs/", "http://localhost:8000/jobs/"),
        ("http://ws-abc.localhost:8001/lab", None),
        ("http://a.localhost/", None),
        ("http://a.b.LocalHost../", None),
        ("http://ip6-localhost:631/", None),
        ("http://LOCALHOST.localdomain./", None),
        ("http://ip6-loopback:8888/lab", "/lab"),
        ("http://localhost.evil.example/", "http://localhost.evil.example/"),
        ("http://a.localhost:8888/lab", "/lab"),
        ("http://127.0.0.1%00.evil/", None),
        ("http://loc%61lhost:1/", None),
        ("http://\u217cocalhost:1/", None),
        ("http://\uff11\uff12\uff17\u3002\u24ea.0.1/", None),
        ("http://local\u00adhost/", None),
        ("http://m\u00fcnchen.example/\u00fc", "http://m\u00fcnchen.example/\u00fc"),
        ("http://0177.0.0.1/", None),
        ("http://0x7f.1/", None),
        ("http://127.0.0.1./", None),
        ("http://1.2.3.4.5/", None),
        ("http://256.1.1.1/", None),
        ("http://09.1.1.1/", None),
        ("http://0.0.0.1/", None),
        ("http://[::ffff:7f00:1]/", None),
        ("http://[64:ff9b::7f00:1]/", None),
        ("http://[::127.0.0.1]/", None),
        ("http://[fe80::1%25lo]/", None),
        ("http://[2001:db8::1]:8888/", "http://[2001:db8::1]:8888/"),
        ("http://example.org@127.0.0.1/", None),
        ("http://127.0.0.1@example.org/", "http://127.0.0.1@example.org/"),
        ("http://example.org\\@127.0.0.1/", "http://example.org\\@127.0.0.1/"),
        ("/\\127.0.0.1/", None),
        ("/\t/localhost/", None),
        (" \x01http://localhost/", None),
        ("http:///localhost/", None),
        ("http://", None),
        ("http://a b/", None),
        ("ftp://localhost/", None),
        ("javascript:alert(1)", None),
        ("data:text/html,x", None),
        ("?a:b", "?a:b"),
        ("files/a:b", "files/a:b"),
        ("", ""),
        ("http://10.0.0.5:8888/", "http://10.0.0.5:8888/"),
        ("http://127.0.0.1:8888", "/"),
        ("http://127.0.0.1:8888?a=1", "/?a=1"),
        ("http://user:word@LOCALHOST.:31000/a/b", "/a/b"),
        ("ws://127.77.0.1:31000/socket", "/socket"),
        ("http://127.0.0.1:8888//evil.example/", "/evil.example/"),
        ("http://0.0.0.0:8888/x", "/x"),
        ("http://[::1]:8888/x", "/x"),
        ("http://[::ffff:127.0.0.1]:8888/x", "/x"),
        ("//127.0.0.1/x", None),
        ("http://127.0.0.1/", None),
        ("http://127.0.0.1:22/", None),
        ("http://localhost", None),
        ("HTTP:\\\\127.0.0.1:631\\admin", None),
        ("http:127.0.0.1:631/", None),
        ("ht\ttp://127.0.0\n.1:631/", None),
        ("http://127.1:631/", None),
        ("http://2130706433:631/", None),
        ("http://0x7f000001:631/", None),
        ("http://127%2E0.0.1:631/", None),
        ("http://[::1]/", None),
        ("http://127.0.0.1:99999999/", None),
        ("http://127.0.0.1:x/", None),
        ("5; url=/lab", "5; url=/lab"),
        ("5", "5"),
        ("0;URL='http://localhost:8888/lab'", "0;URL=/lab"),
        ("0; http://localhost:22/", None),
        ("0, url=http://localhost:22/", None),
        ("0 url=http://localhost:22/", None),
        ("0\turl=http://localhost:22/", None),
        ("0;;,url=http://localhost:22/", None),
        ("0;url= 'http://localhost:22/' x", None),
        ("0;'http://localhost:22/", None),
        ('0;"url=http://localhost:22/', "0; url=url=http://localhost:22/"),
        (".5;url=http://localhost:22/", None),
        ("0.5.5;uRl\n= http://localhost:22/", None),
        ("0 http://localhost:8888/lab", "0; url=/lab"),
        ("0,,/lab", "0; url=/lab"),
        ('0;url="/a\'b"c', "0;url=/a%27b"),
        ("0;url", "0; url=url"),
        ("5;", "5"),
        ("5x;url=/lab", None),
    ],
)
def test_addresses_sent_to_the_browser(address, reaches):
    found = rewrite_location(address.encode(), PORTS)
    assert (found.decode() if found is not None else None) == reaches


_LOOPBACK = [
    "localhost",
    "a.localhost",
    "127.0.0.1",
    "127.1",
    "0x7f.0.0.1",
    "017700000001",
    "2130706433",
    "0.0.0.0",
]


@given(st.data())
def test_no_spelling_of_a_loopback_address_passes(drawn):
    """Each is one that browsers read as the user's machine."""

    def draw(*choices: str) -> str:
        return str(drawn.draw(st.sampled_from(choices)))

    def spelled(character: str) -> str:
        wide = chr(ord(character) + 0xFEE0)
        percent = "".join(f"%{byte:02x}" for byte in draw(character, wide).encode())
        noise = draw("", "", "\t", "\n", "\r", "\u00ad")
        return draw(character, character.upper(), wide, percent) + noise

    host = "".join(spelled(each) for each in draw(*_LOOPBACK)) + draw("", "", ".")
    host = draw(host, host, "[::1]", "[::ffff:127.0.0.1]", "[0:0:0:0:0:0:0:1]", "[::]")
    start = draw("http:", "HTTPS:", "hT\ttp:", " \x0bhttp:", "ws:", "")
    slashes = draw("//", "\\\\", "/\\", "///", "\\/\t/")
    user = draw("", "", "user:word@", "example.org@", "a%40b@c@")
    url = (
        start
        + slashes
        + user
        + host
        + draw("", ":", ":631", ":0631", ":70000")
        + draw("", "/x", "?x", "\\x", "#x")
    )
    assert rewrite_location(url.encode(), PORTS) is None
    refresh = draw("0;", "1,", "2 ", "3\t;\t", ".5 , ,", "0.1;;") + draw("", "url=", "URL =\t", "uRl= ")
    quote = draw("", "'", '"')
    assert rewrite_refresh((refresh + quote + url + quote).encode(), PORTS) is None


def test_cookie_rules():
    sent = [(b"cookie", b"a=1; =x; y; fairway_session=s"), (b"cookie", b" b = 2 "), (b"accept", b"*/*")]
    assert tool_headers(sent) == [(b"accept", b"*/*"), (b"cookie", b"a=1; b = 2")]
    assert portal_headers(sent) == [(b"accept", b"*/*"), (b"cookie", b"fairway_session=s")]
    assert tool_headers([(b"cookie", b"y; fairway_x=1")]) == portal_headers([(b"cookie", b"y; z=1")]) == []
    assert read_cookie(sent, b"fairway_session") == "s"
    assert read_cookie(sent, b"") == ""
    full = [(b"cookie", b"big=" + b"x" * COOKIE_BYTES_PER_HOST)]
    cookies = ToolCookies(full)
    assert cookies.accept(b"new=1") is None
    assert cookies.accept(b"big=; Max-Age=0; Domain=example.org") == b"big=; Max-Age=0", "it can be removed"
    assert cookies.accept(b"new=1") == b"new=1"
    assert cookies.accept(b"long=" + b"x" * COOKIE_BYTES) is None
