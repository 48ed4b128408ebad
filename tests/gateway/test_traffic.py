"""What crosses the gateway to a workspace: bytes as they are, no secret out, no cookie of ours in."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from portal.domain.jobs.reasons import EndReason
from portal.gateway.protocol.redaction import Redaction, base64_forms
from portal.models import Environment, Membership
from portal.services.jobs.attempt_secrets import decrypt_attempt_secret
from portal.services.lifecycle import job_control
from portal.services.workspaces.access import digest, do_open_workspace
from portal.services.workspaces.sharing import do_share_workspace
from tests import factories
from tests.gateway.gateway_harness import attempt_of, sign_in
from tests.time_budget import budget_s


def test_paths_arrive_byte_for_byte(testbed, workspace, cookie):
    for target in [
        "/a%2Fb/%2e%2e/c?x=%20+&y=a/b",
        "//evil.example/x",
        "/a//b/./../c",
        "/files/%E2%9C%93.txt?a=b?c=d",
        "/@x:y;z=1",
        "/?next=http://evil.example/",
    ]:
        head = _raw(
            testbed,
            f"GET {target} HTTP/1.1\r\nHost: {testbed.host(workspace)}\r\nCookie: {cookie}\r\n"
            "Connection: close\r\n\r\n",
        )
        assert head.startswith("HTTP/1.1 200"), (target, head)
        assert testbed.tool.seen[-1]["path"] == target


def test_the_tool_gets_its_secret_and_none_of_ours(testbed, workspace, cookie, inside):
    inside.get(
        "/api",
        headers={
            "Authorization": "Bearer fw_token",
            "Cookie": f"{cookie}; fairway_session=abc; __Host-fairway_csrf=d; theme=dark; _xsrf=2|x",
            "X-Forwarded-For": "6.6.6.6",
            "X_Forwarded_For": "6.6.6.6",
            "X-Forwarded-User": "root",
            "Forwarded": "for=6.6.6.6",
            "Proxy-Authorization": "Basic eDp5",
            "Connection": "keep-alive, X-Private",
            "X-Private": "1",
            "X-Kept": "yes",
        },
    )
    seen = testbed.tool.headers()
    assert seen["authorization"] == f"token {decrypt_attempt_secret(attempt_of(workspace))}"
    assert seen["cookie"] == "theme=dark; _xsrf=2|x"
    assert seen["x-kept"] == "yes"
    assert seen["host"] == testbed.host(workspace)
    assert seen["x-forwarded-proto"] == "http"
    for gone in ["x-forwarded-for", "x_forwarded_for", "x-forwarded-user", "forwarded", "x-private"]:
        assert gone not in seen
    assert "proxy-authorization" not in seen


@pytest.mark.parametrize("tool", ["jupyterlab", "code-server", "another"])
def test_the_secret_never_reaches_the_browser(testbed, workspace, inside, tool):
    Environment.objects.filter(pk=workspace.environment_id).update(tool=tool)
    secret = decrypt_attempt_secret(attempt_of(workspace))
    for path in ["/", "/cookies", "/nothing", "/echo"]:
        answer = inside.get(path)
        assert answer.status_code == 200
        for form in (secret, digest(secret)):
            assert form not in answer.text
            assert all(form not in value for value in answer.headers.values())
    assert f"Cookie: code-server-session={'*' * 64}" in answer.text or "*" * len(secret) in answer.text
    assert "Host: ws-" in answer.text


@given(st.data())
def test_redaction_finds_a_secret_wherever_the_body_is_cut(drawn):
    secrets = [b"aab", b"abaabaaab", b"aa"][: drawn.draw(st.integers(1, 2))]
    body = b"".join(drawn.draw(st.lists(st.sampled_from([b"a", b"b", b"x", *secrets]), max_size=30)))
    cuts = sorted(drawn.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    redaction = Redaction(secrets)
    pieces = [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    sent = b"".join(
        redaction.feed(piece, is_last=number == len(pieces) - 1) for number, piece in enumerate(pieces)
    )
    assert len(sent) == len(body)
    assert not any(secret in sent for secret in secrets)
    assert all(new in (old, ord("*")) for new, old in zip(sent, body, strict=True))


@given(st.binary(max_size=10), st.binary(max_size=10))
def test_a_secret_inside_base64_is_redacted(before, after):
    secret = b"r-" + b"aZ09_-" * 7 + b"x"
    redaction = Redaction(base64_forms(secret))
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        sent = redaction.feed(encode(before + secret + after), is_last=True)
        assert sent.count(b"*") >= len(secret)


def test_a_visitor_gets_no_part_of_the_secret(testbed, owner, workspace):
    guest = factories.user()
    workspace.project.memberships.create(user=guest, role="member")
    do_share_workspace(owner, workspace, guest, "edit", 3600)
    _, ticket = do_open_workspace(guest, workspace, sign_in(guest))
    cookie = testbed.enter(workspace, ticket).headers["set-cookie"].partition(";")[0]
    sent = {"Cookie": cookie, "Accept-Encoding": "gzip, br", "Range": "bytes=0-9", "If-Range": "x"}
    with testbed.browser(workspace) as browser:
        assert browser.get("/echo", headers=sent).status_code == 200
        answer = browser.get("/compressed", headers=sent)
        assert answer.status_code == 502 and "This response is not shown" in answer.text
    seen = testbed.tool.headers()
    assert seen["accept-encoding"] == "identity" and not {"range", "if-range"} & set(seen)


def test_cookies_of_tools_stay_on_their_host(inside):
    answer = inside.get("/cookies")
    assert answer.headers.get_list("set-cookie") == ["mine=1; Path=/; HttpOnly"]
    assert "server" not in answer.headers
    assert "x-powered-by" not in answer.headers
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'self'" in answer.headers["content-security-policy"]


def test_large_bodies_stream_both_ways(testbed, inside):
    chunk = bytes(range(256)) * 4096
    digest = hashlib.sha256()

    def body():
        for _ in range(48):
            digest.update(chunk)
            yield chunk

    reported = inside.post("/upload", content=body()).json()
    assert reported == {"bytes": 48 << 20, "sha256": digest.hexdigest()}
    reported = inside.put("/upload", content=chunk).json()
    assert reported["bytes"] == 1 << 20
    assert len(inside.get("/big").content) == 64 << 20


def test_a_truncated_answer_is_never_complete(inside):
    import httpx

    with pytest.raises(httpx.RemoteProtocolError):
        inside.get("/broken")


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "DELETE", "PATCH", "PROPFIND"])
def test_methods_pass(testbed, inside, method):
    assert inside.request(method, "/x").status_code == 200
    assert testbed.tool.seen[-1]["method"] == method


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "FOO"])
def test_other_methods_do_not(testbed, workspace, cookie, method):
    head = _raw(
        testbed,
        f"{method} / HTTP/1.1\r\nHost: {testbed.host(workspace)}\r\nCookie: {cookie}\r\n\r\n",
        wait_s=1,
    )
    assert not head or head.split()[1] in ("400", "405")
    assert not testbed.tool.seen


@pytest.mark.parametrize(
    "sent",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://ws-zzzzzzzzzz.localhost:8000"},
        {"Origin": "http://localhost:8000"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    ],
)
def test_pages_of_other_origins_cannot_use_the_cookie(testbed, inside, sent):
    assert inside.post("/api/kernels", headers=sent).status_code == 403
    assert inside.get("/api/kernels", headers=sent).status_code == 403
    assert not testbed.tool.seen


def test_own_pages_and_bookmarks_can(testbed, workspace, inside):
    own = {"Origin": f"http://{testbed.host(workspace)}", "Sec-Fetch-Site": "same-origin"}
    assert inside.post("/api/kernels", headers=own).status_code == 200
    bookmark = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert inside.get("/lab", headers=bookmark).status_code == 200


def test_a_stopped_server_is_a_clear_page(testbed, owner, session):
    from portal.services.workspaces.access import do_open_workspace
    from tests.gateway.gateway_harness import running_workspace

    gone = running_workspace(owner, port=1)
    _, ticket = do_open_workspace(owner, gone, session)
    crumb = testbed.enter(gone, ticket).headers["set-cookie"].partition(";")[0]
    started = time.monotonic()
    with testbed.browser(gone) as browser:
        answer = browser.get("/lab", headers={"Cookie": crumb})
    assert answer.status_code == 502
    assert answer.headers["retry-after"]
    assert "does not respond" in answer.text
    assert time.monotonic() - started < budget_s(10)


def test_a_request_that_is_lost_is_sent_again_if_it_has_no_effect(testbed, inside):
    assert inside.get("/lost").text == "tool at /lost"
    assert len(testbed.tool.seen) == 2
    assert inside.post("/lost", content=b"x").status_code == 502
    assert len(testbed.tool.seen) == 3


# -- sockets ---------------------------------------------------------------------------------------


def _socket(testbed, workspace, cookie, talk, **options):
    async def run():
        headers = {"Host": testbed.host(workspace), "Cookie": cookie}
        headers["Origin"] = options.pop("origin", f"http://{testbed.host(workspace)}")
        if headers["Origin"] is None:
            del headers["Origin"]
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(
                URL(f"http://127.0.0.1:{testbed.port}/socket?k=%2F", encoded=True),
                headers=headers,
                max_msg_size=0,
                **options,
            ) as socket,
        ):
            return await asyncio.wait_for(talk(socket), 20)

    return asyncio.run(run())


def test_sockets_carry_text_binary_and_subprotocol(testbed, workspace, cookie):
    async def talk(socket):
        assert socket.protocol == "kernel.v1"
        await socket.send_str("grüße ✓")
        assert (await socket.receive()).data == "grüße ✓"
        big = bytes(range(256)) * 20_000
        await socket.send_bytes(big)
        assert (await socket.receive()).data == big
        await socket.ping()
        for number in range(500):
            await socket.send_str(str(number))
        got = [(await socket.receive()).data for _ in range(500)]
        assert got == [str(number) for number in range(500)]

    _socket(testbed, workspace, cookie, talk, protocols=["other2", "kernel.v1"])
    opened = testbed.tool.headers()
    assert opened["authorization"].startswith("token ")
    assert "fairway" not in opened.get("cookie", "")
    assert next(e for e in testbed.tool.seen if "path" in e)["path"] == "/socket?k=%2F"


def test_closing_codes_cross(testbed, workspace, cookie):
    async def talk(socket):
        await socket.send_str("close 4123")
        await socket.receive()
        return socket.close_code

    assert _socket(testbed, workspace, cookie, talk) == 4123

    async def leave(socket):
        await socket.send_str("x")
        await socket.receive()
        await socket.close(code=4001)
        await asyncio.sleep(0.3)

    _socket(testbed, workspace, cookie, leave)
    assert testbed.tool.seen[-1] == {"closed": 4001}


@pytest.mark.parametrize(
    "origin", [None, "null", "http://evil.example", "http://localhost:8000", "https://SAME", "http://SAME.x"]
)
def test_sockets_of_other_origins_are_refused(testbed, workspace, cookie, origin):
    if origin:
        origin = origin.replace("SAME", testbed.host(workspace))
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        _socket(testbed, workspace, cookie, lambda socket: asyncio.sleep(0), origin=origin)
    assert refused.value.status == 403
    assert not testbed.tool.seen


def test_sockets_of_strangers_are_refused(testbed, workspace):
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        _socket(testbed, workspace, "fairway_workspace=x", lambda socket: asyncio.sleep(0))
    assert refused.value.status == 403


def _sign_out(owner, workspace):
    from portal.models import BrowserSession

    BrowserSession.objects.all().delete()


def _stop(owner, workspace):
    job_control.request_stop(attempt_of(workspace).pk, EndReason.CANCELLED_BY_USER)


def _lose_membership(owner, workspace):
    Membership.objects.filter(user=owner).delete()


def _deactivate(owner, workspace):
    owner.is_active = False
    owner.save()


@pytest.mark.parametrize("what", [_sign_out, _stop, _lose_membership, _deactivate])
def test_sockets_and_streams_die_within_five_seconds(testbed, owner, workspace, cookie, inside, what):
    async def talk(socket):
        await socket.send_str("hello")
        assert (await socket.receive()).data == "hello"
        await asyncio.sleep(0.5)
        await asyncio.to_thread(what, owner, workspace)
        lost_at = time.monotonic()
        message = await socket.receive()
        assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
        return time.monotonic() - lost_at, socket.close_code

    with inside.stream("GET", "/stream") as stream, ThreadPoolExecutor(1) as threads:
        lines = stream.iter_lines()
        next(lines)
        unanswered = threads.submit(inside.get, "/unanswered")
        took_s, code = _socket(testbed, workspace, cookie, talk)
        assert took_s < budget_s(5)
        assert code == 1008
        started = time.monotonic()
        with pytest.raises(Exception, match="closed"):
            for _ in lines:
                pass
        assert time.monotonic() - started < budget_s(5)
        ended = unanswered.result()
    refused = inside.get("/")
    assert refused.status_code == (410 if what is _stop else 403)
    assert (ended.status_code, ended.text) == (refused.status_code, refused.text)


def test_a_disconnected_browser_ends_the_upstream_request(testbed, inside):
    with inside.stream("GET", "/stream") as stream:
        next(stream.iter_lines())
    time.sleep(1.6)
    tasks = testbed.call(_handlers())
    assert tasks == 0


async def _handlers() -> int:
    return sum("Tool.answer" in repr(task.get_stack()) for task in asyncio.all_tasks()) + sum(
        "RequestHandler.start" in repr(task) and any("tick" in str(f.f_locals) for f in task.get_stack())
        for task in asyncio.all_tasks()
    )


def _raw(testbed, request: str, wait_s: float = 5.0) -> str:
    import socket

    with socket.create_connection(("127.0.0.1", testbed.port), timeout=wait_s) as raw:
        raw.sendall(request.encode("latin-1"))
        answer = b""
        try:
            while chunk := raw.recv(65536):
                answer += chunk
        except TimeoutError:
            pass
    return answer.decode("latin-1")
