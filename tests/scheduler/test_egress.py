"""Where containers may connect, tried from inside of them: two nodes with real SSH and podman, and a third host."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pytest_django.live_server_helper import LiveServer

from portal.domain.states import JobState
from portal.models import Node, Project
from portal.selectors.experiments.experiments import list_job_runs
from portal.selectors.nodes.network_policy import denied_addresses
from portal.services.jobs.logs import log_path
from tests import factories
from tests.agents.test_container_walls import Listener, opens, wait_until_open
from tests.rig.cluster import RigCluster
from tests.rig.images import RigImage
from tests.tracking.conftest import tracking_server
from tests.two_rig_nodes import in_state, submit, two_rig_nodes, wait_until

__all__ = ["tracking_server"]
pytestmark = [pytest.mark.rig, pytest.mark.django_db(transaction=True)]

TRY = """
import json, os, socket
def reach(place):
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1.5).close()
    except OSError as error:
        return type(error).__name__
    return "open"
routes = [line.split() for line in open("/proc/net/route")][1:]
gateway = next(r[2] for r in routes if r[1] == "00000000")
gateway = ".".join(str(int(gateway[i:i + 2], 16)) for i in (6, 4, 2, 0))
found = {place: reach(place) for place in PLACES + [gateway + ":22"]}
found["ipv6"] = open("/proc/net/if_inet6").read() if os.path.exists("/proc/net/if_inet6") else ""
print(json.dumps(found))
"""
UNTIL_CLOSED = """
import socket, sys, time
standing = socket.create_connection((HOST, 8000), 5)
standing.settimeout(3)
for _ in range(600):
    time.sleep(0.2)
    try:
        socket.create_connection((HOST, 8000), 2).close()
    except OSError:
        break
else:
    sys.exit(3)
try:
    standing.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
    sys.exit(4 if standing.recv(10) else 0)
except OSError:
    sys.exit(0)
"""


@pytest.fixture
def dataset(
    request: pytest.FixtureRequest,
    make_rig,
    rig_cluster: RigCluster,
    tiny_image: RigImage,
    settings,
    tmp_path: Path,
) -> Iterator[dict[str, object]]:
    """Two nodes with the image; the second takes no work, and has an address that the portal does not know."""
    stores = [[tiny_image.store], [tiny_image.store]]
    rootless = getattr(request, "param", "rootful") == "rootless"
    made = two_rig_nodes(make_rig, rig_cluster, tiny_image, stores, settings, tmp_path, rootless=rootless)
    near, far = made["machines"]
    Node.objects.filter(name=far.name).update(state="cordoned")
    outside = far.address.rpartition(".")[0] + ".250"
    far.execute("ip", "address", "add", f"{outside}/32", "dev", "eth0")
    far.execute("sysctl", "-qw", "net.ipv4.ip_nonlocal_bind=0", check=False)
    near.execute("ip", "route", "add", f"{outside}/32", "via", far.address)
    with ExitStack() as stack:
        for port in (8000, 8001):
            words = ("python3", "-m", "http.server", str(port), "--bind", outside, "--directory", "/etc/ssh")
            server = subprocess.Popen(
                [*far.console(), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(server.wait)
            stack.callback(server.kill)
            wait_until_open(near, outside, port)
        yield made | {"outside": outside}


def places_of(dataset, portal_port: int) -> list[str]:
    near, far = dataset["machines"]
    return [
        f"{near.address}:22", f"{far.address}:22", f"{near.gateway}:{portal_port}",
        f"{dataset['outside']}:8000", f"{dataset['outside']}:8001",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "dataset", ["rootful", pytest.param("rootless", marks=pytest.mark.long)], indirect=True
)
def test_containers_reach_what_the_policy_of_their_project_allows_but_no_node_or_portal(
    dataset,
) -> None:
    near, outside, owner = dataset["machines"][0], dataset["outside"], dataset["owner"]
    listed = factories.project("listed", member=owner)
    closed = factories.project("closed", member=owner)
    below = factories.project("below", parent=closed, member=owner)
    Project.objects.filter(pk=listed.pk).update(
        policy={"egress": "listed"}, egress_allow=[f"{outside} 8000", f"{near.address} 22"]
    )
    Project.objects.filter(pk=closed.pk).update(policy={"egress": "none"}, egress_allow=[outside])
    with Listener(near.gateway, 0) as portal:
        places = places_of(dataset, portal.port)
        script = TRY.replace("PLACES", repr(places))
        jobs = {}
        for project in (dataset["project"], listed, closed, below):
            jobs[project.name] = submit(dataset | {"project": project}, "python3", "-c", script)
        for job in jobs.values():
            wait_until(dataset, in_state(job, JobState.COMPLETED), job)
        for place in places:  # each is there, and open to the node itself
            assert opens(near, *_split(place)), place
    seen = {
        name: json.loads(log_path(job.public_id, 1, 0, "k8s").read_text().rpartition(" F ")[2])
        for name, job in jobs.items()
    }
    reached = {name: [place for place in found if found[place] == "open"] for name, found in seen.items()}
    assert reached == {
        dataset["project"].name: [f"{outside}:8000", f"{outside}:8001"],
        "listed": [f"{outside}:8000"],  # a list opens no node
        "closed": [],
        "below": [],
    }
    assert all(found["ipv6"] == "" for found in seen.values())


def test_a_node_that_joins_is_closed_to_containers_that_run(dataset) -> None:
    outside = dataset["outside"]
    assert f"{outside}/32" not in denied_addresses()
    job = submit(dataset, "python3", "-c", UNTIL_CLOSED.replace("HOST", repr(outside)))
    wait_until(dataset, lambda: job.attempts.filter(state="RUNNING").exists(), job)
    Node.objects.create(
        name="joins", pool=dataset["nodes"][0].pool, host=outside, host_key="ssh-ed25519 AAAA"
    )
    wait_until(dataset, in_state(job, JobState.COMPLETED), job)


def _split(place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    return host, int(port)


LOG_A_RUN = """
import json, os, sys, urllib.request
def call(endpoint, **body):
    request = urllib.request.Request(
        os.environ["MLFLOW_TRACKING_URI"] + "/api/2.0/mlflow/" + endpoint,
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["MLFLOW_TRACKING_TOKEN"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request, timeout=20))
try:
    experiment = call("experiments/create", name=os.environ["FAIRWAY_JOB"])["experiment_id"]
