"""Requests that wait for a worker, a node or the tracking server do not keep pages and probes waiting."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import redis
from django.conf import settings as django_settings

from portal.engine_client import HEARTBEAT_KEY
from portal.models import Project
from portal.request_timeout import RESPONSE_START_TIMEOUT_S
from portal.services.accounts.tokens import Scope, do_create_token
from tests import factories
from tests.process_environment import service_environment
from tests.standalone.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).parent.parent.parent
CONNECTIONS = 5
WAITING = 25


@pytest.fixture
def web() -> Iterator[Callable[[str], httpx.Client]]:
    """A web process as `up` starts it, with few connections, and a tracking server that accepts and never answers."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as tracking:
        tracking.bind(f"{folder}/tracking.sock")
        tracking.listen(WAITING)
        path = f"{folder}/web.sock"
        more = {
            "FAIRWAY_DATABASE_POOL": str(CONNECTIONS),
            "FAIRWAY_TRACKING_SOCKET": f"{folder}/tracking.sock",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "portal.asgi:application", "--uds", path, "--lifespan", "off"],
            cwd=ROOT, env=service_environment() | more, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip

        def client(token: str) -> httpx.Client:
            return httpx.Client(
                transport=httpx.HTTPTransport(uds=path, limits=httpx.Limits(max_connections=100)),
                base_url="http://localhost:8000",
                headers={"Authorization": f"Bearer {token}"} if token else {},
                timeout=60,
                trust_env=False,
            )

        try:
            assert eventually(lambda: Path(path).exists(), 60)
            yield client
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture
def tokens() -> tuple[str, str]:
    """Those of a user whose requests wait, and of another."""
    world = factories.basic_cluster()
    users = world["owner"], factories.user("eve")
    first, second = (do_create_token(user, name="t", scopes=list(Scope))[1] for user in users)
    return first, second


def ask_scheduler(client: httpx.Client, project: str) -> httpx.Response:
    body = {"project": project, "name": "p", "profile": {}}
    return client.post("/api/v1/profiles/", json=body)


def ask_tracking(client: httpx.Client, project: str) -> httpx.Response:
    return client.get(f"/api/mlflow/{project}/api/2.0/mlflow/runs/get", params={"run_id": "0" * 32})


@pytest.mark.parametrize("ask", [ask_scheduler, ask_tracking])
def test_pages_and_probes_are_answered_while_others_wait(web, tokens, ask):
    project = Project.objects.get().public_id
    store = redis.Redis.from_url(django_settings.REDIS_URL)
    store.set(HEARTBEAT_KEY, "1", ex=60)  # as a worker-ask that stands still, or works on something long
    stopped = threading.Event()
    slowest: dict[str, float] = {}
    seen: dict[str, Counter[int]] = {"/api/v1/jobs/": Counter(), "/readyz?exclude=scheduler": Counter()}
    with web(tokens[0]) as waiting, web(tokens[1]) as other, ThreadPoolExecutor(WAITING) as threads:
        for path in seen:
            assert other.get(path).status_code == 200

        def wait(_: int) -> Counter[int]:
            found: Counter[int] = Counter()
            while not stopped.is_set():
                found[ask(waiting, project).status_code] += 1
            return found

        running = [threads.submit(wait, number) for number in range(WAITING)]
        time.sleep(1.0)
        for _ in range(8):
            for path in seen:
                began_s = time.monotonic()
                seen[path][other.get(path).status_code] += 1
                slowest[path] = max(slowest.get(path, 0), time.monotonic() - began_s)
        stopped.set()
        ends = sum((each.result() for each in running), Counter())
    store.delete(HEARTBEAT_KEY)
    assert set(ends) == {503}, ends
    assert all(set(found) == {200} for found in seen.values()), (seen, slowest, ends)
    assert max(slowest.values()) < RESPONSE_START_TIMEOUT_S / 2, (seen, slowest, ends)
