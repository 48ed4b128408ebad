"""Rootless podman on a real node: what its containers reach under which policy, and how their disk use is counted."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from agents.enrolment import EnrolmentOptions
from agents.link import AgentError, Link
from tests.agents.node.conftest import log_with, wait_for
from tests.agents.test_container_walls import Listener, opens, spec, wait_for_spare, wait_until_open
from tests.rig.cluster import RigCluster
from tests.rig.images import RigImage
from tests.rig.needs import missing_for_rig
from tests.rig.node import RigNode
from tests.rig.rig import Rig
from tests.rig.rootless import as_account, enrol_rootless, in_namespace, namespaces

pytestmark = pytest.mark.rig

CONNECT = """
import json, socket, time
from concurrent.futures import ThreadPoolExecutor
def connect(place):
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError as error:
        return type(error).__name__
    return "open"
with ThreadPoolExecutor(16) as pool:
    found = list(pool.map(connect, PLACES))
print("result", json.dumps([place for place, how in zip(PLACES, found) if how == "open"]), flush=True)
time.sleep(600)
"""
STANDING = """
import socket, time
standing = socket.create_connection(PLACE, 5)
standing.settimeout(3)
print("connected", flush=True)
while True:
    time.sleep(0.2)
    try:
        socket.create_connection(PLACE, 1).close()
    except OSError:
        break
try:
    standing.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
    print("result", "open" if standing.recv(1) else "ended", flush=True)
except OSError:
    print("result cut", flush=True)
