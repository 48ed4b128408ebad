"""The agent with real docker on a node over SSH: one task from its start to its end, limits, logs, what survives."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from agents.enrolment import EnrolmentOptions
from agents.link import AgentError, Link
from agents.node.runtimes import arguments
from portal.selectors.jobs.logs.files import TIMESTAMP_PREFIX
from tests.agents.node.conftest import wait_for
from tests.agents.node.loadable import load
from tests.agents.ranks import MEETS
from tests.rig.cluster import RigCluster
from tests.rig.docker import docker, start_docker
from tests.rig.images import RigImage
from tests.rig.node import RigNode
from tests.rig.rig import Rig

pytestmark = [pytest.mark.rig, pytest.mark.docker]

LOG_MIB = 1
PATIENT = "trap 'echo leaving; sleep 1; exit 3' TERM; echo ready; while :; do sleep 0.1; done"


@pytest.fixture(scope="module")
def node(rig_cluster: RigCluster, tiny_image: RigImage) -> Iterator[RigNode]:
    """A node whose only engine is docker."""
    with Rig(1) as rig:
        made = rig.nodes[0]
        start_docker(made, tiny_image)
        made.set_local(max_log_mib=LOG_MIB)
        rig_cluster.enrol(made, EnrolmentOptions(runtime="docker"))
        yield made


@pytest.fixture
def link(rig_cluster: RigCluster, node: RigNode) -> Iterator[Link]:
    opened = rig_cluster.open(node)
    yield opened
    opened.close()


@pytest.fixture
def start(link: Link, tiny_image: RigImage) -> Any:
    def started(job: str, *command: str, **more: Any) -> dict[str, Any]:
        return link.request("start", timeout_s=60, epoch=1, spec=spec_of(job, tiny_image, command, **more))

    return started


def spec_of(job: str, image: RigImage, command: Sequence[str], **more: Any) -> dict[str, Any]:
    return {
        "cluster": "rig", "job": job, "attempt": 1, "task": 0, "digest": "d1", "runtime": "docker",
        "image": image.name, "command": list(command), "uid": 20001, "gid": 20001, "user": "ada",
        "memory_mib": 64, "pids": 64, **more,
    }  # fmt: skip


def log_of(link: Link, job: str, offset: int = 0) -> bytes:
    answer = link.request("logs", timeout_s=20, job=job, attempt=1, task=0, offset=offset)
    assert answer["format"] == "k8s"
    return base64.b64decode(answer["data_b64"])


def lines_of(link: Link, job: str) -> list[tuple[str, str]]:
    """Stream and text of each line, as the portal reads them."""
    found = [(line, TIMESTAMP_PREFIX.match(line)) for line in log_of(link, job).splitlines()]
    return [(m[2].decode(), line[m.end() :].decode()) for line, m in found if m]


def wait_for_line(link: Link, job: str, text: str) -> None:
    deadline_s = time.monotonic() + 20
    while text not in [line for _, line in lines_of(link, job)]:
        assert time.monotonic() < deadline_s, lines_of(link, job)
        time.sleep(0.05)


def test_a_task_from_its_start_to_its_end(node: RigNode, link: Link, start: Any) -> None:
    said = """import os, sys
