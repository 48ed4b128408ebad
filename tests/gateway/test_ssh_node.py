"""A workspace on a node behind SSH: requests and sockets through the tunnel, and what a lost node looks like."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Iterator

import aiohttp
import httpx
import pytest

from agents.keys import PURPOSES, fingerprint, make_keys, read_public_key
from agents.tunnel.pool import JOB_ADDRESS
from portal.services.nodes.identity import do_confirm_host_key
from portal.services.workspaces.access import do_open_workspace
from tests import factories
from tests.gateway.gateway_harness import Testbed, running_workspace
from tests.rig.fake_agent import echo_agent
from tests.rig.loopback import loopback_sshd
from tests.rig.needs import missing_for_loopback
from tests.time_budget import budget_s


@pytest.fixture
def far(transactional_db, tmp_path, settings, owner, session):
    """A gateway that holds the tunnel key only, a workspace on an SSH node, and a cookie for it."""
    reason = missing_for_loopback()
    if reason is not None:
        pytest.skip(reason)
    keys = make_keys(tmp_path / "keys", "test")
    settings.KEY_FILES = {"tunnel": str(keys["tunnel"])}
    settings.DATA_DIR = tmp_path
    public = {purpose: read_public_key(keys[purpose]) for purpose in PURPOSES}
    with loopback_sshd(tmp_path, echo_agent(), public) as sshd, Testbed(tmp_path) as testbed:
        node = factories.node(
            factories.pool(),
            transport="ssh",
            runtime="process",
            host=sshd.host,
            port=sshd.port,
            ssh_user=sshd.account,
            host_key=sshd.host_key,
        )
        job = running_workspace(owner, port=testbed.tool.port, node=node)
        _, ticket = do_open_workspace(owner, job, session)
        cookie = testbed.enter(job, ticket).headers["set-cookie"].partition(";")[0]
        yield testbed, job, cookie, sshd, node


def test_requests_and_sockets_go_through_the_tunnel(far):
    testbed, job, cookie, _, _ = far
    data = bytes(range(256)) * 16 * 1024
    with testbed.browser(job) as browser:
        browser.headers["Cookie"] = cookie
        assert browser.get("/a%2Fb").text == "tool at /a%2Fb"
        reported = browser.post("/upload", content=data).json()
        assert reported == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        assert len(browser.get("/big").content) == 64 << 20

    async def talk() -> None:
        headers = {"Host": testbed.host(job), "Origin": f"http://{testbed.host(job)}", "Cookie": cookie}
        async with (
            aiohttp.ClientSession() as client,
            client.ws_connect(
                f"http://127.0.0.1:{testbed.port}/socket", headers=headers, max_msg_size=0
            ) as socket,
        ):
            await socket.send_bytes(data)
            assert (await socket.receive()).data == data

    asyncio.run(talk())


def test_a_frozen_node_is_a_clear_answer_within_ten_seconds(far):
    testbed, job, cookie, sshd, _ = far
    with testbed.browser(job) as browser:
        browser.headers["Cookie"] = cookie
        sshd.freeze()
        try:
            began = time.monotonic()
            answer = browser.get("/lab")
            assert answer.status_code == 502
            assert time.monotonic() - began < budget_s(10)
        finally:
            sshd.thaw()
        time.sleep(1.1)
        assert browser.get("/lab").status_code == 200


def test_another_host_key_is_never_trusted(far):
    testbed, job, cookie, _, node = far
    kind, key = node.host_key.split()
    node.host_key = f"{kind} {key[:-8]}AAAA{key[-4:]}"
    node.save()
    with testbed.browser(job) as browser:
        assert browser.get("/lab", headers={"Cookie": cookie}).status_code == 502
    assert not testbed.tool.seen


def test_a_confirmed_key_is_used_at_once(far):
    testbed, job, cookie, sshd, node = far
    admin = factories.user("root", admin=True)
    with testbed.browser(job) as browser:
        browser.headers["Cookie"] = cookie
        assert browser.get("/lab").status_code == 200
        key = sshd.change_host_key()
        sshd.kill_sessions()
        time.sleep(1.1)
        assert browser.get("/lab").status_code == 502
        do_confirm_host_key(admin, node, fingerprint=fingerprint(key), reason="a new disk")
        assert browser.get("/lab").status_code == 200


UNTIL_THE_END = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
"""The head of an answer without a length: only the end of the connection tells that it is whole."""


@contextlib.contextmanager
def teller() -> Iterator[tuple[int, threading.Event]]:
    """A server on a job's port that answers one line, and ends when it is told to."""
    end = threading.Event()

    def answer(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                wire, _ = listener.accept()
                with wire:
                    wire.recv(65536)
                    wire.sendall(UNTIL_THE_END + b"begun\n")
                    end.wait(20)

    with socket.create_server((JOB_ADDRESS, 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        yield listener.getsockname()[1], end
        end.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.mark.parametrize("broken", [True, False])
def test_a_lost_connection_is_never_a_complete_answer(far, owner, session, broken: bool):
    testbed, _, _, sshd, node = far
    with teller() as (port, end):
        job = running_workspace(owner, port=port, node=node)
        _, ticket = do_open_workspace(owner, job, session)
        cookie = testbed.enter(job, ticket).headers["set-cookie"].partition(";")[0]
        with (
            testbed.browser(job) as browser,
            browser.stream("GET", "/", headers={"Cookie": cookie}) as answer,
        ):
            reported = answer.iter_bytes()
            assert next(reported) == b"begun\n"
            if broken:
                sshd.kill_sessions()
                with pytest.raises(httpx.RemoteProtocolError):
                    next(reported)
            else:
                end.set()
                assert list(reported) == []


def test_a_lost_connection_closes_a_socket_as_a_bad_gateway(far):
    testbed, job, cookie, sshd, _ = far

    async def talk() -> int | None:
        headers = {"Host": testbed.host(job), "Origin": f"http://{testbed.host(job)}", "Cookie": cookie}
        async with (
            aiohttp.ClientSession() as client,
            client.ws_connect(f"http://127.0.0.1:{testbed.port}/socket", headers=headers) as wire,
        ):
            await wire.send_str("here")
            assert (await wire.receive()).data == "here"
            await asyncio.to_thread(sshd.kill_sessions)
            # aiohttp's own close_code is another one where it finds nobody to answer
            return (await asyncio.wait_for(wire.receive(), 5)).data

    assert asyncio.run(talk()) == 1014
