"""VS Code (code-server) behind the gateway: the form of its secret, and the real program in the long suite."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

import aiohttp
import httpx
import pytest

from portal.models import Environment, Job, User
from portal.services.images.process_environment import code_server_command
from portal.services.workspaces.access import decrypt_attempt_secret, digest, do_open_workspace
from tests.gateway.gateway_harness import Testbed, attempt_of, running_workspace
from tests.gateway.test_jupyterlab import CACHE, _free_port

PROGRAM = CACHE / "code-server-4.139.1/node_modules/.bin/code-server"


def enter(testbed: Testbed, owner: User, job: Job, session: str) -> dict[str, str]:
    Environment.objects.filter(pk=job.environment_id).update(tool="code-server")
    _, ticket = do_open_workspace(owner, job, session)
    cookie = testbed.enter(job, ticket).headers["set-cookie"].partition(";")[0]
    return {"Cookie": cookie, "Origin": f"http://{testbed.host(job)}"}


def test_the_secret_is_sent_as_the_session_cookie_and_never_to_the_browser(
    testbed: Testbed, owner: User, session: str, tmp_path: Path
) -> None:
    job = running_workspace(owner, port=testbed.tool.port)
    headers = enter(testbed, owner, job, session)
    headers["Cookie"] += "; own=1"
    with testbed.browser(job) as browser:
        answer = browser.get("/", headers=headers)
    secret = decrypt_attempt_secret(attempt_of(job))
    sent = [value for name, value in testbed.tool.seen[-1]["headers"] if name.lower() == b"cookie"]
    assert sent == [b"own=1", f"code-server-session={digest(secret)}".encode()]
    assert "authorization" not in testbed.tool.headers()
    assert digest(secret) not in answer.text and "set-cookie" not in answer.headers

    # what the command gives the program is the hash that the gateway sends
    (tmp_path / "token").write_text(f"{secret}\n")
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "$HASHED_PASSWORD" "$@"\n')
    program.chmod(0o755)
    filled = {"{secret_file}": str(tmp_path / "token"), "{address}:{port}": "127.77.0.1:1"}
    command = [filled.get(word, word) for word in code_server_command(str(program))]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]})
    assert out.stdout.startswith(f"{digest(secret)} --auth password --bind-addr 127.77.0.1:1 ")


@pytest.mark.long
@pytest.mark.skipif(not PROGRAM.exists(), reason=f"needs npm install code-server@4.139.1 in {PROGRAM.parents[2]}")
def test_the_real_program_opens_its_workbench_and_its_socket(
    testbed: Testbed, owner: User, session: str, tmp_path: Path
) -> None:
    port = _free_port()
    job = running_workspace(owner, port=port)
    (tmp_path / "token").write_text(decrypt_attempt_secret(attempt_of(job)))
    filled = {"{secret_file}": str(tmp_path / "token"), "{address}:{port}": f"127.77.0.1:{port}"}
    command = [filled.get(word, word) for word in code_server_command(str(PROGRAM))]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                httpx.get(f"http://127.77.0.1:{port}/healthz", timeout=1)
                break
            except httpx.HTTPError:
                assert process.poll() is None
                time.sleep(0.2)
        headers = enter(testbed, owner, job, session)
        with testbed.browser(job) as browser:
            page = browser.get("/", headers=headers, follow_redirects=True)
            assert page.status_code == 200 and "vscode" in page.text.lower(), page.text[:500]
        direct = httpx.get(f"http://127.77.0.1:{port}/", follow_redirects=True)
        assert "password" in direct.text.lower()  # without the secret it asks for a password

        async def connect() -> int:
            async with aiohttp.ClientSession() as client:
                address = f"http://127.0.0.1:{testbed.port}/stable-x?reconnectionToken=a&reconnection=false"
                async with client.ws_connect(address, headers=headers | {"Host": testbed.host(job)}) as wire:
                    return int(wire.closed)

        assert asyncio.run(connect()) == 0
    finally:
        process.terminate()
        process.wait(10)