print("hello", os.environ["MODE"], os.getuid(), flush=True)
print("no", file=sys.stderr)
sys.exit(7)"""
    started = start("jwhole", "python3", "-c", said, env={"MODE": " of\n'mine'"}, owner="ada", project="lab")
    assert started["state"] == "running"
    ended = wait_for(link, "exited", timeout_s=30, job="jwhole")
    assert (ended["exit_code"], ended["oom"]) == (7, False)
    assert ended["started_s"] <= ended["ended_s"] <= time.time() + 1
    assert sorted(lines_of(link, "jwhole")) == [
        ("stderr", "no"),
        ("stdout", "'mine' 20001"),
        ("stdout", "hello  of"),
    ]
    [row] = [row for row in link.request("list", timeout_s=20)["containers"] if row["job"] == "jwhole"]
    assert (row["state"], row["owner"], row["project"]) == ("exited", "ada", "lab")
    link.request("remove", timeout_s=30, epoch=1, job="jwhole", attempt=1)
    assert docker(node, "ps", "--all", "--quiet") == ""
    assert "fw-rig-jwhole" not in docker(node, "network", "ls", "--format", "{{.Name}}")


@pytest.mark.parametrize("on_node", [False, True])
def test_ranks_of_a_gang_meet(link: Link, start: Any, on_node: bool) -> None:
    """In the network of their job, or on the network of the node, where its interface is."""
    job, port = f"jgang{int(on_node)}", 32_100
    interface = next(each for each in link.hello.interfaces if each.chosen)
    address = interface.address if on_node else "{rank0_address}"
    for rank in (0, 1):
        env = {"RANK": str(rank), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        reported: dict[str, Any] = {"host_network": True} if on_node else {"local_rendezvous": True}
        start(job, "python3", "-c", MEETS, env=env, task=rank, **reported)
    wait_for_line(link, job, "heard one")


@pytest.mark.long
def test_ranks_meet_on_a_network_that_people_made(
    rig_cluster: RigCluster, node: RigNode, tiny_image: RigImage
) -> None:
    subnet = ("--subnet", "10.9.0.0/16", "--ip-range", "10.9.1.0/24", "--opt", "parent=eth0")
    docker(node, "network", "create", "--driver", "macvlan", *subnet, "fabric0")
    with rig_cluster.open(node) as link:
        reported = next(each for each in link.hello.networks["docker"] if each["name"] == "fabric0")
        assert (reported["driver"], reported["subnets"][0]["range"]) == (
            "macvlan",
            ["10.9.1.0", "10.9.1.255"],
        )
        plain = {
            "cluster": "rig", "job": "jmacvlan", "attempt": 1, "digest": "d1", "runtime": "docker",
            "image": tiny_image.name, "command": ["python3", "-c", MEETS], "uid": 20001, "gid": 20001,
            "user": "ada", "memory_mib": 64, "pids": 64, "network": "fabric0",
        }  # fmt: skip
        for rank, more in enumerate(({"address": "10.9.1.254"}, {})):
            env = {"RANK": str(rank), "MASTER_ADDR": "10.9.1.254", "MASTER_PORT": "32100"}
            spec = {**plain, "task": rank, "env": env, **more}
            link.request("start", timeout_s=60, epoch=1, spec=spec)
        wait_for_line(link, "jmacvlan", "heard one")
        with pytest.raises(AgentError, match="no network fabric7 of docker"):
            link.request(
                "start", timeout_s=60, epoch=1, spec=plain | {"job": "jnone", "task": 0, "network": "fabric7"}
            )
        link.request("stop", timeout_s=30, epoch=1, job="jmacvlan", attempt=1, grace_s=0)
    assert "fabric0" in docker(node, "network", "ls", "--format", "{{.Name}}").split()


def test_names_and_labels(node: RigNode, start: Any, link: Link) -> None:
    name = start("jnamed", "sleep", "600", ports=[8888])["container"]
    facts = json.loads(docker(node, "container", "inspect", name))[0]
    labels = {key: value for key, value in facts["Config"]["Labels"].items() if key.startswith("fairway.")}
    assert name == "fw-rig-jnamed-1-0"
    assert labels == {
        "fairway.cluster": "rig", "fairway.job": "jnamed", "fairway.attempt": "1", "fairway.task": "0",
        "fairway.digest": "d1",
    }  # fmt: skip
    assert facts["HostConfig"]["RestartPolicy"]["Name"] == "no"
    assert facts["HostConfig"]["PortBindings"]["8888/tcp"][0]["HostIp"] == "127.77.0.1"
    assert link.request("stop", timeout_s=30, epoch=1, job="jnamed", attempt=1, grace_s=0)["gone"] is True


def test_a_stop_grants_the_grace_period_and_a_kill_does_not(link: Link, start: Any) -> None:
    start("jpatient", "sh", "-c", PATIENT)
    wait_for_line(link, "jpatient", "ready")
    assert (
        link.request("stop", timeout_s=30, epoch=1, job="jpatient", attempt=1, grace_s=30)["stopping"] is True
    )
    assert wait_for(link, "exited", timeout_s=30, job="jpatient")["exit_code"] == 3
    assert ("stdout", "leaving") in lines_of(link, "jpatient")
    start("jkilled", "sh", "-c", PATIENT)
    wait_for_line(link, "jkilled", "ready")
    assert link.request("stop", timeout_s=30, epoch=1, job="jkilled", attempt=1, grace_s=0)["gone"] is True
    assert wait_for(link, "exited", timeout_s=30, job="jkilled")["exit_code"] == 137
    with pytest.raises(AgentError) as caught:
        start("jkilled", "true")
    assert caught.value.code == "tombstoned"


def test_out_of_memory_is_reported(link: Link, start: Any) -> None:
    start("joom", "python3", "-c", "import time; time.sleep(1); x = bytearray(300 << 20)")
    ended = wait_for(link, "exited", timeout_s=30, job="joom")
    assert (ended["oom"], ended["exit_code"]) == (True, 137)
    assert 0 < ended["peak_memory_mib"] <= 64


def test_a_task_survives_its_agent(node: RigNode, rig_cluster: RigCluster, link: Link, start: Any) -> None:
    started = start("jlong", "sh", "-c", PATIENT)
    assert started["already"] is False
    pids = node.execute("pgrep", "-f", "agent.*control").stdout.split()
    node.execute("kill", "-KILL", *pids)
    with rig_cluster.open(node) as again:
        rows = {row["job"]: row["state"] for row in again.request("list", timeout_s=20)["containers"]}
        assert rows["jlong"] == "running"
        wait_for_line(again, "jlong", "ready")
        assert again.request("stop", timeout_s=30, epoch=1, job="jlong", attempt=1, grace_s=0)["gone"] is True
        assert docker(node, "ps", "--quiet") == ""


def test_use_is_measured(rig_cluster: RigCluster, node: RigNode, link: Link, start: Any) -> None:
    start("jbusy", "python3", "-c", "x = bytearray(20 << 20)\nwhile True: pass", cpu_milli=500)
    with rig_cluster.open(node, "watch") as watch:
        watch.request("stats", timeout_s=20)
        deadline_s = time.monotonic() + 20
        while True:
            sample = wait_for(watch, "sample")
            [seen] = [each for each in sample["tasks"] if each["job"] == "jbusy"]
            if (seen["memory_mib"] or 0) >= 20 and seen["cpu_percent"]:
                break
            assert time.monotonic() < deadline_s, seen
    assert seen["cpu_percent"] < 80
    link.request("stop", timeout_s=30, epoch=1, job="jbusy", attempt=1, grace_s=0)


def test_a_log_survives_rotation_by_docker_and_ends_at_its_size(
    node: RigNode, link: Link, start: Any
) -> None:
    noise = """import time