time.sleep(600)
"""
NONE = {"mode": "none", "allow": []}


@dataclass
class Dataset:
    """A rootless node, an address that nobody denies, and places that no container may reach."""

    node: RigNode
    cluster: RigCluster
    image: str
    outside: str
    outside_port: int
    closed: list[str]  # each is open to the node itself, or to its user-mode network stack

    def start(self, link: Link, job: str, script: str, **more: Any) -> dict[str, Any]:
        words = {"command": ["python3", "-c", script], "gpus": [], "cpu_milli": None, **more}
        answer: dict[str, Any] = link.request(
            "start", timeout_s=60, epoch=1, spec=spec(link, job, self.image, **words)
        )
        return answer

    def reached(self, link: Link, job: str, places: list[str], **more: Any) -> list[str]:
        """Which of these places a container connects to as the first thing it does."""
        self.start(link, job, CONNECT.replace("PLACES", repr(places)), **more)
        found: list[str] = json.loads(result(link, job))
        return found

    def remove_all(self, link: Link) -> None:
        rows = link.request("list", timeout_s=30)["containers"]
        for job in {row["job"] for row in rows}:
            link.request("stop", timeout_s=30, epoch=1, job=job, attempt=1, grace_s=0)
            link.request("remove", timeout_s=30, epoch=1, job=job, attempt=1)
        assert as_account(self.node, "podman", "ps", "--all", "--quiet").stdout == ""


def result(link: Link, job: str) -> str:
    text = log_with(link, job, "result ", timeout_s=30)
    return text.partition("result ")[2].splitlines()[0]


@pytest.fixture(scope="module")
def dataset(rig_cluster: RigCluster, tiny_image: RigImage) -> Iterator[Dataset]:
    reason = missing_for_rig()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        rig = stack.enter_context(Rig(1))
        node = rig.nodes[0]
        network = node.address.rpartition(".")[0]
        outside, second = f"{network}.250", f"{network}.240"
        rig.add_address(outside)
        node.execute("ip", "address", "add", f"{second}/32", "dev", "eth0")
        # The stack carries DNS to the node's own resolver, so other ports there would be the node's loopback.
        node.execute("tee", "/etc/resolv.conf", text_in="nameserver 127.0.0.1\n")
        words = (*node.console(), "python3", "-m", "http.server", "53", "--bind", "127.0.0.1")
        resolver = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(resolver.wait)
        stack.callback(resolver.kill)
        portal_port = stack.enter_context(Listener(rig.portal_address, 0)).port
        server = ThreadingHTTPServer((outside, 0), SimpleHTTPRequestHandler)
        Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        enrol_rootless(
            rig_cluster,
            node,
            tiny_image,
            EnrolmentOptions("rootless", denied_networks=(rig.portal_address,)),
        )
        places = [f"{rig.portal_address}:{portal_port}", f"{node.address}:22", f"{second}:22"]
        for place in (*places, "127.0.0.1:53"):
            wait_until_open(node, place.rpartition(":")[0], int(place.rpartition(":")[2]))
        closed = [*places, "10.0.2.2:22", "10.0.2.3:22", "10.0.2.100:22"]
        yield Dataset(node, rig_cluster, tiny_image.name, outside, server.server_port, closed)


@pytest.fixture
def link(dataset: Dataset) -> Iterator[Link]:
    """A fresh agent; nothing of a test is left for the next one."""
    with dataset.cluster.open(dataset.node) as opened:
        yield opened
        dataset.remove_all(opened)


def test_containers_reach_what_the_policy_allows_but_not_the_node_or_the_portal(
    dataset: Dataset, link: Link
) -> None:
    assert link.hello.egress == {"podman": True}
    outside, dns = f"{dataset.outside}:{dataset.outside_port}", "10.0.2.3:53"
    places = [outside, dns, *dataset.closed]
    listed = [f"{dataset.outside} {dataset.outside_port}", f"{dataset.node.address} 22", "10.0.2.0/24"]
    reached = {
        "open": dataset.reached(link, "jopen", places),
        "listed": dataset.reached(link, "jlisted", places, egress={"mode": "listed", "allow": listed}),
        "dns": dataset.reached(link, "jdns", places, egress={"mode": "listed", "allow": ["dns"]}),
        "none": dataset.reached(link, "jnone", places, egress=NONE),
    }
    assert reached == {"open": [outside, dns], "listed": [outside], "dns": [dns], "none": []}


def test_a_port_is_reached_by_the_node_and_not_by_another_job(dataset: Dataset, link: Link) -> None:
    server = "from http.server import *; HTTPServer(('', 8888), SimpleHTTPRequestHandler).serve_forever()"
    published = dataset.start(link, "jserver", server, ports=[8888], egress=NONE)["ports"]["8888"]
    wait_until_open(dataset.node, "127.77.0.1", published)
    row = json.loads(as_account(dataset.node, "podman", "inspect", "fw-rig-jserver-1-0").stdout)[0]
    [network] = row["NetworkSettings"]["Networks"].values()
    own = [f"{network['IPAddress']}:8888", f"{network['Gateway']}:{published}", f"127.77.0.1:{published}"]
    connect = f"import socket; socket.create_connection(({network['IPAddress']!r}, 8888), 5)"
    in_namespace(dataset.node, "python3", "-c", connect)  # it is there, for the account itself
    assert dataset.reached(link, "jother", own) == []


def test_rules_are_set_in_a_recreated_namespace(dataset: Dataset, link: Link) -> None:
    """The namespace goes with its last container; here that happens between the creation of a task and its start."""
    dataset.start(link, "jlast", "import time; time.sleep(600)")
    command = ["python3", "-c", CONNECT.replace("PLACES", repr(dataset.closed))]
    later = spec(link, "jlater", dataset.image, command=command, gpus=[], cpu_milli=None, egress=NONE)
    link.request("prepare", timeout_s=60, epoch=1, spec=later)
    link.request("stop", timeout_s=30, epoch=1, job="jlast", attempt=1, grace_s=0)
    link.request("remove", timeout_s=30, epoch=1, job="jlast", attempt=1)
    deadline_s = time.monotonic() + 10
    while namespaces(dataset.node) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    if namespaces(dataset.node):
        pytest.skip("podman kept the namespace, so this test would show nothing")
    link.request("start", timeout_s=60, epoch=1, spec=later)
    assert json.loads(result(link, "jlater")) == []


def test_an_address_that_is_denied_later_is_closed_to_containers_that_run(
    dataset: Dataset, link: Link
) -> None:
    place = repr((dataset.outside, dataset.outside_port))
    dataset.start(link, "jstanding", STANDING.replace("PLACE", place))
    log_with(link, "jstanding", "connected", timeout_s=30)
    assert link.request("deny_egress", timeout_s=30, networks=[dataset.outside])["denied"] == 1
    try:
        assert result(link, "jstanding") == "cut"
    finally:
        link.request("deny_egress", timeout_s=30, networks=[])
    assert dataset.reached(link, "jafter", [f"{dataset.outside}:{dataset.outside_port}"]) != []


@pytest.mark.parametrize("flushed", ["the jump", "the rules"])
def test_removed_rules_are_restored_by_the_next_agent(dataset: Dataset, link: Link, flushed: str) -> None:
    def list_rules(*chain: str) -> list[str]:
        return in_namespace(dataset.node, "iptables", "-t", "mangle", "-S", *chain).splitlines()

    dataset.start(link, f"jruns{len(flushed)}", "import time; time.sleep(600)")
    before = list_rules()
    (own,) = (rule.split()[-1] for rule in list_rules("FORWARD") if "-j FAIRWAY-FORWARD-" in rule)
    in_namespace(dataset.node, "iptables", "-t", "mangle", "-F", "FORWARD" if flushed == "the jump" else own)
    assert list_rules() != before
    with dataset.cluster.open(dataset.node) as again:
        assert again.hello.egress == {"podman": True}
    assert sorted(list_rules()) == sorted(before)


@pytest.mark.parametrize("had_rules", [False, True], ids=["never had rules", "had rules once"])
def test_a_node_where_rules_cannot_be_set_reports_it(dataset: Dataset, link: Link, had_rules: bool) -> None:
    dataset.remove_all(link)
    program = "/etc/alternatives/iptables-restore"
    state = "/var/lib/fairway-node/state/firewall.applied"
    dataset.node.execute("mv", program, f"{program}.hidden")
    try:
        in_namespace(dataset.node, "iptables", "-t", "mangle", "-F")
        if not had_rules:
            dataset.node.execute("rm", "--force", state)
        with dataset.cluster.open(dataset.node) as lacking:
            assert lacking.hello.egress == {"podman": False}
            checks = {row["name"]: row for row in lacking.request("preflight", timeout_s=60)["checks"]}
            assert not checks["firewall"]["ok"]
            assert "iptables-restore" in checks["firewall"]["message"]
            with pytest.raises(AgentError) as refused:
                dataset.reached(lacking, f"jclosed{had_rules:d}", dataset.closed, egress=NONE)
            outside = [f"{dataset.outside}:{dataset.outside_port}"]
            if had_rules:
                assert refused.value.code == "engine_error"
                with pytest.raises(AgentError, match="The network rules for containers cannot be set"):
                    dataset.reached(lacking, "jrefused", outside)
            else:
                assert refused.value.code == "invalid_spec"
                assert lacking.request("deny_egress", timeout_s=30, networks=[])["denied"] == 0
                assert dataset.reached(lacking, "junheld", outside) == outside
            dataset.remove_all(lacking)
    finally:
        dataset.node.execute("mv", f"{program}.hidden", program)
    with dataset.cluster.open(dataset.node) as mended:
        assert mended.hello.egress == {"podman": True}


def bridges(dataset: Dataset) -> set[str]:
    """The interfaces of job networks in podman's namespace."""
    shown = json.loads(in_namespace(dataset.node, "ip", "-json", "link", "show"))
    return {row["ifname"] for row in shown if row["ifname"].startswith("cni-")}


