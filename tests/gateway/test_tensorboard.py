"""TensorBoard the whole way: jobs write event files, a workspace shows them, and the gateway leads to it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.test import Client

from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound
from portal.models import Attempt, AttemptObservation, Environment, Job, Project, User
from portal.selectors.jobs.jobs import get_job
from portal.services.environments.process_environment import world_readable_python
from portal.services.jobs.attempt_secrets import decrypt_attempt_secret
from portal.services.jobs.submission import do_cancel_job
from portal.services.jobs.tensorboard import do_open_tensorboard
from portal.services.workspaces.access import do_open_workspace
from portal.services.workspaces.sharing import do_revoke_share, do_share_workspace
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, wait_for
from tests.gateway.gateway_harness import Testbed, attempt_of, sign_in
from tests.gateway.test_terminals import in_thread

CACHE = Path(os.environ.get("FAIRWAY_TEST_CACHE", "/var/tmp/fairway-tests"))
WRITE = """
import os, sys
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter
writer = EventFileWriter(os.environ["FAIRWAY_TENSORBOARD_DIR"])
for step in range(5):
    value = summary_pb2.Summary.Value(tag="loss", simple_value=float(sys.argv[1]) / (step + 1))
    writer.add_event(event_pb2.Event(step=step, wall_time=1e9 + step, summary=summary_pb2.Summary(value=[value])))
