"""Shares of a GPU by MPS, with a stand-in for NVIDIA's control daemon and one for its driver: the life of a daemon.

What a real GPU does with its words is tried in ``tests/gpu``.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.link import AgentError, Link, OutcomeUnknownError
from agents.node.gpus import OK, GpuInfo, mps
from agents.node.host import procfs
from agents.node.runtimes import ContainerConfig, arguments
from agents.node.settings import parse_settings
from tests.agents.node.conftest import LoneNode, log_of
from tests.agents.node.sweeps import CRASHING, MOST_STEPS
from tests.agents.node.test_arguments import DOCKER, PODMAN, SPEC, order
from tests.engine_harness import wait_for
from tests.fakes import nvml

pytestmark = [
    pytest.mark.rig,
    pytest.mark.skipif(nvml.missing_compiler() is not None, reason=str(nvml.missing_compiler())),
]

STANDIN = Path(nvml.__file__).with_name("nvidia-cuda-mps-control")
UUID = "GPU-h200-0"
CLIENT = """
import os, socket, time
open("/dev/shm/from-" + os.environ["FAIRWAY_JOB"], "w").close()
with socket.socket(socket.AF_UNIX) as daemon:
    daemon.connect(os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control")
    with daemon.makefile("rw") as stream:
        stream.write("client\\n")
        stream.flush()
        print("seen", stream.readline().strip(), flush=True)
for name in sorted(os.environ):
    if name.startswith("CUDA_MPS_"):
        print(name, os.environ[name], flush=True)
time.sleep(600)
"""


class SharingNode:
    """A node with two H200 of the stand-in driver, and MPS of the stand-in."""

    def __init__(self, node: LoneNode) -> None:
        self.node = node
        self.driver = nvml.FakeDriver(node.folder, [nvml.h200(0), nvml.h200(1)])
        self.control = node.folder / STANDIN.name
        shutil.copy(STANDIN, self.control)
        node.configure(gpu_provider="nvml", mps_control_program=str(self.control))

    def open(self, **how: Any) -> Link:
        more = how.pop("environment", {})
        return self.node.open(environment={**self.driver.environment, **more}, **how)

    def share(self, job: str, milli: int) -> dict[str, Any]:
        gpus = [{"uuid": UUID, "milli": milli}]
        return self.node.spec(
            job, "python3", "-c", CLIENT, gpus=gpus, env={"CUDA_MPS_PIPE_DIRECTORY": "/mine"}
        )

    def processes(self) -> list[int]:
        """Daemons and servers of this node."""
        pipes = str(self.node.folder / "state/mps")
        return [
            each.pid
            for each in procfs.list_processes()
            if (procfs.read_text(f"/proc/{each.pid}/comm") or "").strip() == mps.PROCESS_NAME
            and pipes in (procfs.read_text(f"/proc/{each.pid}/environ") or "")
        ]

    def daemons(self) -> list[int]:
        found = [procfs.read_process(pid) for pid in self.processes()]
        return [each.pid for each in found if each is not None and each.session == each.pid]

    def folder(self) -> Path:
        return self.node.folder / "state/mps" / mps.gpu_key(UUID)

    def words(self) -> list[str]:
        return (self.folder() / "log/control.log").read_text().splitlines()


@pytest.fixture
def sharing(node: LoneNode) -> Iterator[SharingNode]:
    made = SharingNode(node)
    yield made
    node.configure(gpu_provider="none")
    node.close()
    for pid in made.processes():
        os.kill(pid, signal.SIGKILL)
    for left in Path("/dev/shm").glob(f"fairway-*-{mps.gpu_key(UUID)}"):
        shutil.rmtree(left)


def begin(link: Link, spec: dict[str, Any]) -> None:
    assert link.request("start", timeout_s=60, epoch=1, spec=spec)["state"] == "running"


def stop(link: Link, job: str) -> None:
    assert link.request("stop", timeout_s=30, epoch=1, job=job, attempt=1, grace_s=0)["gone"] is True


def said_by(link: Link, job: str) -> str:
    return wait_for("its words", lambda: (text := log_of(link, job)).count("CUDA_MPS_") >= 3 and text)


def test_the_daemon_starts_with_the_first_share_and_ends_with_the_last(sharing: SharingNode) -> None:
    link = sharing.open()
    assert link.hello.gpu_sharing is not None and link.hello.gpu_sharing.enforced, link.hello.gpu_sharing
    room_mib = link.hello.gpus[0].memory_mib - link.hello.gpus[0].driver_reserved_mib
    assert room_mib < link.hello.gpus[0].memory_mib
    begin(link, sharing.node.spec("jwhole", gpus=[{"uuid": "GPU-h200-1", "milli": 1000}]))
    assert sharing.daemons() == []  # a whole GPU needs none
    stop(link, "jwhole")

    begin(link, sharing.share("jsmall", 250))
    (daemon,) = sharing.daemons()
    said = said_by(link, "jsmall")
    assert f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT 0={room_mib // 4}M" in said
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE 25\n" in said
    assert f"CUDA_MPS_PIPE_DIRECTORY {sharing.folder()}/pipe" in said  # not what the person said
    assert "seen from-jsmall" in said  # task and daemon meet at the same /dev/shm, which is not the machine's
    assert not Path("/dev/shm/from-jsmall").exists()
    words = sharing.words()
    assert words[0] == f"-f -multiuser-server on {UUID}"
    assert f"set_default_device_pinned_mem_limit 0 {room_mib // 4}M" in words
    assert "set_default_active_thread_percentage 25" in words
    (server,) = set(sharing.processes()) - {daemon}

    link.close()
    link = sharing.open()  # another agent takes the daemon over
    begin(link, sharing.share("jlarge", 500))
    assert sharing.daemons() == [daemon]
    wider = sharing.words()[len(words) :]
    assert f"set_default_device_pinned_mem_limit 0 {room_mib // 2}M" in wider
    assert f"set_device_pinned_mem_limit {server} 0 {room_mib // 2}M" in wider
    assert f"set_active_thread_percentage {server} 50" in wider

    sharing.driver.write([nvml.h200(0, f"process {server} 400", f"mps {os.getpid()} 9"), nvml.h200(1)])
    rows = link.request("stats", timeout_s=10, once=True)["sample"]["gpus"][0]["processes"]
    assert {row["pid"]: row["foreign"] for row in rows} == {server: False, os.getpid(): True}

    stop(link, "jsmall")
    begin(link, sharing.share("jthird", 250))
    assert sharing.daemons() == [daemon]
    stop(link, "jlarge")
    stop(link, "jthird")
    wait_for("no daemon left", lambda: not sharing.processes())
    wait_for("its order dropped", lambda: not (sharing.folder() / "launch.json").exists())
    assert list((sharing.folder() / "pipe").iterdir()) == []


def test_tasks_end_with_a_reason_when_their_daemon_dies_and_the_next_start_restarts_it(
    sharing: SharingNode,
) -> None:
    link = sharing.open()
    for job in ("jone", "jtwo"):
        begin(link, sharing.share(job, 400))
        said_by(link, job)
    begin(link, sharing.node.spec("jother", gpus=[{"uuid": "GPU-h200-1", "milli": 1000}]))
    (daemon,) = sharing.daemons()
    os.kill(daemon, signal.SIGKILL)

    def ended() -> dict[str, Any]:
        rows = {row["job"]: row for row in link.request("list", timeout_s=20)["containers"]}
        return rows if all(rows[job]["state"] == "exited" for job in ("jone", "jtwo")) else {}

    rows = wait_for("both ended", ended)
    assert [rows[job]["fault"] for job in ("jone", "jtwo")] == [mps.MPS_DAEMON_LOST] * 2
    assert rows["jother"]["state"] == "running"
    wait_for("no daemon left", lambda: not sharing.processes())  # the server that outlived its daemon, too
    begin(link, sharing.share("jnext", 400))
    assert "seen from-jnext" in said_by(link, "jnext") and len(sharing.daemons()) == 1


def test_a_daemon_that_does_not_start_refuses_the_task_and_leaves_no_files(sharing: SharingNode) -> None:
    works = sharing.control.read_text()
    sharing.control.write_text("#!/bin/sh\n# -multiuser-server\necho no CUDA device; exit 1\n")
    link = sharing.open()
    with pytest.raises(AgentError, match="no CUDA device") as refused:
        begin(link, sharing.share("jone", 500))
    assert refused.value.code == "engine_error"
    assert sharing.node.ledger()["tasks"] == {} and sharing.processes() == []
    sharing.control.write_text(works)
    begin(link, sharing.share("jone", 500))  # the same start, once that is mended


def test_after_a_reboot_the_first_share_starts_a_new_daemon(sharing: SharingNode) -> None:
    with sharing.open() as link:
        begin(link, sharing.share("jone", 500))
    for pid in sharing.processes():
        os.kill(pid, signal.SIGKILL)
    sharing.node.boot_id_path.write_text("boot-2\n")
    with sharing.open() as link:
        (row,) = link.request("list", timeout_s=20)["containers"]
        assert (row["rebooted"], row["fault"]) == (True, None)
        begin(link, sharing.share("jtwo", 500))
        assert len(sharing.daemons()) == 1


@pytest.mark.parametrize("stride", [37, pytest.param(1, marks=pytest.mark.long)])
def test_an_agent_killed_at_any_step_leaves_at_most_one_daemon_and_no_unused_one(
    sharing: SharingNode, stride: int
) -> None:
    for at in range(1, MOST_STEPS, stride):
        job = f"js{at}"
        spec = sharing.share(job, 500)
        environment = {"CRASH_PYZ": str(sharing.node.pyz), "CRASH_AT": str(at), "CRASH_VERB": "start"}
        died = False
        dying = sharing.open(pyz=CRASHING, environment=environment)
        try:
            dying.request("start", timeout_s=60, epoch=1, spec=spec)
        except OutcomeUnknownError:
            died = True
        dying.close()
        with sharing.open() as link:
            begin(link, spec)
            assert len(sharing.daemons()) == 1
            said_by(link, job)
            stop(link, job)
            link.request("remove", timeout_s=30, epoch=1, job=job, attempt=1)
            wait_for("no daemon left", lambda: not sharing.processes())
        if not died:
            break
    else:
        raise AssertionError("the sweep did not reach the end of a start")


@pytest.mark.parametrize(
    ("runtimes", "root", "says"),
    [
        (["podman"], True, None),
        (["process"], True, None),
        (["podman"], False, None),
        (["process"], False, None),
        (["docker"], False, "not root"),
        (["podman", "process"], False, "different daemon paths"),
    ],
)
def test_where_shares_are_enforced(tmp_path, monkeypatch, runtimes, root, says) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    kinds = [{"kind": kind} for kind in runtimes]
    own = {"cluster": "t", "state_dir": "/s", "home_root": "/h", "runtimes": kinds}
    settings = parse_settings(own)
    real = [GpuInfo(UUID, 0, "NVIDIA H200", 140_000, False, OK)]
    why_not = mps.unavailable_reason(settings, real, str(STANDIN))
    assert why_not is None if says is None else why_not is not None and says in why_not
    assert "simulated" in str(
        mps.unavailable_reason(settings, [real[0]._replace(simulated=True)], str(STANDIN))
    )
    assert "is not installed" in str(mps.unavailable_reason(settings, real, None))
    assert mps.find_control_program(parse_settings({**own, "mps_control_program": None})) is None
    older = tmp_path / "older"
    older.write_text("get_server_list")
    one_account = mps.unavailable_reason(settings, real, str(older))
    assert ("serves one account at a time" in str(one_account)) == root


@pytest.mark.parametrize("engine", [PODMAN, DOCKER])
def test_a_container_with_a_share_sees_the_pipes_and_shared_memory_of_its_daemon(
    engine: arguments.EngineOptions,
) -> None:
    share = mps.MpsShare("GPU-1", 20_000, 25.0, "/s/mps/k/pipe", "/dev/shm/fairway-lab-k")
    asked: ContainerConfig = order({**SPEC, "env": {"CUDA_MPS_LOG_DIRECTORY": "/mine"}}, ("GPU-1",))._replace(
        mps_share=share
    )
    words = arguments.create(engine, asked, "image", [])
    mounted = [words[at + 1].split(":")[:2] for at, word in enumerate(words) if word == "--volume"]
    assert ["/s/mps/k/pipe", "/run/fairway-mps"] in mounted
    assert ["/dev/shm/fairway-lab-k", "/dev/shm"] in mounted
    lines = arguments.environment_file(engine, asked).splitlines()
    assert [line for line in lines if line.startswith("CUDA_MPS_")] == [
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20000M",
        "CUDA_MPS_PIPE_DIRECTORY=/run/fairway-mps",
    ]
