"""User scenarios on the stack: sign in, add a node, run jobs, restart services, restore a backup."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

from compose_stack import HOST, HTTPS_PORT, ComposeStack

from client import PortalClient, form_field


def sign_in(stack: ComposeStack, link: str) -> PortalClient:
    client = PortalClient(HOST, HTTPS_PORT, stack.site / "deploy/front/certificates/portal.pem")
    for path in ("/healthz", "/readyz"):
        client.get_page(path)
    address, _, code = link.partition("#")
    expect(address == f"https://{HOST}/sign-in/link/", f"the link leads to {address}")
    answer = client.submit_form("/sign-in/link/", {"code": code})
    expect(answer.status == 302, f"signing in by the link failed: {answer.status} {answer.text[:300]}")
    page = client.get_page("/cluster/")
    for asset in re.findall(r'(?:href|src)="(/static/[^"#]+)"', page):
        client.get_page(asset)
    return client


def add_node(stack: ComposeStack, client: PortalClient) -> None:
    stack.docker("run", "--detach", "--name", "fairwaye2e-node", "--hostname", "node1",
                 "--network", "fairwaye2e_nodes", "--network-alias", "node1", "fairway-e2e/node")  # fmt: skip
    form = {"host": "node1", "port": "22", "name": "node1", "new_pool": "stack", "pool": "",
            "account": "fairway", "runtime": "process", "engine": "auto"}  # fmt: skip
    shown = client.submit_form("/nodes/add/", form)
    expect(shown.status == 200, f"the host key is not shown: {shown.status} {shown.text[-1500:]}")
    script = form_field(shown.text, "script")
    stack.docker("exec", "--interactive", "fairwaye2e-node", "sh", "-s", input=script)
    form |= {"host_key": form_field(shown.text, "host_key"), "confirmed": "on"}
    check = client.submit_form("/nodes/add/", form)
    expect(check.status == 302, f"the node is not added: {check.status}")

    def works() -> bool:
        text = client.get_page(check.location)
        expect("fw-state--failed" not in text or "Everything works" in text, text[-3000:])
        return "Everything works" in text

    stack.wait("the node's connection test", works, 60)


def expect(true: bool, message: str) -> None:
    if not true:
        raise RuntimeError(message)


# -- jobs ----------------------------------------------------------------------------------------------

COUNTER_SCRIPT = "i=0; while :; do i=$((i+1)); echo $i; sleep 1; done"
TRANSIENT_ERRORS = (OSError, RuntimeError)  # errors that clients get while a service of the stack restarts


def add_environment(client: PortalClient) -> None:
    form = {"name": "plain", "title": "Plain", "runtime": "process", "prefix": "/usr", "enabled": "on"}
    saved = client.submit_form("/environments/add/", form, first="/environments/new/")
    expect(saved.status == 302, f"the environment is not saved: {saved.status} {saved.text[-1500:]}")


def submit(client: PortalClient, name: str, script: str) -> str:
    """Submit a job to the first project; return its id."""
    project = client.rest("GET", "projects/")["items"][0]["name"]
    body = {
        "name": name,
        "project": project,
        "environment": "plain",
        "command": ["/bin/sh", "-c", script],
        "gpus_per_task": 0,
        "memory_mib": 256,
    }
    return str(client.rest("POST", "jobs/", body)["id"])


def wait_for_state(stack: ComposeStack, client: PortalClient, job: str, state: str) -> None:
    """Wait until a job is in a state; raise if it ended in another."""

    def look() -> bool:
        try:
            shown = client.rest("GET", f"jobs/{job}/")
        except TRANSIENT_ERRORS:
            return False
        ended = shown["state"] not in ("PENDING", "RUNNING")
        expect(not ended or shown["state"] == state, f"the job is {shown['state']}: {shown['reason']}")
        return bool(shown["state"] == state)

    stack.wait(f"the job {job} {state}", look, 180)


def log_of(client: PortalClient, job: str) -> list[str]:
    """Return the last lines of a job's log without timestamps."""
    return str(client.rest("GET", f"jobs/{job}/logs/?tail=1000")["text"]).split()