for n in range(12000):
    print(f"{n:0127}", flush=True)
    if n % 2000 == 0: time.sleep(1.2)  # the agent looks each second; a file of docker's holds 2,500 lines
print("still here", flush=True)
time.sleep(600)"""
    name = start("jloud", "python3", "-c", noise)["container"]
    path = docker(node, "inspect", "--format", "{{.LogPath}}", name).strip()
    deadline_s = time.monotonic() + 40
    while not (last := log_of(link, "jloud", (LOG_MIB << 20) - 1000)).endswith(
        b"further output is discarded.\n"
    ):
        assert time.monotonic() < deadline_s, last[-300:]
        time.sleep(0.2)
    assert node.execute("ls", path + ".1").returncode == 0  # docker did turn its files
    log = b"".join(log_of(link, "jloud", offset) for offset in range(0, LOG_MIB << 20, 262_144))
    numbers = [int(line.split()[-1]) for line in log.splitlines()[:-1]]
    assert numbers == list(range(len(numbers))) and len(numbers) > 5000
    link.request("stop", timeout_s=30, epoch=1, job="jloud", attempt=1, grace_s=0)
    assert b"".join(log_of(link, "jloud", offset) for offset in range(0, LOG_MIB << 20, 262_144)) == log


def test_the_terminal_command_opens_a_shell_and_prints_its_pid(node: RigNode, link: Link, start: Any) -> None:
    start("jshell", "sleep", "600")
    engine = arguments.EngineOptions("docker", "127.77.0.1", False, (), LOG_MIB)
    words = ["docker", *arguments.shell(engine, "fw-rig-jshell-1-0", terminal=True)]
    spawn = "import json, pty, sys; pty.spawn(json.loads(sys.argv[1]))"
    typed = "id -u; echo $((40+2)); exit\n"
    said = node.execute("python3", "-c", spawn, json.dumps(words), text_in=typed).stdout
    assert re.search(r"\x1e\d+\x1e", said) and "20001" in said and "42" in said, said
    link.request("stop", timeout_s=30, epoch=1, job="jshell", attempt=1, grace_s=0)


def test_a_running_task_is_saved_with_the_settings_of_its_image(
    node: RigNode, link: Link, start: Any, tiny_image: RigImage
) -> None:
    base = json.loads(docker(node, "image", "inspect", tiny_image.name))[0]["Config"]
    hidden = {"TOKEN": "in-a-variable", "PATH": "/usr/local/bin:/usr/bin:/bin:/extra"}
    program = "touch /tmp/installed; echo ready; sleep 600 # in-the-command"
    start("jsaved", "sh", "-c", program, env=hidden, secret_files={"token": "in-a-secret"})
    wait_for_line(link, "jsaved", "ready")
    asked = {"job": "jsaved", "attempt": 1, "image": "localhost/fairway-saved/x:latest", "max_mib": 100}
    saved = link.request("save_image", timeout_s=60, **asked)["image"]
    facts = docker(node, "image", "inspect", asked["image"])
    config = json.loads(facts)[0]["Config"]
    variables = dict(each.split("=", 1) for each in config["Env"])
    assert "TOKEN" not in variables and f"PATH={variables['PATH']}" in base["Env"]
    assert (config["Entrypoint"], config.get("Labels") or {}) == (["/bin/sh"], {})
    assert not [word for word in ("in-a-", "in-the-") if word in facts]
    docker(node, "save", "--output", "/tmp/saved.tar", asked["image"])
    assert node.execute("grep", "-c", "-a", "in-a-", "/tmp/saved.tar", check=False).stdout.strip() == "0"
    new = spec_of("jnew", tiny_image, ["ls", "/tmp/installed"]) | {"image": saved["image_id"]}
    link.request("start", timeout_s=60, epoch=1, spec=new)
    wait_for_line(link, "jnew", "/tmp/installed")
    link.request("stop", timeout_s=30, epoch=1, job="jsaved", attempt=1, grace_s=0)


@pytest.mark.long
def test_only_unused_images_are_removed(link: Link, start: Any, node: RigNode, tiny_image: RigImage) -> None:
    rows = {word: load(link, f"reg.example/{word}:1") for word in ("used", "idle", "twice")}
    docker(node, "tag", "reg.example/twice:1", "reg.example/again:2")
    more = {"image": rows["used"]["image_id"]}
    link.request("prepare", timeout_s=60, epoch=1, spec=spec_of("dused", tiny_image, ("/none",)) | more)
    everything = {"high_threshold_percent": 0, "low_threshold_percent": 0, "min_age_s": 0, "protected": []}
    gone = link.request("gc", timeout_s=60, images=everything)["images"]
    names = sorted(name for row in gone for name in row["names"])
    assert names == ["reg.example/again:2", "reg.example/idle:1", "reg.example/twice:1"]
    left = docker(node, "images", "--format", "{{.Repository}}:{{.Tag}}").split()
    assert left.count("reg.example/used:1") == 1 and tiny_image.name in left and len(left) == 2
    assert link.request("stop", timeout_s=30, epoch=1, job="dused", attempt=1, grace_s=0)["gone"]
    (row,) = link.request("gc", timeout_s=60, images=everything)["images"]
    assert row["names"] == ["reg.example/used:1"]
    assert start("dlast", "true")["state"] == "running", "what others brought is there"
