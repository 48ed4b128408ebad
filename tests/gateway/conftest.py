"""A gateway with a tool and a web process behind it, for every test of this folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from portal.models import Job, Task, User
from portal.services.jobs.submission import do_cancel_job
from portal.services.workspaces.access import do_open_workspace
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, harness, shared_harness, wait_for
from tests.gateway.gateway_harness import Testbed, in_thread, running_workspace, sign_in

__all__ = ["harness", "shared_harness"]


@pytest.fixture(scope="session")
def _running(
    django_db_setup: None, django_db_blocker: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Testbed]:
    """One gateway for all tests: starting and ending it takes longer than most of them."""
    with ExitStack() as opened:
        with django_db_blocker.unblock():  # it begins with a look at the record
            running = opened.enter_context(Testbed(tmp_path_factory.mktemp("gateway")))
        yield running


@pytest.fixture
def testbed(transactional_db: None, _running: Testbed) -> Testbed:
    _running.tool.seen.clear()
    return _running


@pytest.fixture
def own_stand(transactional_db: None, tmp_path: Path) -> Iterator[Testbed]:
    """A gateway for one test alone, which may take parts of it away."""
    with Testbed(tmp_path) as running:
        yield running


@pytest.fixture
def owner(transactional_db: None) -> User:
    return factories.user()


@pytest.fixture
def running(harness: EngineHarness, owner: User) -> Iterator[Job]:
    """A job that runs on this machine; its actor goes on working beside the test."""
    harness.mark_enrolled(harness.create_node(name=f"n{time.monotonic_ns()}"))
    project = factories.project(member=owner)
    environment = factories.environment(runtime="process", tool=False)
    job = factories.job(owner, project, environment, command=["sleep", "600"], gpus_per_task=1)
    over = threading.Event()
    work = partial(in_thread, lambda: InProcessEngine().run_until(over.is_set, 300.0))
    engine = threading.Thread(target=work, daemon=True)
    engine.start()
    try:
        wait_for("it runs", Task.objects.filter(attempt__job=job, state="RUNNING").exists)
        yield Job.objects.get(pk=job.pk)
        do_cancel_job(owner, Job.objects.get(pk=job.pk))
        wait_for("it ends", lambda: Job.objects.filter(pk=job.pk, state="CANCELLED").exists())
    finally:
        over.set()
        engine.join(30)


@pytest.fixture
def session(owner: User) -> str:
    return sign_in(owner)


@pytest.fixture
def workspace(testbed: Testbed, owner: User) -> Job:
    return running_workspace(owner, port=testbed.tool.port)


@pytest.fixture
def cookie(testbed: Testbed, owner: User, workspace: Job, session: str) -> str:
    """The cookie of a workspace session, got as a browser gets it."""
    _, ticket = do_open_workspace(owner, workspace, session)
    answer = testbed.enter(workspace, ticket)
    assert answer.status_code == 303, answer.text
    return answer.headers["set-cookie"].partition(";")[0]


@pytest.fixture
def inside(testbed: Testbed, workspace: Job, cookie: str) -> Iterator[httpx.Client]:
    """A browser that has entered the workspace."""
    with testbed.browser(workspace) as browser:
        browser.headers["Cookie"] = cookie
        yield browser
