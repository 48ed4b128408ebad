"""The walls of a container, seen from inside: nineteen assertions about one job beside another on a node."""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agents.enrolment import EnrolmentOptions
from agents.link import Link
from tests.rig.cluster import RigCluster
from tests.rig.docker import start_docker
from tests.rig.images import RigImage
from tests.rig.needs import missing_for_rig
from tests.rig.node import RigNode
from tests.rig.records import machine_lock
from tests.rig.rig import Rig
from tests.rig.rootless import as_account, enrol_rootless, in_namespace

pytestmark = pytest.mark.rig

PROBE = Path(__file__).parents[1] / "rig/isolation_probe.py"
METADATA = "169.254.169.254"
MEMORY_MIB, SHM_MIB, PIDS, CPU_MILLI = 192, 48, 40, 700
SECRET = "walls-have-ears"
OTHER_SECRET = "the-neighbours-secret"
NEIGHBOUR, PROBED = "neighbourjb", "probedjobaa"
STANDARD_DEVICES = {"null", "zero", "full", "random", "urandom", "tty", "console", "ptmx"}
ENGINE_FILES = {"/etc/resolv.conf", "/etc/hostname", "/run/.containerenv"}
AGENT_PATHS = (
    "/etc/fairway",
    "/var/lib/fairway-node",
    "/usr/local/lib/fairway",
    "/run/podman",
    "/run/containers",
)
NETWORK_SIZE = 64  # addresses of a job's network; the next job's is the next one
PARENTS = {"podman": "libpod_parent/libpod-", "docker": "docker/"}
# The file of each limit, in cgroup v1 and v2.
CGROUP_FILES = {
    "pids": ("pids/pids.max", "pids.max"),
    "memory": ("memory/memory.limit_in_bytes", "memory.max"),
    "swap": ("memory/memory.memsw.limit_in_bytes", "memory.swap.max"),
    "cpu": ("cpu/cpu.cfs_quota_us", "cpu.max"),
}


@dataclass(frozen=True)
class Walls:
    """What the probe saw, and what the node knows about it."""

    report: dict[str, Any]
    node: RigNode
    container: dict[str, Any]
    engine: str
    rootless: bool
    node_namespaces: dict[str, str]
    reachable_from_node: dict[str, bool]
    cgroup_v2: bool


def spec(link: Link, job: str, image: str, **more: Any) -> dict[str, Any]:
    runtime, _ = link.hello.runtimes[0]
    return {
        "cluster": "rig", "job": job, "attempt": 1, "task": 0, "digest": "d1", "runtime": runtime, "image": image,
        "uid": 20001, "gid": 20001, "user": "ada", "cpu_milli": CPU_MILLI, "memory_mib": MEMORY_MIB,
        "shm_mib": SHM_MIB, "pids": PIDS, "env": {}, "gpus": [{"uuid": link.hello.gpus[0].uuid, "milli": 1000}],
        **more,
    }  # fmt: skip


@pytest.fixture(
    scope="module",
    params=["podman", "rootless", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.long])],
)
def walls(request: pytest.FixtureRequest, rig_cluster: RigCluster, tiny_image: RigImage) -> Iterator[Walls]:
    """Two jobs of two people on one node; the second looks around."""
    reason = missing_for_rig()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        rig = stack.enter_context(Rig(1, image_stores=[tiny_image.store]))
        node = rig.nodes[0]
        stack.enter_context(machine_lock("metadata"))  # the address is this machine's, and another run's too
        rig.add_address(METADATA)
        control_port = stack.enter_context(Listener(rig.portal_address, 0)).port
        # Not port 80, which another process of this machine may hold.
        metadata_port = stack.enter_context(Listener(METADATA, 0)).port
        if request.param == "docker":
            start_docker(node, tiny_image)
        denied = (rig.portal_address,)
        if request.param == "rootless":
            enrol_rootless(
                rig_cluster, node, tiny_image, EnrolmentOptions("rootless", denied_networks=denied)
            )
        else:
            choices = EnrolmentOptions("rootful", runtime=request.param, denied_networks=denied)
            rig_cluster.enrol(node, choices)
        link = stack.enter_context(rig_cluster.open(node))
        ports = ControlPorts(metadata_port, control_port)
        yield look_around(rig, node, link, tiny_image.name, ports, request.param == "rootless")


class ControlPorts(NamedTuple):
    """Ports outside the node that listen during the test."""

    metadata: int
    portal: int


