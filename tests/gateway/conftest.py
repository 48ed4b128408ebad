"""A gateway with a tool and a web process behind it, for every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from portal.models import Job, User
from portal.services.workspaces.access import do_open_workspace
from tests import factories
from tests.engine_harness import harness, shared_harness
from tests.gateway.gateway_harness import Testbed, running_workspace, sign_in

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
