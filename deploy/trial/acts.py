"""What people do with the stack: sign in, add a node, run jobs, restart what they run on, restore a backup."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

from stack import HOST, HTTPS_PORT, ComposeStack
from visitor import PortalClient, form_field


def sign_in(trial: ComposeStack, link: str) -> PortalClient:
    visitor = PortalClient(HOST, HTTPS_PORT, trial.site / "deploy/front/certificates/portal.pem")
    for path in ("/healthz", "/readyz"):
        visitor.get_page(path)
    address, _, code = link.partition("#")
    expect(address == f"https://{HOST}/sign-in/link/", f"the link leads to {address}")
    answer = visitor.submit_form("/sign-in/link/", {"code": code})
    expect(answer.status == 302, f"the link lets nobody in: {answer.status} {answer.text[:300]}")
    page = visitor.get_page("/cluster/")
    for asset in re.findall(r'(?:href|src)="(/static/[^"#]+)"', page):
        visitor.get_page(asset)
    return visitor


def add_node(trial: ComposeStack, visitor: PortalClient) -> None:
    trial.docker("run", "--detach", "--name", "fairwaytrial-node", "--hostname", "node1",
                 "--network", "fairwaytrial_nodes", "--network-alias", "node1", "fairway-trial/node")  # fmt: skip
    form = {"host": "node1", "port": "22", "name": "node1", "new_pool": "trial", "pool": "",
            "account": "fairway", "runtime": "process", "engine": "auto"}  # fmt: skip
    shown = visitor.submit_form("/nodes/add/", form)
    expect(shown.status == 200, f"the host key is not shown: {shown.status} {shown.text[-1500:]}")
    script = form_field(shown.text, "script")
    trial.docker("exec", "--interactive", "fairwaytrial-node", "sh", "-s", input=script)
    form |= {"host_key": form_field(shown.text, "host_key"), "confirmed": "on"}
    check = visitor.submit_form("/nodes/add/", form)
    expect(check.status == 302, f"the node is not added: {check.status}")

    def works() -> bool:
        text = visitor.get_page(check.location)
        expect("fw-state--failed" not in text or "Everything works" in text, text[-3000:])
        return "Everything works" in text

    trial.wait("the node's connection test", works, 60)


def expect(true: bool, sentence: str) -> None:
    if not true:
        raise RuntimeError(sentence)


# -- jobs ----------------------------------------------------------------------------------------------

COUNTER_SCRIPT = "i=0; while :; do i=$((i+1)); echo $i; sleep 1; done"
TRANSIENT_ERRORS = (OSError, RuntimeError)  # what answers a visitor while a service of the stack begins anew


def add_environment(visitor: PortalClient) -> None:
    form = {"name": "plain", "title": "Plain", "runtime": "process", "prefix": "/usr", "enabled": "on"}
    saved = visitor.submit_form("/environments/add/", form, first="/environments/new/")
    expect(saved.status == 302, f"the environment is not saved: {saved.status} {saved.text[-1500:]}")


def submit(visitor: PortalClient, name: str, script: str) -> str:
    """Submits a job to the first project; gives its id."""
    project = visitor.rest("GET", "projects/")["items"][0]["name"]
    body = {
        "name": name,
        "project": project,
        "environment": "plain",
        "command": ["/bin/sh", "-c", script],
        "gpus_per_task": 0,
        "memory_mib": 256,
    }
    return str(visitor.rest("POST", "jobs/", body)["id"])


def wait_for_state(trial: ComposeStack, visitor: PortalClient, job: str, state: str) -> None:
    """Waits until a job is in a state; an error once it ended in another."""

    def look() -> bool:
        try:
            shown = visitor.rest("GET", f"jobs/{job}/")
        except TRANSIENT_ERRORS:
            return False
        ended = shown["state"] not in ("PENDING", "RUNNING")
        expect(not ended or shown["state"] == state, f"the job is {shown['state']}: {shown['reason']}")
        return bool(shown["state"] == state)

    trial.wait(f"the job {job} {state}", look, 180)


def log_of(visitor: PortalClient, job: str) -> list[str]:
    """The last lines of a job's log, without their times."""
    return str(visitor.rest("GET", f"jobs/{job}/logs/?tail=1000")["text"]).split()


