"""PostgreSQL or Valkey stands still, is full or starts anew: all are told within ten seconds, nothing doubles."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import psycopg
import pytest

from portal.config import data_paths
from portal.request_timeout import PROBES
from tests.engine_harness import wait_for
from tests.process_environment import without_servers
from tests.time_budget import budget_s

ROOT = Path(__file__).parent.parent.parent
HANG_S = 10.0
CONNECTIONS = 6
"""What all requests of web share here: few, so that they do not suffice for everybody."""
SCENE = """
import json, django
django.setup()
from portal.services.accounts.tokens import Scope, do_create_token
from tests import factories
from tests.gateway.gateway_harness import sign_in
from portal.services.jobs.logs import write_log_bytes
from tests.api.fixture_data import running
owner = factories.user("ada")
project = factories.project(member=owner)
environment = factories.environment(tool=False)
node = factories.node(factories.pool())
talker = running(factories.job(owner, project, environment), node)
write_log_bytes(talker.public_id, 1, 0, "k8s", 0, b"2026-11-21T07:00:00.000001Z stdout F 0123456789\\n" * 100_000)
_, token = do_create_token(owner, name="t", scopes=list(Scope))
print(json.dumps({"token": token, "session": sign_in(owner), "talker": talker.public_id, "job": {
    "project": project.public_id, "environment": environment.public_id, "name": "one", "command": ["true"]}}))
