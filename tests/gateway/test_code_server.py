"""VS Code (code-server) behind the gateway: the form in which it gets the secret of the attempt."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from portal.models import Environment, Job, User
from portal.services.images.process_environment import code_server_command
from portal.services.workspaces.access import decrypt_attempt_secret, digest, do_open_workspace
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
