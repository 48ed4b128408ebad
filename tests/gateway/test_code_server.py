"""VS Code (code-server) behind the gateway: the form in which it gets the secret of the attempt."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from portal.models import Environment, Job, User
from portal.services.environments.process_environment import code_server_command
from portal.services.jobs.attempt_secrets import decrypt_attempt_secret
from portal.services.workspaces.access import digest, do_open_workspace
from tests.chromium import chromium
from tests.code_server import code_server_program
from tests.engine_harness import wait_for
from tests.gateway.gateway_harness import Testbed, attempt_of, running_workspace


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
    out = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]}
    )
    assert out.stdout.startswith(f"{digest(secret)} --auth password --bind-addr 127.77.0.1:1 ")


@pytest.mark.long
@pytest.mark.timeout(1800)  # the first use builds it
def test_the_editor_of_a_real_code_server_opens_through_the_gateway(
    testbed: Testbed, owner: User, session: str, tmp_path: Path
) -> None:
    program = code_server_program()
    with socket.socket() as probe:
        probe.bind(("127.77.0.1", 0))
        port = probe.getsockname()[1]
    job = running_workspace(owner, port=port)
    cookie = enter(testbed, owner, job, session)["Cookie"]
    home, token = tmp_path / "home", tmp_path / "token"
    home.mkdir()
    (home / "hello.txt").write_text("written before\n")
    token.write_text(decrypt_attempt_secret(attempt_of(job)))
    filled = {"{secret_file}": str(token), "{address}:{port}": f"127.77.0.1:{port}"}
    command = [filled.get(word, word) for word in code_server_command(program)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "SHELL": "/bin/sh"}
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, cwd=home, env=environment, stdout=stream, stderr=stream)
    try:
        wait_for("code-server", lambda: "listening on" in log.read_text() or process.poll() is not None, 60)
        assert process.poll() is None, log.read_text()
        direct = httpx.get(f"http://127.77.0.1:{port}/")
        assert direct.status_code == 302 and "login" in direct.headers["location"]
        # the gateway listens on a port of the test, and names of workspaces have that of the settings
        with chromium(f"--host-resolver-rules=MAP *.localhost 127.0.0.1:{testbed.port}") as browser:
            context = browser.new_context()
            name, _, value = cookie.partition("=")
            address = f"http://{testbed.host(job)}"
            context.add_cookies([{"name": name, "value": value, "url": address}])
            page = context.new_page()
            page.goto(address, timeout=120_000)
            page.locator(".monaco-workbench").wait_for(timeout=120_000)
            # files come over the WebSocket
            page.get_by_role("treeitem", name="hello.txt").first.dblclick(timeout=120_000)
            page.locator(".view-lines", has_text="written").wait_for(timeout=60_000)
            assert not page.locator("input[type=password]").count()
    finally:
        process.terminate()
        process.wait(20)