def expect_uninterrupted(client: PortalClient, job: str) -> None:
    """Check that the job runs in its first attempt, with every second of it in its log."""
    shown = client.rest("GET", f"jobs/{job}/")
    attempts = [attempt["state"] for attempt in shown["attempts"]]
    expect((shown["state"], attempts) == ("RUNNING", ["RUNNING"]), f"it was disturbed: {shown}")
    lines = log_of(client, job)
    expect(lines != [] and lines == [str(n + 1) for n in range(len(lines))], f"its log has gaps: {lines}")


def first_job(stack: ComposeStack, client: PortalClient) -> str:
    """Run a short job to its end, and start a long one; return the id of the latter."""
    add_environment(client)
    short = submit(client, "short", "echo hello")
    wait_for_state(stack, client, short, "COMPLETED")
    stack.wait("its log", lambda: log_of(client, short) == ["hello"], 30)
    long = submit(client, "long", COUNTER_SCRIPT)
    wait_for_state(stack, client, long, "RUNNING")
    return long


# -- failures and recovery ---------------------------------------------------------------------------------


def restart_each(stack: ComposeStack, client: PortalClient, long: str) -> Iterator[str]:
    """Restart every service under the long job; run a new job after each restart."""
    for service in sorted(stack.compose("ps", "--services").split()):
        if service == "init":
            continue
        began_s = time.monotonic()
        stack.compose("restart", service, within_s=180)
        job = stack.wait(f"a job is taken after {service}", lambda: try_submit(client), 180)
        wait_for_state(stack, client, job, "COMPLETED")
        expect_uninterrupted(client, long)
        yield f"{service} restarted, a job after it completed after {time.monotonic() - began_s:.0f} s"


def try_submit(client: PortalClient) -> str | None:
    """Return the id of a new short job; None while submission fails."""
    try:
        return submit(client, "after", "true")
    except TRANSIENT_ERRORS:
        return None


def back_up_and_restore(stack: ComposeStack, client: PortalClient, long: str) -> Iterator[str]:
    """Lose all volumes and keys while jobs run, and restore them (docs/operations.md, Backup and restore)."""
    safe = stack.folder / "safe"
    stack.make_folder(safe)
    mount = ("--volume", f"{safe}:/safe")
    command = ("run", "--rm", "-T", *mount, "init", "python", "manage.py")
    (safe / "monday.tar").unlink(missing_ok=True)
    stack.compose(*command, "backup", "/safe/monday.tar", within_s=300)
    yield "a backup of the running stack"
    later = submit(client, "later", COUNTER_SCRIPT)
    wait_for_state(stack, client, later, "RUNNING")
    stack.delete_all_state()
    said = stack.compose(*command, "restore", "/safe/monday.tar", within_s=300)
    expect("Restored cluster" in said, said)
    stack.compose("run", "--rm", "-T", "init", within_s=300)
    stack.compose("up", "--detach", within_s=600)
    yield "restored into empty volumes, up again"
    stack.wait("REST answers", lambda: is_answering(client), 180)
    unknown = stack.wait("the unknown container", lambda: orphan_containers(client), 120)
    expect([row["job_id"] for row in unknown] == [later], f"unknown is {unknown}")
    client.rest("POST", f"recovery/containers/{unknown[0]['id']}/stop/", {})
    stack.wait("nothing is missing", lambda: not client.rest("GET", "recovery/")["recovery_mode"], 120)
    job = submit(client, "restored", "echo again")
    wait_for_state(stack, client, job, "COMPLETED")
    stack.wait("its log is fetched again", lambda: log_of(client, long), 60)
    expect_uninterrupted(client, long)
    yield "the job from the backup keeps running, the unknown one was stopped, a new one completed"


def is_answering(client: PortalClient) -> bool:
    """Return whether the portal answers."""
    try:
        return bool(client.rest("GET", "me/"))
    except TRANSIENT_ERRORS:
        return False


def orphan_containers(client: PortalClient) -> Any:
    """Return containers that the restored database does not contain."""
    return client.rest("GET", "recovery/containers/")["items"]
