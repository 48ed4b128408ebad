"""Whose process is on a GPU: a task's, its child's, a foreign one's; and how little is looked at to know it."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agents.node.gpus import GpuProcess
from agents.node.gpus.process_owners import ProcessOwnerResolver, _is_within
from agents.node.host import procfs
from tests.agents.node.conftest import LoneNode
from tests.fakes import nvml

needs_compiler = pytest.mark.skipif(nvml.missing_compiler() is not None, reason=str(nvml.missing_compiler()))


@pytest.fixture
def outsider():
    child = subprocess.Popen(["/bin/sleep", "600"])
    yield child.pid
    child.kill()
    child.wait()


@needs_compiler
def test_a_sample_has_the_owner_of_each_gpu_process(node: LoneNode, tmp_path: Path, outsider: int) -> None:
    driver = nvml.FakeDriver(tmp_path, [nvml.h200(0), nvml.h200(1)])
    node.configure(gpu_provider="nvml")
    with node.open(environment=driver.environment) as link:
        shell = ["/bin/sh", "-c", "sleep 600 & wait"]
        spec = node.spec("job1", *shell, gpus=[{"uuid": "GPU-h200-0", "milli": 1000}])
        link.request("start", timeout_s=10, epoch=1, spec=spec)
        first = next(iter(node.ledger()["tasks"].values()))["pid"]
        child = child_of(first)
        driver.write([nvml.h200(0, f"process {child} 2048"), nvml.h200(1, f"graphics {outsider} 7")])
        ours, others = (
            gpu["processes"] for gpu in link.request("stats", timeout_s=10, once=True)["sample"]["gpus"]
        )
    assert [(row["pid"], row["job"], row["attempt"], row["foreign"]) for row in ours] == [
        (child, "job1", 1, False)
    ]
    (row,) = others
    assert (row["job"], row["foreign"], row["memory_mib"]) == (None, True, 7)
    assert (row["account"], row["command"]) == (getpass.getuser(), "sleep")


@pytest.mark.rig
@needs_compiler
def test_container_processes_belong_to_the_task_also_those_added_later(
    podman_node: LoneNode, tmp_path: Path
) -> None:
    node, driver = podman_node, nvml.FakeDriver(tmp_path, [nvml.h200(0)])
    node.configure(gpu_provider="nvml")
    with node.open(environment=driver.environment) as link:
        spec = node.spec("job1", "sleep", "600", runtime="podman", image=node.image)
        name = link.request("start", timeout_s=30, epoch=1, spec=spec)["container"]
        first = node.ledger()["tasks"][name]["pid"]
        assert node.podman("exec", "--detach", name, "sleep", "700").returncode == 0
        family = [first, brought_in("700")]
        driver.write([nvml.h200(0, *(f"process {pid} 64" for pid in family))])
        (gpu,) = link.request("stats", timeout_s=10, once=True)["sample"]["gpus"]
    assert [(row["pid"], row["job"], row["foreign"]) for row in gpu["processes"]] == [
        (pid, "job1", False) for pid in sorted(family)
    ]


def brought_in(argument: str) -> int:
    """The process ``sleep <argument>`` of this machine, once it is there."""
    for _ in range(100):
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            if procfs.read_text(str(path)) == f"sleep\0{argument}\0":
                return int(path.parent.name)
        time.sleep(0.05)
    raise AssertionError("nothing was brought in")


def child_of(pid: int) -> int:
    """A process below this one that has no child itself, once there is one."""
    for _ in range(100):
        family = procfs.descendants(pid, procfs.list_processes())
        parents = {each.parent for each in family}
        if len(family) > 1:
            return next(each.pid for each in family if each.pid not in parents)
        time.sleep(0.05)
    raise AssertionError("it has no child")


def test_only_requested_processes_and_their_ancestors_are_read(outsider, monkeypatch) -> None:
    looked: list[str] = []
    read = procfs.read_text
    monkeypatch.setattr(procfs, "read_text", lambda path: (looked.append(path), read(path))[1])
    owners, task = ProcessOwnerResolver(), {"pid": os.getppid(), "job": "abc", "attempt": 2}
    processes = [GpuProcess(outsider, 1)]
    (reported,) = owners.describe_processes([processes], [task])
    assert (reported[0]["job"], reported[0]["attempt"], reported[0]["foreign"]) == ("abc", 2, False)
    seen = {path.split("/")[2] for path in looked}
    assert seen <= {str(outsider), str(os.getpid()), str(os.getppid()), "self"}
    looked.clear()
    assert owners.describe_processes([processes], [task]) == [reported]
    assert looked == [f"/proc/{outsider}/stat"]


def test_arguments_are_not_reported(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "--password=x"])
    try:
        ((row,),) = ProcessOwnerResolver().describe_processes([[GpuProcess(child.pid, 1)]], [])
    finally:
        child.kill()
        child.wait()
    assert row["command"] == Path(sys.executable).name
    assert row["foreign"]


def test_a_process_that_ended_has_no_owner(tmp_path: Path) -> None:
    ((row,),) = ProcessOwnerResolver().describe_processes([[GpuProcess(2**22 + 1, None)]], [])
    assert (row["foreign"], row["account"], row["command"]) == (True, None, None)


@pytest.mark.parametrize(
    ("text", "group", "within"),
    [
        ("0::/machine/a\n", "0::/machine/a\n", True),
        ("0::/machine/a/inner\n", "0::/machine/a\n", True),
        ("0::/machine/ab\n", "0::/machine/a\n", False),
        ("", "0::/machine/a\n", False),
        ("2:cpu:/a\n1:memory:/b\n", "2:cpu:/a\n1:memory:/a\n", False),
    ],
)
def test_a_group_includes_itself_and_its_descendants(text, group, within) -> None:
    assert _is_within(text, group) is within