def own_bridge(dataset: Dataset, job: str) -> str:
    row = json.loads(as_account(dataset.node, "podman", "inspect", f"fw-rig-{job}-1-0").stdout)[0]
    [network] = row["NetworkSettings"]["Networks"]
    facts = json.loads(as_account(dataset.node, "podman", "network", "inspect", network).stdout)[0]
    return str(facts["network_interface"])


def end_job(link: Link, job: str) -> None:
    link.request("stop", timeout_s=30, epoch=1, job=job, attempt=1, grace_s=0)
    link.request("remove", timeout_s=30, epoch=1, job=job, attempt=1)


@pytest.mark.parametrize("jobs", [4, pytest.param(200, marks=pytest.mark.long)])
def test_short_jobs_start_beside_long_ones(dataset: Dataset, link: Link, jobs: int) -> None:
    """Each has a network made ahead, whose addresses are not those of the job before."""
    lasting = ["jlonga", "jlongb"]
    for job in lasting:
        dataset.start(link, job, "import time; time.sleep(3600)")
    for number in range(jobs):
        wait_for_spare(dataset.node)
        job = "jshort" + "".join(chr(97 + int(digit)) for digit in f"{number:03}")
        assert dataset.start(link, job, "pass")["state"] == "running"
        end_job(link, job)
    assert bridges(dataset) == {own_bridge(dataset, job) for job in lasting}