except urllib.error.HTTPError as error:
    sys.exit(error.read().decode())
run = call("runs/create", experiment_id=experiment)["run"]["info"]["run_id"]
call("runs/log-metric", run_id=run, key="loss", value=0.25, timestamp=1, step=1)
call("runs/update", run_id=run, status="FINISHED")
"""


@pytest.mark.parametrize(
    "dataset", [pytest.param("rootful", marks=pytest.mark.long), "rootless"], indirect=True
)
def test_a_container_logs_metrics_to_the_portal_and_reaches_nothing_else_of_it(
    dataset, tracking_server: Path, monkeypatch: pytest.MonkeyPatch, settings
) -> None:
    near, owner = dataset["machines"][0], dataset["owner"]
    monkeypatch.setenv("FAIRWAY_TRACKING_SOCKET", str(tracking_server / "tracking.sock"))
    closed = factories.project("closed", member=owner)
    listed = factories.project("listed", member=owner)
    Project.objects.filter(pk=closed.pk).update(policy={"egress": "none"})
    Project.objects.filter(pk=listed.pk).update(policy={"egress": "listed"}, egress_allow=["tracking"])
    portal = LiveServer(near.gateway)
    try:
        settings.TRACKING_URL = portal.url
        settings.ALLOWED_HOSTS = [near.gateway]  # which denies this address to containers
        with Listener(near.gateway, 0) as other:
            api = portal.url.removeprefix("http://")
            places = [api, f"{near.gateway}:{other.port}", f"{near.address}:22"]
            script = TRY.replace("PLACES", repr(places))
            jobs = {
                "logs": submit(dataset, "python3", "-c", LOG_A_RUN + script),
                "listed": submit(dataset | {"project": listed}, "python3", "-c", LOG_A_RUN + script),
                "closed": submit(dataset | {"project": closed}, "python3", "-c", script),
                "elsewhere": submit(
                    dataset, "python3", "-c", script, env={"MLFLOW_TRACKING_URI": "http://192.0.2.1"}
                ),
            }
            for job in jobs.values():
                wait_until(dataset, lambda job=job: job.refresh_from_db() or job.ended_at, job)
    finally:
        portal.stop()
    for job in jobs.values():
        assert job.state == JobState.COMPLETED, log_path(job.public_id, 1, 0, "k8s").read_text()
    seen = {
        name: json.loads(log_path(job.public_id, 1, 0, "k8s").read_text().rpartition(" F ")[2])
        for name, job in jobs.items()
    }
    reached = {name: [place for place in found if found[place] == "open"] for name, found in seen.items()}
    assert reached == {"logs": [api], "listed": [api], "closed": [], "elsewhere": []}
    (run,) = list_job_runs(jobs["logs"])
    assert run.metrics == {"loss": 0.25}
