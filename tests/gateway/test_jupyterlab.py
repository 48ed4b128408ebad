"""A real JupyterLab behind the gateway: its page, its API, a kernel and a cell over the kernel's WebSocket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
import uuid
from pathlib import Path

import aiohttp
import httpx
import pytest

from portal.services.environments import ensure_process_jupyterlab
from portal.services.workspaces import attempt_secret, do_open_workspace
from tests.gateway.stand import attempt_of, running_workspace

CACHE = Path(os.environ.get("FAIRWAY_TEST_CACHE", "/var/tmp/fairway-tests"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.77.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def lab(stand, owner, session, tmp_path):
    """A workspace whose server is JupyterLab, started as the node starts it."""
    tool = ensure_process_jupyterlab(CACHE)
    port = _free_port()
    job = running_workspace(owner, port=port)
    secrets, home = tmp_path / "secrets", tmp_path / "home"
    secrets.mkdir()
    home.mkdir()
    (secrets / "token").write_text(attempt_secret(attempt_of(job)))
    command = [
        word.replace("{address}", "127.77.0.1").replace("{port}", str(port)) for word in tool.tool_command
    ]
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
        yield job, stand.enter(job, ticket).headers["set-cookie"].partition(";")[0], port
    finally:
        process.terminate()
        process.wait(10)
        log.close()


def test_a_cell_runs_over_the_kernel_socket(stand, lab):
    job, cookie, port = lab
    own = {"Cookie": cookie, "Origin": f"http://{stand.host(job)}"}
    with stand.browser(job) as browser:
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

    async def run_cell() -> str:
        headers = own | {"Host": stand.host(job)}
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(
                f"http://127.0.0.1:{stand.port}/api/kernels/{kernel}/channels", headers=headers
            ) as channel,
        ):
            request = {
                "header": {
                    "msg_id": uuid.uuid4().hex,
                    "msg_type": "execute_request",
                    "username": "",
                    "session": uuid.uuid4().hex,
                    "version": "5.3",
                },
                "parent_header": {},
                "metadata": {},
                "content": {"code": "print(6 * 7)", "silent": False, "store_history": True},
                "channel": "shell",
            }
            await channel.send_str(json.dumps(request))
            async for message in channel:
                told = json.loads(message.data)
                if told["msg_type"] == "stream":
                    return str(told["content"]["text"])
        return ""

    assert asyncio.run(asyncio.wait_for(run_cell(), 60)) == "42\n"