def test_bridges_that_others_left_are_removed(dataset: Dataset, link: Link) -> None:
    dataset.start(link, "jstays", "import time; time.sleep(600)")
    assert bridges(dataset) == {own_bridge(dataset, "jstays")}
    left = json.loads(
        as_account(dataset.node, "podman", "network", "inspect", wait_for_spare(dataset.node)).stdout
    )
    names = [left[0]["network_interface"], "cni-podman77"]  # of the next job's network, and of none
    for name, address in zip(names, ("10.199.0.1/26", "10.199.1.1/26"), strict=True):
        in_namespace(dataset.node, "ip", "link", "add", name, "type", "bridge")
        in_namespace(dataset.node, "ip", "address", "add", address, "dev", name)
    assert dataset.start(link, "jnext", "import time; time.sleep(600)")["state"] == "running"
    assert bridges(dataset) == {own_bridge(dataset, job) for job in ("jstays", "jnext")}
    in_namespace(dataset.node, "ip", "link", "add", "cni-podman77", "type", "bridge")
    with dataset.cluster.open(dataset.node) as again:
        again.request("gc", timeout_s=60)
    assert bridges(dataset) == {own_bridge(dataset, job) for job in ("jstays", "jnext")}


def test_disk_use_of_a_container_is_counted_and_limited(dataset: Dataset, link: Link) -> None:
    fill = (  # into a folder that only root may look into afterwards
        "import os, time; os.mkdir('/var/tmp/d'); open('/var/tmp/d/f', 'wb').write(os.urandom({mib} << 20)); "
        "os.chmod('/var/tmp/d', 0); time.sleep(600)"
    )
    hold = (
        "import os, time; f = open('/var/tmp/f', 'wb'); os.unlink('/var/tmp/f'); "
        "f.write(os.urandom(40 << 20)); f.flush(); time.sleep(600)"
    )
    dataset.start(link, "jbelow", fill.format(mib=8), disk_mib=24)
    dataset.start(link, "jabove", fill.format(mib=40), disk_mib=24)
    dataset.start(link, "jheld", hold, disk_mib=24)
    ended = [wait_for(link, "exited", 45) for _ in range(2)]
    assert {event["job"] for event in ended} == {"jabove", "jheld"}
    for event in ended:
        assert (event["fault"], event["disk_mib"]) == ("disk_limit_exceeded", 24)
        assert 24 < event["disk_used_mib"] <= 42
    rows = {row["job"]: row for row in link.request("list", timeout_s=30)["containers"]}
    assert rows["jbelow"]["state"] == "running"


def test_a_container_reaches_a_denied_address_where_no_rules_apply(dataset: Dataset, link: Link) -> None:
    """What the tests above deny is there: without the rules, a container connects to it."""
    dataset.start(link, "jkeeps", "import time; time.sleep(600)")
    assert opens(dataset.node, dataset.node.address, 22)
    script = CONNECT.replace("PLACES", repr(dataset.closed)).replace("print", "time.sleep(2); print", 1)
    dataset.start(link, "jbare", "import time; time.sleep(1)\n" + script)
    in_namespace(dataset.node, "iptables", "-t", "mangle", "-F", "FORWARD")
    in_namespace(dataset.node, "iptables", "-t", "mangle", "-F", "INPUT")
    assert set(json.loads(result(link, "jbare"))) >= set(dataset.closed[:3])
