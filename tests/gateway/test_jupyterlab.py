"""A real JupyterLab behind the gateway: its page, its API, a kernel and a cell over the kernel's WebSocket."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import json
import os
import socket
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from agents.verbs import UPDATE_FILES, Verb
from portal.gateway.access.authorization import Authorizer
from portal.gateway.access.authorization_monitor import AuthorizationMonitor
from portal.gateway.activity import ActivityTracker
from portal.gateway.proxy.upstreams import Upstreams
from portal.models import AttemptActivity, Job, User, WorkspaceSession, WorkspaceShare
from portal.services.environments.process_environment import (
    ensure_process_jupyterlab,
    gateway_identity,
    jupyterlab_command,
    with_gateway_identity,
)
from portal.services.jobs.attempt_secrets import decrypt_attempt_secret
from portal.services.workspaces.access import digest, do_open_workspace
from portal.services.workspaces.secret_replacement import due_replacements
from portal.services.workspaces.sharing import do_revoke_share, do_share_workspace
from scheduler.nodes.secret_replacements import replace_secret
from tests import factories
from tests.gateway.gateway_harness import attempt_of, running_workspace, sign_in

CACHE = Path(os.environ.get("FAIRWAY_TEST_CACHE", "/var/tmp/fairway-tests"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.77.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def lab(testbed, owner, session, tmp_path):
    """A workspace whose server is JupyterLab, started as the node starts it."""
    prefix = ensure_process_jupyterlab(CACHE)
    port = _free_port()
    job = running_workspace(owner, port=port)
    secrets, home = _secrets(tmp_path), tmp_path / "home"
    secrets.mkdir()
    home.mkdir()
    (secrets / "token").write_text(decrypt_attempt_secret(attempt_of(job)))
    for name, content in gateway_identity().items():
        (secrets / name).write_text(content)
    command = with_gateway_identity(
        [
            word.replace("{address}", "127.77.0.1").replace("{port}", str(port))
            for word in jupyterlab_command(prefix)
        ]
    )
    # what users may have in their homes, which must not open the server to others
    (home / ".jupyter").mkdir()
    own = {"IdentityProvider": {"token": "known"}, "ServerApp": {"token": "known", "allow_hidden": True}}
    (home / ".jupyter/jupyter_server_config.json").write_text(json.dumps(own))
    if os.geteuid() == 0:
        command.append("--allow-root")  # tasks run under accounts of their own; this test does not
    log = (tmp_path / "lab.log").open("wb")
    process = subprocess.Popen(
        command,
        cwd=home,
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), "FAIRWAY_SECRETS": str(secrets)},
        stdout=log,
        stderr=log,
    )
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                httpx.get(f"http://127.77.0.1:{port}/api", timeout=1)
                break
            except httpx.HTTPError:
                assert process.poll() is None, (tmp_path / "lab.log").read_text()
                time.sleep(0.1)
        _, ticket = do_open_workspace(owner, job, session)
        yield job, testbed.enter(job, ticket).headers["set-cookie"].partition(";")[0], port
    finally:
        process.terminate()
        process.wait(10)
        log.close()


def _secrets(folder: Path) -> Path:
    return folder / "secrets"


def test_a_viewer_gets_nothing_that_is_valid_without_the_gateway(testbed, lab, owner, tmp_path):
    job, cookie, port = lab
    secret = decrypt_attempt_secret(attempt_of(job))
    (tmp_path / "home" / "hello.ipynb").write_text(NOTEBOOK)
    (tmp_path / "home" / "link").symlink_to(_secrets(tmp_path) / "token")
    guest = factories.user()
    job.project.memberships.create(user=guest, role="member")
    share = do_share_workspace(owner, job, guest, "view", 3600)
    _, ticket = do_open_workspace(guest, job, sign_in(guest))
    entered = testbed.enter(job, ticket).headers["set-cookie"].partition(";")[0]
    ours = set(entered.split("=")[:1])
    seen = {}
    with testbed.browser(job) as browser:
        for path in READ_PATHS:
            for headers in ({}, {"Accept": "application/json", "Range": "bytes=0-9"}):
                answer = browser.get(path, headers={"Cookie": entered} | headers)
                assert answer.status_code < 500, path
                for form in (secret, digest(secret), base64.b64encode(secret.encode()).decode()):
                    assert form not in answer.text and form not in str(answer.headers), path
                seen |= dict(answer.cookies)
        assert '"token": ""' in browser.get("/lab", headers={"Cookie": entered}).text
        for path in ("/api/kernels", "/api/terminals", "/api/contents"):
            assert (
                browser.post(path, headers={"Cookie": entered, "X-HTTP-Method-Override": "GET"}).status_code
                == 403
            )
    # what the viewer knows is of no use at the port, where their own job may connect
    assert set(seen) == {"_xsrf"} and not ours & set(seen)
    known = {
        "Cookie": "; ".join(f"{name}={value}" for name, value in seen.items()),
        "Host": testbed.host(job),
    }
    for query in ("", "?token=", "?token=known", f"?token={secret}"):
        direct = httpx.get(f"http://127.77.0.1:{port}/api/contents{query}", headers=known)
        assert direct.status_code == 403, query

    # an editor reads the secret, which is replaced when the right ends
    do_share_workspace(owner, job, guest, "edit", 3600)
    assert due_replacements() == []
    User.objects.filter(pk=guest.pk).update(is_active=False)
    (due,) = due_replacements()
    User.objects.filter(pk=guest.pk).update(is_active=True)
    do_revoke_share(owner, WorkspaceShare.objects.get(job=job, revoked_at=None))
    assert due_replacements() == [due] and share.job_id == job.pk
    known = {"Authorization": f"token {secret}"}
    assert httpx.get(f"http://127.77.0.1:{port}/api/contents", headers=known).status_code == 200
    replace_secret(_Connection(_secrets(tmp_path)), due)
    assert due_replacements() == [] and not WorkspaceSession.objects.filter(user=guest).exists()
    assert decrypt_attempt_secret(attempt_of(job)) != secret
    with testbed.browser(job) as browser:  # the owner notices nothing, before and after the next decision
        until = time.monotonic() + 6
        while time.monotonic() < until:
            assert browser.get("/api/contents", headers={"Cookie": cookie}).status_code == 200
            time.sleep(0.5)
    assert httpx.get(f"http://127.77.0.1:{port}/api/contents", headers=known).status_code == 403


_PATHS = """
/ /lab /lab/tree /lab/tree/hello.ipynb /tree /login /logout /api /api/status /api/me /api/contents
/api/contents/hello.ipynb /api/contents/hello.ipynb/checkpoints /api/kernels /api/kernelspecs /api/sessions
/api/terminals /api/config/notebook /api/nbconvert /api/spec.yaml /api/nonsense /metrics /files/hello.ipynb
/view/hello.ipynb /nbconvert/html/hello.ipynb /nbconvert/script/hello.ipynb /edit/hello.ipynb /lab/api/settings
/lab/api/workspaces /lab/api/translations /lab/api/themes /lab/api/extensions /lab/api/listings/@x /lsp/status
/api/contents/.local/share/jupyter/runtime /files/.local/share/jupyter/runtime/ /api/contents/.jupyter
/files/%2e%2e/secrets/token /api/contents/..%2fsecrets%2ftoken /files/..%2f..%2fproc/self/environ
/files/link /view/link /api/contents/link?format=text /api/contents/link?type=file&format=base64
/terminals/1 /custom/custom.css /static/favicons/favicon.ico /lab?reset /kernelspecs/python3/logo-64x64.png
"""
READ_PATHS = _PATHS.split()
NOTEBOOK = json.dumps(
    {
        "cells": [
            {
                "cell_type": "code",
                "execution_count": None,
                "id": "a",
                "metadata": {},
                "outputs": [],
                "source": "1",
            }
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
)


class _Connection:
    """A node on which the files of the running task are in a folder; the agent replaces them in the same way."""

    def __init__(self, folder: Path) -> None:
        self.engine, self._folder = self, folder

    def command(self, verb: Verb, *, files: dict[str, str], **place: object) -> None:
        assert verb is UPDATE_FILES
        for name, content in files.items():
            (self._folder / f"{name}.part").write_text(content)
            (self._folder / f"{name}.part").replace(self._folder / name)


def test_a_cell_runs_over_the_kernel_socket(testbed, lab):
    job, cookie, port = lab
    own = {"Cookie": cookie, "Origin": f"http://{testbed.host(job)}"}
    with testbed.browser(job) as browser:
        page = browser.get("/lab", headers={"Cookie": cookie})
        assert page.status_code == 200
        assert "JupyterLab" in page.text
        assert browser.get("/api/status", headers={"Cookie": cookie}).status_code == 200
        kernel = browser.post("/api/kernels", headers=own, json={"name": "python3"}).json()["id"]
        saved = browser.put(
            "/api/contents/a%20b.txt",
            headers=own,
            json={"type": "file", "format": "text", "content": "kept"},
        )
        assert saved.status_code == 201
        assert browser.post("/api/terminals", headers=own).status_code == 200
    assert httpx.get(f"http://127.77.0.1:{port}/api/status").status_code == 403

    async def work() -> tuple[str, list[float]]:
        headers = own | {"Host": testbed.host(job)}
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(
                f"http://127.0.0.1:{testbed.port}/api/kernels/{kernel}/channels", headers=headers
            ) as channel,
        ):
            cell = {"code": "print(6 * 7)", "silent": False, "store_history": True}
            printed = await _told(channel, "execute_request", cell, "stream")
            took_s = []
            for _ in range(30):
                began_s = time.perf_counter()
                await _told(channel, "kernel_info_request", {}, "kernel_info_reply")
                took_s.append(time.perf_counter() - began_s)
        return str(printed["text"]), took_s

    printed, took_s = asyncio.run(asyncio.wait_for(work(), 60))
    assert printed == "42\n"
    _is_known_to_be_used(testbed, job, own, kernel)
    assert sorted(took_s)[10] < 0.03  # nothing waits for TCP's late acknowledgements, which come after 40 ms


def _is_known_to_be_used(testbed, job: Job, own: dict[str, str], kernel: str) -> None:
    """What the gateway writes down: kernels by JupyterLab's own word, whose open page reads lists all the time."""
    seconds = dt.timedelta(seconds=1)
    first = _looked(job)
    assert first.tool_active_at is not None and first.tool_polled_at - first.tool_active_at < 30 * seconds
    with testbed.browser(job) as browser:
        assert browser.get("/api/kernels", headers=own).status_code == 200
        assert browser.get("/api/terminals", headers=own).status_code == 200
    time.sleep(1.2)
    again = _looked(job)
    assert (
        abs(again.tool_active_at - first.tool_active_at) < seconds
    )  # reading is no use, and nothing else happened
    assert again.tool_polled_since == first.tool_polled_since and again.tool_polled_at > first.tool_polled_at

    async def sleeps() -> AttemptActivity:
        address = f"http://127.0.0.1:{testbed.port}/api/kernels/{kernel}/channels"
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(address, headers=own | {"Host": testbed.host(job)}) as channel,
        ):
            cell = {"code": "import time; time.sleep(30)", "silent": False, "store_history": True}
            await _told(channel, "execute_request", cell, "execute_input")
            await asyncio.sleep(1.5)
            return await asyncio.to_thread(_looked, job)

    busy = asyncio.run(asyncio.wait_for(sleeps(), 60))
    assert busy.tool_polled_at - busy.tool_active_at < seconds / 2  # it computes, and says nothing meanwhile
    with testbed.browser(job) as browser:
        assert browser.post(f"/api/kernels/{kernel}/interrupt", headers=own).is_success
    AttemptActivity.objects.update(tool_polled_at=busy.tool_polled_at - 200 * seconds)
    assert (
        _looked(job).tool_polled_since > busy.tool_polled_at
    )  # nobody looked for a while: what was known counts no more


def _looked(job: Job) -> AttemptActivity:
    """The record after one look of a gateway."""

    async def look() -> None:
        rights = Authorizer()
        upstreams = Upstreams()
        try:
            await ActivityTracker(rights, AuthorizationMonitor(rights), upstreams).poll()
        finally:
            await upstreams.close()
            rights.close()

    asyncio.run(look())
    return AttemptActivity.objects.get(attempt=attempt_of(job))


async def _told(
    channel: aiohttp.ClientWebSocketResponse, kind: str, content: dict[str, Any], wanted: str
) -> dict[str, Any]:
    """Sends the kernel a message and waits for one of the kind that is wanted."""
    header = {"msg_id": uuid.uuid4().hex, "msg_type": kind, "username": "", "session": "s", "version": "5.3"}
    request = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    await channel.send_str(json.dumps(request))
    async for message in channel:
        reported = json.loads(message.data)
        if reported["msg_type"] == wanted and reported["parent_header"].get("msg_id") == header["msg_id"]:
            return dict(reported["content"])
    raise AssertionError("the kernel's socket was closed")