writer.close()
"""


@pytest.fixture(scope="session")
def prefix() -> Path:
    """A virtual environment with TensorBoard that accounts of jobs may read."""
    CACHE.mkdir(parents=True, exist_ok=True)
    kept = CACHE / "tensorboard-2.21"
    with (CACHE / "tensorboard.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (kept / "complete").exists():
            subprocess.run([str(world_readable_python()), "-m", "venv", str(kept)], check=True)
            words = ["-m", "pip", "install", "-q", "tensorboard==2.21.0", "setuptools<81"]
            subprocess.run([str(kept / "bin/python"), *words], check=True, umask=0o022)
            (kept / "complete").touch()
    return kept


@pytest.fixture
def project(owner: User) -> Project:
    return factories.project(member=owner)


@pytest.fixture
def board(prefix: Path) -> Environment:
    words = ["{prefix}/bin/python", "{fairway:secrets}/tensorboard_server.py"]
    columns = {"tool": "tensorboard", "tool_command": words, "prefix": str(prefix)}
    row = factories.environment(runtime="process")
    Environment.objects.filter(pk=row.pk).update(**columns)
    return Environment.objects.get(pk=row.pk)


@pytest.fixture
def run(harness: EngineHarness, owner: User, project: Project, prefix: Path) -> Iterator[Callable[..., Job]]:
    """Runs a job on this machine until it has ended; the engine goes on working beside the test."""
    harness.mark_enrolled(harness.create_node(name=f"n{time.monotonic_ns()}"))
    environment = factories.environment(runtime="process", tool=False)
    Environment.objects.filter(pk=environment.pk).update(prefix=str(prefix))
    environment.refresh_from_db()
    over = threading.Event()
    work = partial(in_thread, lambda: InProcessEngine().run_until(over.is_set, 300.0))
    engine = threading.Thread(target=work, daemon=True)
    engine.start()

    def made(*command: str, **fields: Any) -> Job:
        fields = {"command": list(command), "gpus_per_task": 0, "memory_mib": 512, "max_attempts": 1} | fields
        job = factories.job(owner, project, environment, **fields)
        wait_for("it ends", Attempt.objects.filter(job=job, ended_at__isnull=False).exists, 60)
        return get_job(owner, job.public_id)

    try:
        yield made
    finally:
        over.set()
        engine.join(30)


def test_the_event_files_of_several_ended_jobs_are_shown_through_the_gateway(
    testbed: Testbed, run, board: Environment, prefix: Path, owner: User, session: str
) -> None:
    python = str(prefix / "bin/python")
    jobs = [
        run(python, "-c", WRITE, str(scale), name=f"scale, {scale}".replace(",", "")) for scale in (1, 10)
    ]
    seen = AttemptObservation.objects.filter(attempt__job__in=jobs).values_list("event_files", flat=True)
    assert list(seen) == [True, True]
    opened = do_open_tensorboard(owner, jobs)
    assert (opened.kind, opened.gpus_per_task, opened.project) == ("workspace", 0, jobs[0].project)
    wait_for("it answers", Attempt.objects.filter(job=opened, ready_at__isnull=False).exists, 90)
    assert do_open_tensorboard(owner, jobs[::-1]) == opened

    _, ticket = do_open_workspace(owner, opened, session)
    cookie = testbed.enter(opened, ticket).headers["set-cookie"].partition(";")[0]
    with testbed.browser(opened) as browser:
        names = [f"scale-{scale}-{job.public_id}/." for scale, job in zip((1, 10), jobs, strict=True)]
        own = {"Cookie": cookie}
        assert "<title>TensorBoard" in browser.get("/", headers=own).text
        wait_for("they are read", lambda: len(browser.get("/data/runs", headers=own).json()) == 2, 60)
        assert browser.get("/data/runs", headers=own).json() == names
        query = {"tag": "loss", "run": names[1]}
        shown = browser.get("/data/plugin/scalars/scalars", params=query, headers=own).json()
        assert [(step, round(value, 3)) for _, step, value in shown][:2] == [(0, 10.0), (1, 5.0)]
        assert browser.get("/data/runs").status_code != 200
    port = attempt_of(opened).task_rows.get().ports["8888"]
    direct = f"http://127.77.0.1:{port}/data/runs"
    assert httpx.get(direct).status_code == 403
    secret = decrypt_attempt_secret(attempt_of(opened))
    assert httpx.get(direct, headers={"Authorization": f"Bearer {secret}"}).json() == names
    assert secret not in str(Path(f"/proc/{os.getpid()}/cmdline").read_bytes())

    # when the right of a visitor ends, the node gives the running server another secret
    guest = factories.user()
    opened.project.memberships.create(user=guest, role="member")
    share = do_share_workspace(owner, opened, guest, "view", 3600)
    _, ticket = do_open_workspace(guest, opened, sign_in(guest))
    assert testbed.enter(opened, ticket).status_code == 303
    do_revoke_share(owner, share)
    wait_for("a new secret", opened.events.filter(kind="secret_replaced").exists, 60)
    known = {"Authorization": f"Bearer {secret}"}
    wait_for("its end", lambda: httpx.get(direct, headers=known).status_code == 403, 30)
    with testbed.browser(opened) as browser:
        assert browser.get("/data/runs", headers={"Cookie": cookie}).json() == names
    do_cancel_job(owner, opened)
    wait_for("it ends", lambda: Job.objects.filter(pk=opened.pk, state="CANCELLED").exists(), 30)


def test_a_job_without_event_files_is_refused_with_its_reason(run, board: Environment, owner: User) -> None:
    job = run("true")
    with pytest.raises(Conflict, match="wrote no event files to FAIRWAY_TENSORBOARD_DIR") as caught:
        do_open_tensorboard(owner, [job])
    assert caught.value.code == "no_event_files"
    client = Client()
    client.cookies["fairway_session"] = sign_in(owner)
    answer = client.post("/jobs/tensorboard/", {"job": job.public_id}, follow=True)
    assert "wrote no event files" in answer.content.decode()


def test_other_users_jobs_of_two_projects_and_a_missing_environment_are_refused(
    transactional_db: None, owner: User, project: Project
) -> None:
    factories.node(factories.pool(), runtime="process")
    manager, stranger = factories.user(), factories.user()
    project.memberships.create(user=manager, role="manager")
    environment = factories.environment(runtime="process", tool=False)
    job = factories.job(owner, project, environment)
    with pytest.raises(NotFound):
        do_open_tensorboard(stranger, [job])
    with pytest.raises(Forbidden, match="in the home of"):
        do_open_tensorboard(manager, [job])
    with pytest.raises(Conflict):  # it has not started
        do_open_tensorboard(owner, [job])
    Job.objects.filter(pk=job.pk).update(started_at=job.submitted_at)
    with pytest.raises(Conflict, match="No environment has the tool tensorboard"):
        do_open_tensorboard(owner, [get_job(owner, job.public_id)])
    other = factories.job(owner, factories.project(member=owner), environment)
    with pytest.raises(InvalidRequest) as caught:
        do_open_tensorboard(owner, [job, other])
    assert caught.value.fields == {"others": "All jobs must be of one project."}