def look_around(
    rig: Rig, node: RigNode, link: Link, image: str, ports: ControlPorts, rootless: bool
) -> Walls:
    neighbour = spec(
        link, NEIGHBOUR, image, uid=20002, gid=20002, user="eve", ports=[8888],
        secret_files={"token": OTHER_SECRET}, gpus=[{"uuid": link.hello.gpus[1].uuid, "milli": 1000}],
        command=["python3", "-m", "http.server", "8888", "--bind", "0.0.0.0"],
    )  # fmt: skip
    published = link.request("start", timeout_s=30, epoch=1, spec=neighbour)["ports"]["8888"]
    engine = str(neighbour["runtime"])

    def ask_engine(*words: str) -> Any:
        shown = as_account(node, engine, *words) if rootless else node.execute(engine, *words)
        return json.loads(shown.stdout)[0]

    facts = ask_engine("container", "inspect", f"fw-rig-{NEIGHBOUR}-1-0")
    [network] = facts["NetworkSettings"]["Networks"].values()
    job_places = [(network["IPAddress"], 8888), ("127.77.0.1", published), (network["Gateway"], published)]
    control_places = [
        (METADATA, ports.metadata),
        (rig.portal_address, ports.portal),
        (node.address, node.port),
    ]
    # The neighbour made its network itself; with podman the one that the other will have stands ready.
    if engine == "podman":
        network_name = wait_for_spare(node)
        own_gateway = ask_engine("network", "inspect", network_name)["subnets"][0]["gateway"]
    else:
        network_name = f"fw-rig-{PROBED}"
        own_gateway = str(ipaddress.ip_address(network["Gateway"]) + NETWORK_SIZE)
    connects = [*job_places, *control_places, (own_gateway, published), (own_gateway, node.port)]
    cgroup_v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    files = {name: f"/sys/fs/cgroup/{paths[cgroup_v2]}" for name, paths in CGROUP_FILES.items()}
    sshd_pid = int(node.execute("cat", "/run/sshd.pid").stdout)
    asked = {
        "pids": PIDS, "cgroup_files": files, "pids_file": files["pids"], "agent_paths": AGENT_PATHS,
        "outside_pids": [sshd_pid, facts["State"]["Pid"], 4_000_000], "connects": connects,
    }  # fmt: skip
    for address, port in job_places[:2]:  # docker opens the second before anybody listens on the first
        wait_until_open(node, address, port, rootless and port == 8888)
    reachable = {
        f"{address}:{port}": opens(node, address, port, rootless and port == 8888)
        for address, port in connects
    }
    probed = spec(
        link, PROBED, image, command=["python3", "-c", PROBE.read_text()], secret_files={"token": SECRET},
        env={"PROBE": json.dumps(asked)}, mounts=[{"kind": "home", "source": "ada", "target": "/home/ada"}],
    )  # fmt: skip
    link.request("start", timeout_s=30, epoch=1, spec=probed)
    report = wait_for_report(node, link)
    container = ask_engine("container", "inspect", f"fw-rig-{PROBED}-1-0")
    assert list(container["NetworkSettings"]["Networks"]) == [network_name]
    assert list(facts["NetworkSettings"]["Networks"]) == [f"fw-rig-{NEIGHBOUR}"]
    assert container["NetworkSettings"]["Networks"][network_name]["Gateway"] == own_gateway
    namespaces = {
        name: node.execute("readlink", f"/proc/1/ns/{name}").stdout.strip() for name in report["namespaces"]
    }
    return Walls(report, node, container, engine, rootless, namespaces, reachable, cgroup_v2)


class Listener:
    """A server on an address of this machine that answers whoever reaches it."""

    def __init__(self, address: str, port: int) -> None:
        self._server = socket.create_server((address, port))
        self.port = int(self._server.getsockname()[1])
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Listener:
        self._thread.submit(self._serve)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.shutdown()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"reached\n")


def opens(node: RigNode, address: str, port: int, from_namespace: bool = False) -> bool:
    """Says whether the node itself can connect, which shows that the place is there.

    ``from_namespace``: out of the network namespace to which rootless podman connects the networks of jobs.
    """
    code = f"import socket; socket.create_connection(({address!r}, {port}), timeout=1); print('open')"
    if from_namespace:
        return in_namespace(node, "python3", "-c", code, check=False) == "open\n"
    return node.execute("python3", "-c", code, check=False).returncode == 0