def expect_uninterrupted(visitor: PortalClient, job: str) -> None:
    """It runs in its first attempt, and every second of it is in its log."""
    shown = visitor.rest("GET", f"jobs/{job}/")
    attempts = [attempt["state"] for attempt in shown["attempts"]]
    expect((shown["state"], attempts) == ("RUNNING", ["RUNNING"]), f"it was disturbed: {shown}")
    lines = log_of(visitor, job)
    expect(lines != [] and lines == [str(n + 1) for n in range(len(lines))], f"its log has gaps: {lines}")


def first_job(trial: ComposeStack, visitor: PortalClient) -> str:
    """A short job to its end, and a long one that runs from now on; gives that one's id."""
    add_environment(visitor)
    short = submit(visitor, "short", "echo hello")
    wait_for_state(trial, visitor, short, "COMPLETED")
    trial.wait("its log", lambda: log_of(visitor, short) == ["hello"], 30)
    long = submit(visitor, "long", COUNTER_SCRIPT)
    wait_for_state(trial, visitor, long, "RUNNING")
    return long


# -- what goes wrong, and what is done about it ----------------------------------------------------------


def restart_each(trial: ComposeStack, visitor: PortalClient, long: str) -> Iterator[str]:
    """Every service begins anew, one after the other, under the long job; a new job runs after each."""
    for service in sorted(trial.compose("ps", "--services").split()):
        if service == "init":
            continue
        began_s = time.monotonic()
        trial.compose("restart", service, within_s=180)
        job = trial.wait(f"a job is taken after {service}", lambda: try_submit(visitor), 180)
        wait_for_state(trial, visitor, job, "COMPLETED")
        expect_uninterrupted(visitor, long)
        yield f"{service} begun anew, a job after it completed after {time.monotonic() - began_s:.0f} s"


def try_submit(visitor: PortalClient) -> str | None:
    """The id of a new short job; None while nobody takes it."""
    try:
        return submit(visitor, "after", "true")
    except TRANSIENT_ERRORS:
        return None


def back_up_and_restore(trial: ComposeStack, visitor: PortalClient, long: str) -> Iterator[str]:
    """docs/operations.md, Backup and restore: all volumes and keys are lost while jobs run, and come back."""
    safe = trial.folder / "safe"
    trial.make_folder(safe)
    mount = ("--volume", f"{safe}:/safe")
    command = ("run", "--rm", "-T", *mount, "init", "python", "manage.py")
    (safe / "monday.tar").unlink(missing_ok=True)
    trial.compose(*command, "backup", "/safe/monday.tar", within_s=300)
    yield "a backup of the running stack"
    later = submit(visitor, "later", COUNTER_SCRIPT)
    wait_for_state(trial, visitor, later, "RUNNING")
    trial.delete_all_state()
    said = trial.compose(*command, "restore", "/safe/monday.tar", within_s=300)
    expect("Restored cluster" in said, said)
    trial.compose("run", "--rm", "-T", "init", within_s=300)
    trial.compose("up", "--detach", within_s=600)
    yield "restored into empty volumes, up again"
    trial.wait("REST answers", lambda: is_answering(visitor), 180)
    unknown = trial.wait("the unknown container", lambda: orphan_containers(visitor), 120)
    expect([row["job_id"] for row in unknown] == [later], f"unknown is {unknown}")
    visitor.rest("POST", f"restored/containers/{unknown[0]['id']}/stop/", {})
    trial.wait("nothing is missing", lambda: not visitor.rest("GET", "restored/")["adopting"], 120)
    job = submit(visitor, "restored", "echo again")
    wait_for_state(trial, visitor, job, "COMPLETED")
    trial.wait("its log is fetched anew", lambda: log_of(visitor, long), 60)
    expect_uninterrupted(visitor, long)
    yield "the job from before runs on, the one it had forgotten was stopped, a new one completed"


def is_answering(visitor: PortalClient) -> bool:
    """True once the portal answers."""
    try:
        return bool(visitor.rest("GET", "me/"))
    except TRANSIENT_ERRORS:
        return False


def orphan_containers(visitor: PortalClient) -> Any:
    """The containers that the restored record does not know."""
    return visitor.rest("GET", "restored/containers/")["items"]