"""
COUNT = """
import django
django.setup()
from portal.models import Job
print(Job.objects.count())
"""

pytestmark = [pytest.mark.heavy, pytest.mark.early, pytest.mark.timeout(240)]


@dataclass
class Portal:
    """Web and gateway as processes, on servers of their own that can be stopped in their tracks."""

    folder: Path
    port: int
    environment: dict[str, str]
    servers: dict[str, int]
    ending: contextlib.ExitStack
    dataset: dict[str, Any] = field(default_factory=dict)

    def run(self, program: str) -> Any:
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """A server and all its children stand still."""
        stopped: set[int] = set()
        while more := set(_family(self.servers[name])) - stopped:
            for pid in more:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= more
        try:
            yield
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):  # the server has ended this child meanwhile
                    os.kill(pid, signal.SIGCONT)

    def start_anew(self, away_s: float) -> None:
        """PostgreSQL loses its power, and comes back after a while: ``pg_ctl restart -m immediate``."""
        pid = self.servers["postgres"]
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
        owner = Path(f"/proc/{pid}").stat()
        as_owner = {} if os.geteuid() else {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
        os.kill(pid, signal.SIGQUIT)
        wait_for("it is down", lambda: not _alive(pid), 10)
        time.sleep(away_s)
        with (self.folder / "postgres.log").open("ab") as log:
            again = subprocess.Popen(words, stdout=log, stderr=log, cwd="/", **as_owner)
        self.servers["postgres"] = again.pid
        self.ending.callback(again.wait, 20)
        self.ending.callback(again.send_signal, signal.SIGINT)

    def ask(
        self, method: str, path: str, *, straight: bool = False, **options: Any
    ) -> tuple[httpx.Response, float]:
        """An answer and how long it took; ``straight`` asks web itself, past the gateway."""
        headers = {"Host": f"localhost:{self.port}"} | options.pop("headers", {})
        way = httpx.HTTPTransport(uds=self.environment["FAIRWAY_WEB_SOCKET"]) if straight else None
        began_s = time.monotonic()
        with httpx.Client(transport=way, timeout=60) as client:
            answer = client.request(method, f"http://127.0.0.1:{self.port}{path}", headers=headers, **options)
        return answer, time.monotonic() - began_s

    def page(self) -> tuple[httpx.Response, float]:
        crumbs = f"fairway_session={self.dataset['session']}"
        return self.ask("GET", "/jobs/", headers={"Cookie": crumbs, "Accept": "text/html"})

    def listed(self) -> tuple[httpx.Response, float]:
        return self.ask("GET", "/api/v1/jobs/", headers=self.bearer())

    def submit(self, key: str, *, straight: bool = False) -> tuple[httpx.Response, float]:
        headers = self.bearer() | {"Idempotency-Key": key}
        return self.ask("POST", "/api/v1/jobs/", json=self.dataset["job"], headers=headers, straight=straight)

    def workspace(self) -> tuple[httpx.Response, float]:
        """A stranger at a workspace; each time another, for the gateway remembers its answers a moment."""
        headers = {
            "Host": f"ws-jabc.localhost:{self.port}",
            "Cookie": f"fairway_workspace={time.monotonic_ns()}",
        }
        return self.ask("GET", "/lab", headers=headers)

    def database(self) -> psycopg.Connection[Any]:
        """A connection of our own."""
        where, _, name = self.environment["DATABASE_URL"].partition("@/")[2].rpartition("/")
        host = unquote(where).lstrip("/")
        return psycopg.connect(host=f"/{host}", user=data_paths.SERVICES_ROLE, dbname=name, autocommit=True)

    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.dataset['token']}"}

    def ready(self) -> int:
        """The status of its readiness; no scheduler runs here."""
        return self.ask("GET", "/readyz?exclude=scheduler")[0].status_code


@pytest.fixture(scope="module")
def portal() -> Iterator[Portal]:
    data = Path(tempfile.mkdtemp(prefix="fairway-frozen-"))
    data.chmod(0o711)
    guardian = subprocess.Popen(
        [sys.executable, "-m", "portal.standalone.temporary_servers", str(data)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.callback(guardian.wait, 60)
        stack.callback(guardian.stdin.close)  # type: ignore[union-attr]
        reported = json.loads(guardian.stdout.readline())  # type: ignore[union-attr]
        assert "trouble" not in reported, reported
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = int(taken.getsockname()[1])
        environment = {
            **without_servers(),
            "DATABASE_URL": reported["database_url"],
            "REDIS_URL": reported["redis_url"],
            "FAIRWAY_DATA_DIR": str(data),
            "FAIRWAY_PORTAL_URL": f"http://localhost:{port}",
            "FAIRWAY_APPS_DOMAIN": f"localhost:{port}",
            "FAIRWAY_DATABASE_POOL": str(CONNECTIONS),
            "FAIRWAY_WEB_SOCKET": str(data_paths.sockets_dir(data) / "web.sock"),
            "DJANGO_SETTINGS_MODULE": "portal.config.settings",
        }
        servers = {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in _children(guardian.pid)}
        named = {"postgres": "postgres", "valkey-server": "valkey", "redis-server": "valkey"}
        made = Portal(data, port, environment, {named[name]: pid for name, pid in servers.items()}, stack)
        subprocess.run(
            [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
            env=environment | {"DATABASE_OWNER_URL": reported["database_owner_url"]},
            cwd=ROOT, check=True, timeout=120,
        )  # fmt: skip
        made.dataset = made.run(SCENE)
        uds = ("--uds", environment["FAIRWAY_WEB_SOCKET"], "--lifespan", "off", "--proxy-headers")
        trusted = ("--forwarded-allow-ips", "*", "--no-access-log")
        log = stack.enter_context((data / "processes.log").open("wb"))
        for command in (
            ("uvicorn", "portal.asgi:application", *uds, *trusted),
            ("portal.gateway", "--port", str(port)),
        ):
            process = subprocess.Popen(
                [sys.executable, "-m", *command], env=environment, cwd=ROOT, stdout=log, stderr=log
            )
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
        wait_for("the portal answers", lambda: _quiet(made.ready) == 200, 40)
        for look in (made.page, made.listed):  # each way is warm, as in a portal that has run for a while
            assert look()[0].status_code == 200
        assert made.workspace()[0].status_code == 403
        yield made


def test_a_frozen_database_is_a_clear_503_and_recovers(portal: Portal) -> None:
    with portal.frozen("postgres"), ThreadPoolExecutor(8) as hands:
        asked = {
            "page": hands.submit(portal.page),
            "list": hands.submit(portal.listed),
            "submit": hands.submit(portal.submit, "in-the-cold"),
            "workspace": hands.submit(portal.workspace),
            "readyz": hands.submit(portal.ask, "GET", "/readyz"),
        }
        for _ in range(10):  # meanwhile the processes themselves are well
            alive, took_s = portal.ask("GET", "/healthz")
            assert alive.status_code == 200
            assert took_s < budget_s(2)
            time.sleep(0.3)
        for name, future in asked.items():
            answer, took_s = future.result()
            assert (name, answer.status_code) == (name, 503)
            assert took_s < budget_s(HANG_S), name
            assert int(answer.headers["retry-after"]) > 0, name
            kind = answer.headers["content-type"]
            if name in ("list", "submit"):
                assert kind == "application/problem+json"
                assert answer.json()["code"] == "unavailable"
            elif name in ("page", "workspace"):
                assert kind.startswith("text/html")
                assert "Try again" in answer.text
        again, took_s = portal.page()
        assert again.status_code == 503
        assert took_s < budget_s(HANG_S)
    wait_for("it is ready again", lambda: portal.ready() == 200, 15)
    assert portal.page()[0].status_code == 200
    assert portal.listed()[0].status_code == 200
    first, second = portal.submit("in-the-cold")[0], portal.submit("in-the-cold")[0]
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json()["id"] == second.json()["id"]


def test_requests_interrupted_by_a_freeze_are_done_once(portal: Portal) -> None:
    """Twenty people submit while the database freezes under them: each tries again until there is a job.

    They ask web itself, because the gateway has a patience of its own.
    """
    before = portal.run(COUNT)
    keys = [f"caught-{number}" for number in range(20)]
    seen: dict[str, set[str]] = {key: set() for key in keys}
    thawed = threading.Event()
    slowest: list[float] = []

    def insist(key: str) -> None:
        until = time.monotonic() + 90
        while time.monotonic() < until:
            answer, took_s = portal.submit(key, straight=True)
            slowest.append(took_s)
            if answer.status_code == 201:
                seen[key].add(answer.json()["id"])
                if thawed.is_set():
                    return
                continue
            assert answer.status_code in (409, 503), answer.text
            time.sleep(0.5)

    with ThreadPoolExecutor(len(keys)) as hands:
        running = [hands.submit(insist, key) for key in keys]
        time.sleep(0.4)
        for _ in range(2):
            with portal.frozen("postgres"):
                time.sleep(HANG_S + 4)
            time.sleep(2.5)
        thawed.set()
        for each in running:
            each.result()
    assert [len(ids) for ids in seen.values()] == [1] * len(keys)
    assert portal.run(COUNT) == before + len(keys)
    assert max(slowest) < budget_s(HANG_S)


def test_a_frozen_message_store_delays_nobody_for_long(portal: Portal) -> None:
    before = portal.run(COUNT)
    with portal.frozen("valkey"), ThreadPoolExecutor(4) as hands:
        asked = [hands.submit(look) for look in (portal.page, portal.listed)]
        submitted = hands.submit(portal.submit, "without-news")
        ready = hands.submit(portal.ask, "GET", "/readyz")
        assert portal.ask("GET", "/healthz")[0].status_code == 200
        for future in asked:
            answer, took_s = future.result()
            assert answer.status_code in (200, 503)
            assert took_s < budget_s(HANG_S)
        answer, took_s = submitted.result()
        assert answer.status_code == 201  # the row is what counts; the hint stays in the outbox
        assert took_s < budget_s(HANG_S)
        reported, took_s = ready.result()
        assert reported.status_code == 503
        assert reported.json()["parts"]["database"]["ok"]
        assert not reported.json()["parts"]["redis"]["ok"]
        assert took_s < budget_s(HANG_S)
    wait_for("it is ready again", lambda: portal.ready() == 200, 15)
    again = portal.submit("without-news")[0]
    assert again.status_code == 201
    assert again.json()["id"] == answer.json()["id"]
    assert portal.run(COUNT) == before + 1


def test_a_restarted_database_is_unavailable_for_seconds_only(portal: Portal) -> None:
    with ThreadPoolExecutor(CONNECTIONS) as hands:  # every connection is warm, and none survives
        assert {each[0].status_code for each in hands.map(lambda _: portal.listed(), range(12))} == {200}
        restart = hands.submit(portal.start_anew, 1.5)
        seen = []
        while not restart.done():
            seen += [portal.listed(), portal.page()]
    reported = {answer.status_code for answer, _ in seen}
    assert 503 in reported
    assert reported <= {200, 503}
    assert all(int(answer.headers["retry-after"]) > 0 for answer, _ in seen if answer.status_code == 503)
    assert max(took_s for _, took_s in seen) < budget_s(HANG_S)
    recovered = time.monotonic() + 5
    while (answer := portal.listed()[0]).status_code != 200:
        assert answer.status_code == 503, answer.text
        assert time.monotonic() < recovered, "it has not found the database again"
        time.sleep(0.1)
    with ThreadPoolExecutor(CONNECTIONS) as hands:
        assert {each[0].status_code for each in hands.map(lambda _: portal.listed(), range(12))} == {200}


def test_when_all_connections_are_in_use_others_get_an_error(portal: Portal) -> None:
    with ThreadPoolExecutor(3 * CONNECTIONS) as hands, portal.database() as blocker:
        blocker.execute("BEGIN; LOCK TABLE portal_job IN ACCESS EXCLUSIVE MODE")
        asked = [hands.submit(portal.listed) for _ in range(3 * CONNECTIONS)]
        waiting = "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted"
        requests = CONNECTIONS - PROBES
        wait_for("they wait for the table", lambda: blocker.execute(waiting).fetchone() == (requests,), 5)
        assert portal.ask("GET", "/healthz")[0].status_code == 200
        assert portal.ready() == 200
        for future in asked:
            answer, took_s = future.result()
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            assert took_s < budget_s(HANG_S)
        blocker.execute("ROLLBACK")
        assert {each[0].status_code for each in hands.map(lambda _: portal.listed(), range(12))} == {200}


def test_slow_and_disconnected_readers_hold_no_connection(portal: Portal) -> None:
    """A download that nobody reads, and requests whose sender hangs up at once."""
    path = f"/api/v1/jobs/{portal.dataset['talker']}/logs/download/"
    head = f"Host: localhost:{portal.port}\r\nAuthorization: Bearer {portal.dataset['token']}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(2 * CONNECTIONS):
            reader = stack.enter_context(socket.socket(socket.AF_UNIX))
            reader.connect(portal.environment["FAIRWAY_WEB_SOCKET"])
            reader.sendall(f"GET {path} HTTP/1.1\r\n{head}".encode())
            assert b" 200 " in reader.recv(64)
        for number in range(10 * CONNECTIONS):
            with socket.socket(socket.AF_UNIX) as leaver:
                leaver.connect(portal.environment["FAIRWAY_WEB_SOCKET"])
                leaver.sendall(f"GET /api/v1/jobs/ HTTP/1.1\r\n{head}".encode())
                time.sleep(number % 6 * 0.005)
        with ThreadPoolExecutor(CONNECTIONS) as hands:
            for answer, took_s in hands.map(lambda _: portal.listed(), range(12)):
                assert answer.status_code == 200
                assert took_s < budget_s(3)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _quiet(look: Any) -> Any:
    try:
        return look()
    except httpx.HTTPError:
        return None


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _family(pid: int) -> list[int]:
    try:
        return [pid, *(found for child in _children(pid) for found in _family(child))]
    except FileNotFoundError:
        return []
