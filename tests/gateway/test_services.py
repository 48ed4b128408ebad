"""Services on a real agent behind a real gateway: tokens, lost replicas, updates under load, scale to zero."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime as dt
import html
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx
import pytest
from django.test import Client
from django.utils import timezone

from portal.domain.serving.model_servers import ServiceSpec
from portal.errors import Conflict, InvalidRequest
from portal.models import (
    Attempt,
    AuditEntry,
    Job,
    Membership,
    NodePool,
    Quota,
    Service,
    ServiceReplica,
    User,
    WorkspaceSession,
)
from portal.selectors.serving.model_servers import get_service, service_status
from portal.services.accounts.tokens import Scope, do_create_token
from portal.services.jobs.submission import JobRequest
from portal.services.serving.model_servers import (
    Deployment,
    do_change_service,
    do_deploy_service,
    do_start_service,
    do_stop_service,
    do_update_service,
)
from portal.services.workspaces.access import do_open_service
from tests import factories
from tests.engine_harness import engine_harness, held_milli, wait_for
from tests.gateway.gateway_harness import Testbed, sign_in

SERVER = """
import base64, hashlib, json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/slow":
            time.sleep(2)
        if self.path == "/hang":
            self.server.hangs = True
        if self.path == "/health" and self.server.hangs:
            time.sleep(600)
        if self.headers.get("Upgrade") == "websocket":
            return self.echo()
        text = (f"{sys.argv[1]} {os.getpid()} {self.command} {self.path} {len(body)} "
                f"{self.headers.get('Authorization')} {self.headers.get('Cookie')}").encode()
        if self.path == "/headers":
            text = json.dumps([[name.lower(), value] for name, value in self.headers.items()]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    do_GET = do_POST = answer
    def echo(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        self.close_connection = True
        while True:  # masked text of at most 125 bytes
            head = self.rfile.read(2)
            if len(head) < 2 or head[0] & 15 == 8:
                return
            mask, data = self.rfile.read(4), self.rfile.read(head[1] & 127)
            text = b"echo " + bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
            self.wfile.write(bytes([129, len(text)]) + text)
    def log_message(self, *_): pass

class Server(ThreadingHTTPServer):
    request_queue_size = 64
    hangs = False

Server((os.environ["FAIRWAY_ADDRESS"], int(os.environ["PORT"])), Handler).serve_forever()
"""


_NAMES = """
Remote-User REMOTE_USER Remote_User remote.user X-Remote-User x_remote_user X-Remote.User X-Remote-Groups Remote-Email
X-Auth-Request-User X-Auth-Request-Email X_Auth_Request_Groups X-Auth-User X-Webauth-User X-WEBAUTH_USER
X-Fairway-User X-Fairway-User-Id X-FAIRWAY_ADMIN X-Forwarded-User X-Forwarded-Email X-Forwarded-Preferred-Username
X-Forwarded-Groups X-Forwarded X-Forwarded-Client-Cert Forwarded X-Real-IP X-Authenticated-User X-Authentik-Username
X-User X-User-Id X-Goog-Authenticated-User-Email Cf-Access-Authenticated-User-Email X-Ms-Client-Principal-Name
Impersonate-User Client-Cert X-SSL-Client-Verify X-Client-Cert Tailscale-User-Login True-Client-IP X-Consumer-Username
Via Ssl-Client-Subject-Dn X-ARR-ClientCert X-Userinfo X-User-Principal Kubeflow-Userid X-Auth-Subject X-OIDC-Email
X-Real_IP X-Appengine-User-Email X-Azure-ClientIP WL-Proxy-Client-IP X-Original-Forwarded-For X-Envoy-External-Address
"""
IDENTITY_HEADERS = _NAMES.split()
"""Headers in which servers behind a proxy expect who sends a request."""


def _folded(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


@dataclass
class Cluster:
    """Workers, a real agent with eight pretend GPUs, a gateway, and a user with a token."""

    gateway: Testbed
    owner: User
    project: Any
    environment: Any
    token: str

    def deploy(self, spec: ServiceSpec, *command: str, name: str = "answers") -> Service:
        return do_deploy_service(self.owner, self.deployment(spec, *command, name=name))

    def deployment(self, spec: ServiceSpec, *command: str, name: str = "answers") -> Deployment:
        request = JobRequest(
            name=name,
            project=self.project,
            environment=self.environment,
            command=command,
            memory_mib=128,
            cpu_milli=200,
            milli_per_gpu=500,
            termination_grace_s=2,
        )
        return Deployment(spec, request)

    def client(self, service: Service, **headers: str) -> httpx.Client:
        """A program that finds the gateway at its address and names the service as the host."""
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.gateway.port}",
            headers={"Host": f"svc-{service.public_id}.localhost:8000"} | headers,
            timeout=60,
        )

    def program(self, service: Service) -> httpx.Client:
        return self.client(service, Authorization=f"Bearer {self.token}")


@pytest.fixture
def cluster(own_stand: Testbed, owner: User) -> Iterator[Cluster]:
    with engine_harness() as harness:
        harness.mark_enrolled(harness.create_node(gpus=4), gpus=4)
        harness.start_worker()
        _, token = do_create_token(owner, name="calls", scopes=[Scope.SERVICES])
        project = factories.project("vision", member=owner)
        environment = factories.environment(runtime="process", tool=False)
        yield Cluster(own_stand, owner, project, environment, token)


def browser_of(user: User) -> Client:
    """A browser that is signed in to the portal."""
    client = Client()
    client.force_login(user)
    return client


def serve(version: str) -> tuple[str, ...]:
    return ("python3", "-c", SERVER, version)


def ready_replicas(service: Service, version: int | None = None) -> list[ServiceReplica]:
    rows = ServiceReplica.objects.filter(
        version__service=service, job__attempts__ready_at__isnull=False, ended_at=None, retiring_at=None
    )
    return list(rows.filter(version__number=version) if version else rows)


def status(service: Service, user: User) -> str:
    return service_status(get_service(user, service.public_id))[1]


@dataclass
class Load:
    """What concurrent programs got: versions that answered, and refusals with their time."""

    cluster: Cluster
    service: Service
    answers: Counter[str] = field(default_factory=Counter)
    refused: list[tuple[float, str]] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def running(self) -> Iterator[Load]:
        threads = [threading.Thread(target=self._send, args=(method,)) for method in ("GET", "POST") * 3]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            for thread in threads:
                thread.join(70)

    def _send(self, method: str) -> None:
        with self.cluster.program(self.service) as program:
            while not self._ended.is_set():
                try:
                    answer = program.request(
                        method, "/work", content=b"x" * 100 if method == "POST" else None
                    )
                    text = answer.text
                    if answer.status_code != 200:
                        self.refused.append((time.time(), f"{answer.status_code} {text[:200]}"))
                    else:
                        self.answers[text.split()[0]] += 1
                except httpx.HTTPError as error:
                    self.refused.append((time.time(), repr(error)))
                time.sleep(0.1)


@pytest.mark.django_db(transaction=True)
def test_a_service_replaces_a_killed_replica_is_updated_under_load_and_scales_to_zero(
    cluster: Cluster,
) -> None:
    owner = cluster.owner
    spec = ServiceSpec(replicas=2, readiness_path="/health", readiness_timeout_s=60, drain_s=4)
    service = cluster.deploy(spec, *serve("v1"))
    wait_for("two ready replicas", lambda: len(ready_replicas(service)) == 2, 60)
    wait_for("its state", lambda: status(service, owner) == "Running")
    assert held_milli() == 1000  # two halves of GPUs

    # a program with its token, which does not reach the replica
    with cluster.program(service) as program:
        texts = [program.get("/a?b=c").text for _ in range(10)]
    assert all(text.startswith("v1 ") and text.endswith("GET /a?b=c 0 None None") for text in texts)
    assert len({text.split()[1] for text in texts}) == 2  # both replicas answer

    # who sends it is what the gateway verified, whatever the caller claims
    forged = [(name, "root") for name in IDENTITY_HEADERS]
    with cluster.program(service) as program:
        seen = program.get("/headers", headers=[*forged, *forged, ("X-Own", "kept")]).json()
    claimed = {_folded(name) for name in IDENTITY_HEADERS}
    verified = dict.fromkeys(
        ("remote-user", "x-remote-user", "x-auth-request-user", "x-forwarded-user", "x-fairway-user"),
        owner.username,
    )
    verified["x-fairway-user-id"] = owner.public_id
    sent = [(name, value) for name, value in seen if _folded(name) in claimed]
    assert dict(sent) == verified and len(sent) == len(verified)
    assert ["x-own", "kept"] in seen

    # a browser with a ticket
    address, ticket = do_open_service(owner, service, sign_in(owner))
    assert address == f"http://svc-{service.public_id}.localhost:8000/.fairway/enter"
    with cluster.client(service, Accept="text/html") as browser:
        portal = {"Origin": "http://localhost:8000"}
        assert browser.get("/").status_code == 403
        entered = browser.post("/.fairway/enter", data={"ticket": ticket}, headers=portal)
        assert entered.status_code == 303
        cookie = {"Cookie": entered.headers["set-cookie"].partition(";")[0]}
        assert browser.get("/page", headers=cookie).text.endswith("GET /page 0 None None")
        password = base64.b64encode(f"ada:{cluster.token}".encode()).decode()
        for sent in (f"Token {cluster.token}", f"Bearer\t{cluster.token}", f"Basic {password}", "Basic eDp5"):
            seen = dict(browser.get("/headers", headers=cookie | {"Authorization": sent}).json())
            assert seen.get("authorization") == ("Basic eDp5" if sent == "Basic eDp5" else None)
        assert browser.post("/page", headers=cookie | {"Origin": "http://evil.example"}).status_code == 403
        assert browser.post("/.fairway/enter", data={"ticket": ticket}, headers=portal).status_code == 403

    load = Load(cluster, service)
    with load.running():
        victim = ready_replicas(service)[0]
        os.kill(int(next(t for t in texts if _is_of(victim, t)).split()[1]), signal.SIGKILL)
        wait_for("its end", lambda: ServiceReplica.objects.get(pk=victim.pk).ended_at is not None)
        removed_at = time.time() + 2.0  # the gateway keeps a decision for 1.5 s
        wait_for("its replacement", lambda: len(ready_replicas(service)) == 2, 60)
        time.sleep(2.5)
        assert [each for each in load.refused if each[0] > removed_at] == []

        load.refused.clear()
        do_update_service(owner, service, cluster.deployment(spec, *serve("v2")))
        least = [2]

        def is_updated() -> bool:
            least[0] = min(least[0], len(ready_replicas(service)))
            states = dict(service.versions.values_list("number", "state"))
            return states == {1: "REPLACED", 2: "ACTIVE"}

        wait_for("the update", is_updated, 90)
        assert least[0] == 2
        live = ServiceReplica.objects.filter(version__service=service, ended_at=None)
        wait_for("the end of version 1", lambda: not live.filter(version__number=1).exists(), 60)
        load.answers.clear()
        wait_for("answers", lambda: load.answers["v2"] > 100)
        assert load.answers["v1"] == 0 and load.refused == []

        # a version that does not become ready stops the update
        never = ServiceSpec(replicas=2, readiness_path="/health", readiness_timeout_s=5, drain_s=4)
        do_update_service(owner, service, cluster.deployment(never, "sleep", "600"))
        wait_for("the failure", lambda: service.versions.get(number=3).state == "FAILED", 60)
        service.refresh_from_db()
        assert service.message.startswith(
            "The update to version 3 stopped: It was not ready within 5 s on port 8000: GET /health was not answered"
        )
        assert len(ready_replicas(service, 2)) == 2
        assert load.refused == []
    wait_for("the count of requests", lambda: Service.objects.get(pk=service.pk).request_count > 100)

    # scale to zero, and back on a request
    do_change_service(owner, service, idle_timeout_s=60)
    Service.objects.filter(pk=service.pk).update(active_at=timezone.now() - dt.timedelta(seconds=90))
    wait_for("no replicas", lambda: held_milli() == 0, 60)
    assert status(service, owner) == "Scaled to zero"
    with cluster.client(service, Accept="text/html") as browser:
        page = browser.get("/", headers=cookie)
        if page.status_code != 200:  # it became ready within the wait
            assert page.status_code == 503 and page.headers["refresh"] == "5" and "is starting" in page.text
    with cluster.program(service) as program:
        assert program.get("/woken").text.startswith("v2 ")

    do_stop_service(owner, service)
    wait_for("its end", lambda: held_milli() == 0, 60)
    time.sleep(2.0)
    with cluster.program(service) as program:
        assert program.get("/").status_code == 410
    service.refresh_from_db()
    do_start_service(owner, service)
    with cluster.program(service) as program:
        assert wait_for("an answer", lambda: program.get("/").text.startswith("v2 "), 30)
    actions = set(AuditEntry.objects.filter(object_id=service.public_id).values_list("action", flat=True))
    assert actions == {f"service.{verb}" for verb in ("deploy", "open", "update", "change", "stop", "start")}


def _is_of(replica: ServiceReplica, text: str) -> bool:
    environ = open(f"/proc/{text.split()[1]}/environ", "rb").read()  # noqa: SIM115
    return f"FAIRWAY_JOB={replica.job.public_id}".encode() in environ


@pytest.mark.django_db(transaction=True)
def test_a_crash_loop_backs_off_and_gives_its_cause(cluster: Cluster) -> None:
    service = cluster.deploy(ServiceSpec(), "sh", "-c", "echo broken; exit 3")
    wait_for("three failures", lambda: Service.objects.get(pk=service.pk).failures >= 3, 90)
    service.refresh_from_db()
    assert "exit code 3" in service.message and "The next one starts in 20 s." in service.message
    assert status(service, cluster.owner) == "Failing"
    ended = list(ServiceReplica.objects.filter(ended_at__isnull=False).order_by("pk"))
    later = ServiceReplica.objects.filter(pk__gt=ended[1].pk).order_by("pk").first()
    assert later is not None
    assert (later.job.submitted_at - ended[1].ended_at).total_seconds() >= 10  # the back-off, not a duration
    with cluster.program(service) as program:
        program.timeout = 2
        with pytest.raises(httpx.ReadTimeout):
            program.get("/")
    # a good version replaces it, without waiting
    do_update_service(cluster.owner, service, cluster.deployment(ServiceSpec(), *serve("fixed")))
    with cluster.program(service) as program:
        assert program.get("/").text.startswith("fixed ")
    wait_for("no complaint", lambda: Service.objects.get(pk=service.pk).message == "")


@pytest.mark.django_db(transaction=True)
def test_only_members_use_a_service_until_it_is_opened_to_all(cluster: Cluster) -> None:
    service = cluster.deploy(ServiceSpec(), *serve("v1"))
    stranger = factories.user("eve")
    _, theirs = do_create_token(stranger, name="calls", scopes=[Scope.SERVICES])
    _, weak = do_create_token(cluster.owner, name="reads", scopes=[Scope.READ])
    with cluster.program(service) as program:
        assert program.get("/").status_code == 200
    with cluster.client(service) as other:

        def get(token: str) -> int:
            return other.get("/", headers={"Authorization": f"Bearer {token}"}).status_code

        assert get(theirs) == 401
        assert get(weak) == 401
        do_change_service(cluster.owner, service, access="signed_in")
        wait_for("access", lambda: get(theirs) == 200)
        assert get(weak) == 401
        do_change_service(cluster.owner, service, access="project")
        wait_for("no access", lambda: get(theirs) == 401)
    # a permission that ends is checked again at the next request
    with cluster.program(service) as program:
        Membership.objects.filter(user=cluster.owner).delete()
        wait_for("no access", lambda: program.get("/").status_code == 401)
    assert WorkspaceSession.objects.count() == 0


@pytest.mark.django_db(transaction=True)
def test_bad_services_are_refused_and_one_over_quota_waits(cluster: Cluster) -> None:
    for changes, name in (
        ({"replicas": 0}, "replicas"),
        ({"port": 0}, "port"),
        ({"readiness_path": "health"}, "readiness_path"),
        ({"drain_s": 1}, "drain_s"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            cluster.deploy(ServiceSpec(**changes), *serve("v1"))
        assert set(refused.value.fields) == {name}
    with pytest.raises(InvalidRequest) as refused:
        cluster.deploy(ServiceSpec())
    assert set(refused.value.fields) == {"command"}
    service = cluster.deploy(ServiceSpec(replicas=10), *serve("v1"))
    with pytest.raises(InvalidRequest) as refused:
        cluster.deploy(ServiceSpec(), *serve("v1"))
    assert refused.value.fields["name"].startswith("A service named answers already runs in this project.")
    # eight halves fit on four GPUs; the others wait with a verdict, and those that are ready serve
    wait_for("eight replicas", lambda: len(ready_replicas(service)) == 8, 90)
    waiting = Job.objects.filter(kind="service", state="PENDING", verdict__isnull=False)
    wait_for("two verdicts", lambda: waiting.count() == 2)
    with cluster.program(service) as program:
        assert program.get("/").status_code == 200
    do_stop_service(cluster.owner, service)
    with pytest.raises(Conflict):
        do_change_service(cluster.owner, service, replicas=2)
    again = cluster.deploy(ServiceSpec(), *serve("v2"))  # the name is free again
    with pytest.raises(InvalidRequest):
        do_start_service(cluster.owner, service)
    with cluster.program(again) as program:
        assert program.get("/").text.startswith("v2 ")


@pytest.mark.django_db(transaction=True)
def test_a_replica_that_stops_responding_gets_no_requests_and_is_replaced(cluster: Cluster) -> None:
    spec = ServiceSpec(replicas=2, readiness_path="/health", liveness_timeout_s=20, drain_s=3)
    service = cluster.deploy(spec, *serve("v1"))
    wait_for("two ready replicas", lambda: len(ready_replicas(service)) == 2, 60)
    page = browser_of(cluster.owner)
    with cluster.program(service) as program:
        victim = program.get("/hang").text.split()[1]
        unresponsive = Attempt.objects.filter(unresponsive_since__isnull=False)
        attempt = wait_for("its state", lambda: unresponsive.select_related("job").first(), 30)
        shown = page.get(f"/services/{service.public_id}/").content.decode()
        assert "Not responding" in shown and "1 of 2" in shown
        time.sleep(2.0)  # the gateway keeps a decision for 1.5 s
        texts = [program.get("/a").text for _ in range(10)]
        assert victim not in {text.split()[1] for text in texts}  # although it would answer this
        wait_for("its end", lambda: ServiceReplica.objects.get(job=attempt.job).ended_at is not None, 60)
        wait_for("its replacement", lambda: len(ready_replicas(service)) == 2, 60)
    attempt.refresh_from_db()
    assert attempt.reason == "readiness_timeout"
    assert attempt.message.startswith(
        "Its server stopped responding: GET /health was not answered with 2xx or 3xx on port 8000 for 20 s."
    )
    service.refresh_from_db()
    assert service.failures == 1  # it served for less than a minute, so the next one would wait
    kinds = attempt.job.events.values_list("kind", flat=True)
    assert {"ready", "unresponsive"} <= set(kinds)


@pytest.mark.django_db(transaction=True)
def test_a_socket_reaches_a_replica_through_the_origin_of_its_service(cluster: Cluster) -> None:
    service = cluster.deploy(ServiceSpec(readiness_path="/health"), *serve("v1"))
    wait_for("a ready replica", lambda: ready_replicas(service), 60)
    assert asyncio.run(echo(cluster, service, cluster.token)) == "echo hello"
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        asyncio.run(echo(cluster, service, "fw_none"))
    assert refused.value.status == 403


async def echo(cluster: Cluster, service: Service, token: str) -> str:
    """Send a text through a WebSocket to a service, and return the answer."""
    headers = {"Host": f"svc-{service.public_id}.localhost:8000", "Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession() as client,
        client.ws_connect(f"http://127.0.0.1:{cluster.gateway.port}/socket", headers=headers) as wire,
    ):
        await wire.send_str("hello")
        return str((await asyncio.wait_for(wire.receive(), 30)).data)


@pytest.mark.django_db(transaction=True)
def test_a_quota_that_admits_only_some_replicas_is_explained(cluster: Cluster) -> None:
    pool = NodePool.objects.get()
    Quota.objects.create(project=cluster.project, pool=pool, guaranteed_milli=0, limit_milli=1000)
    service = cluster.deploy(ServiceSpec(), *serve("v1"))
    wait_for("a ready replica", lambda: ready_replicas(service), 60)
    do_change_service(cluster.owner, service, replicas=3)  # of half a GPU each
    wait_for("the second one", lambda: len(ready_replicas(service)) == 2, 60)
    waiting = Job.objects.filter(kind="service", state="PENDING", verdict__isnull=False)
    job = wait_for("a verdict", waiting.select_related("verdict").first, 30)
    assert job.verdict.message == "Needs 0.5 of a GPU. vision uses 1 of its limit of 1."
    page = browser_of(cluster.owner)
    shown = html.unescape(page.get(f"/services/{service.public_id}/").content.decode())
    assert job.verdict.message in shown
    shown = page.get(f"/jobs/{job.public_id}/").content.decode()
    assert f'href="/services/{service.public_id}/"' in shown


@pytest.mark.django_db(transaction=True)
def test_a_port_in_use_is_reported_in_the_row_of_the_service(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        script = f"import socket; socket.create_server(('127.0.0.1', {port}))"
        service = cluster.deploy(ServiceSpec(), "python3", "-c", script)
        ended = ServiceReplica.objects.filter(
            ended_at__isnull=False, job__attempts__failure_rule="port_in_use"
        )
        wait_for("the failure", ended.exists, 60)
    page = browser_of(cluster.owner)
    shown = page.get(f"/services/{service.public_id}/?state=all").content.decode()
    assert "A port is in use. The command ended with exit code 1." in shown