def wait_until_open(node: RigNode, address: str, port: int, from_namespace: bool = False) -> None:
    deadline_s = time.monotonic() + 10
    while not opens(node, address, port, from_namespace):
        assert time.monotonic() < deadline_s, f"nothing listens on {address}:{port}"


def wait_for_spare(node: RigNode) -> str:
    """The name of the network that the agent has made ahead."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        ledger = json.loads(node.execute("cat", "/var/lib/fairway-node/state/ledger.json").stdout)
        for name, spare in ledger.get("network_pool", {}).items():
            if spare["ready"]:
                return str(name)
        time.sleep(0.1)
    raise AssertionError("no network was made ahead")


def wait_for_report(node: RigNode, link: Link) -> dict[str, Any]:
    deadline_s = time.monotonic() + 40
    while time.monotonic() < deadline_s:
        shown = node.execute("cat", "/var/lib/fairway-homes/ada/report.json", check=False)
        if shown.returncode == 0:
            report: dict[str, Any] = json.loads(shown.stdout)
            return report
        time.sleep(0.1)
    log = node.execute(
        "cat", f"/var/lib/fairway-node/state/tasks/fw-rig-{PROBED}-1-0/log", check=False
    ).stdout
    raise AssertionError(f"the probe did not report: {log}")


def test_01_the_person_is_not_root(walls: Walls) -> None:
    assert walls.report["uid"] == 20001
    assert walls.report["gid"] == 20001
    assert 0 not in walls.report["groups"]
    assert walls.report["status"]["Uid"].split() == ["20001"] * 4


@pytest.mark.parametrize("which", ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"])
def test_02_no_capabilities(walls: Walls, which: str) -> None:
    assert int(walls.report["status"][which], 16) == 0


def test_03_no_new_privileges(walls: Walls) -> None:
    assert walls.report["status"]["NoNewPrivs"] == "1"


def test_04_system_calls_are_filtered(walls: Walls) -> None:
    assert walls.report["status"]["Seccomp"] == "2"


def test_04b_no_user_namespaces_no_vsock_and_what_programs_need(walls: Walls) -> None:
    refused = dict.fromkeys(
        ("unshare", "unshare more", "unshare by 64 bits", "clone", "clone by 64 bits"), "EPERM"
    )
    refused |= dict.fromkeys(("vsock", "vsock datagrams", "vsock by 64 bits"), "EAFNOSUPPORT")
    # their arguments cannot be filtered; programs use others where they do not exist
    assert walls.report["system_calls"] == refused | {"clone3": "ENOSYS", "io_uring": "ENOSYS"}
    assert set(walls.report["programs"].values()) == {None}, walls.report["programs"]


def test_05_no_suid_program(walls: Walls) -> None:
    assert walls.report["suid"] == []


def test_06_own_namespaces(walls: Walls) -> None:
    for name, inside in walls.report["namespaces"].items():
        if name == "cgroup" and not walls.cgroup_v2 and inside == walls.node_namespaces[name]:
            continue  # podman gives no cgroup namespace on version 1; what it shows is checked in 8 and 10
        assert inside != walls.node_namespaces[name], name


def test_07_kernel_memory_keys_and_firmware_are_masked(walls: Walls) -> None:
    assert walls.report["kcore"] == 0
    assert walls.report["keys"] == "" or walls.report["keys"].startswith("!")
    assert walls.report["firmware"] == []


def test_08_kernel_settings_are_read_only(walls: Walls) -> None:
    assert walls.report["proc_sys_read_only"]
    assert walls.report["sys_read_only"]
    assert walls.report["write_sysctl"]
    assert walls.report["write_sysrq"]
    assert walls.report["cgroup_read_only"]


def test_09_no_engine_socket_and_only_the_declared_volumes(walls: Walls) -> None:
    assert walls.report["sockets"] == []
    assert walls.report["agent_files"] == []
    declared = {
        "/home/ada",
        "/run/fairway",
        "/run/fairway-checkpoint",
        "/run/fairway-metric",
        "/run/fairway-code",
        "/run/fairway-progress",
        "/etc/hosts",
    }
    seen = set()
    for line in walls.report["mountinfo"]:
        fields, _, filesystem = line.partition(" - ")
        root, target, options = fields.split()[3:6]
        if filesystem.split()[0] in ("ext4", "xfs", "btrfs", "overlay", "tmpfs") and root != "/":
            assert target in declared | ENGINE_FILES | {"/proc/kcore"} or target.startswith("/proc/"), line
        if target in declared:
            seen.add(target)
            # Docker cannot say this of a mount: there no new privileges (3) and the devices' group (10) stand for it.
            assert {"nosuid", "nodev"} <= set(options.split(",")) or walls.engine == "docker", line
    assert seen == declared


def test_10_only_the_standard_devices(walls: Walls) -> None:
    assert set(walls.report["devices"]) <= STANDARD_DEVICES
    assert not any(is_block for _, _, is_block in walls.report["devices"].values())
    assert walls.report["mknod"] == "Operation not permitted"
    if not walls.cgroup_v2:
        listed = walls.node.execute(
            "cat",
            f"/sys/fs/cgroup/devices/{PARENTS[walls.engine]}{walls.container['Id']}/devices.list",
            check=False,
        )
        assert "a *:* rwm" not in listed.stdout


@pytest.fixture
def limits_hold(walls: Walls) -> None:
    if walls.rootless and not walls.cgroup_v2:
        pytest.skip("cgroup v1 holds no limits without root")


@pytest.mark.usefixtures("limits_hold")
def test_11_processes_are_limited(walls: Walls) -> None:
    assert walls.report["cgroup"]["pids"] == str(PIDS)
    assert 1 < walls.report["threads"] < PIDS


@pytest.mark.usefixtures("limits_hold")
def test_12_memory_is_limited_and_swap_is_off(walls: Walls) -> None:
    assert int(walls.report["cgroup"]["memory"]) == MEMORY_MIB * 1024 * 1024
    swap = walls.report["cgroup"]["swap"]
    if swap.startswith("!"):
        assert "SwapTotal:             0 kB" in Path("/proc/meminfo").read_text(), (
            "no swap accounting, yet swap"
        )
    else:
        assert int(swap) == (0 if walls.cgroup_v2 else MEMORY_MIB * 1024 * 1024)


@pytest.mark.usefixtures("limits_hold")
def test_13_the_processor_share_is_limited(walls: Walls) -> None:
    quota = walls.report["cgroup"]["cpu"].split()[0]
    assert int(quota) == CPU_MILLI * 100


def test_14_shared_memory_is_private_and_sized(walls: Walls) -> None:
    assert walls.report["shm_bytes"] == SHM_MIB * 1024 * 1024
    assert walls.report["shm_files"] == []


def test_15_no_secret_of_the_portal_is_visible(walls: Walls) -> None:
    visible = json.dumps([walls.report["environment"], walls.report["arguments"], walls.report["mountinfo"]])
    for secret in (SECRET, OTHER_SECRET):
        assert secret not in visible
    for name in walls.report["environment"]:
        assert not name.startswith(("DATABASE", "REDIS", "SSH_", "SUDO_", "DJANGO", "PG", "CELERY")), name
    assert walls.report["secrets"] == {"token": ["0o600", 20001]}


def test_16_metadata_and_control_plane_are_unreachable(walls: Walls) -> None:
    for place in list(walls.report["connects"])[3:6]:
        assert walls.reachable_from_node[place], f"{place} is not there at all, so the wall was not tried"
        assert walls.report["connects"][place] is not None, place


def test_17_other_tenants_are_invisible(walls: Walls) -> None:
    assert walls.report["hostname"] == PROBED
    seen = json.dumps({**walls.report, "connects": None, "environment": None, "arguments": None})
    for name, value in walls.report["environment"].items():
        seen += "" if name == "PROBE" else f"{name}={value}"
    for outsider in (NEIGHBOUR, "eve", "20002"):
        assert outsider not in seen


def test_18_processes_outside_are_untouchable(walls: Walls) -> None:
    assert walls.report["processes"][0] == 1
    assert len(walls.report["processes"]) <= 3
    for name in ("signal_outside", "ptrace_outside"):
        assert all(refused is not None for refused in walls.report[name]), name
    assert walls.report["core_limit"] == [0, 0]


def test_19_another_jobs_port_is_closed(walls: Walls) -> None:
    connects = walls.report["connects"]
    places = list(connects)
    assert walls.reachable_from_node[places[0]] and walls.reachable_from_node[places[1]]
    for place in (*places[:3], *places[6:]):
        assert connects[place] is not None, place
