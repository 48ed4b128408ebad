"""The shipped units under a real systemd, with PostgreSQL and Valkey, until a job ran."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from portal.standalone.process_table import PROCESSES
from tests.standalone.systemd_machine import SystemdMachine, missing_requirement, running_machine
from tests.standalone.waiting import eventually

JOB = Path(__file__).with_name("one_local_job.py")
SHELL = (
    *(
        "systemd-run",
        "--pipe",
        "--wait",
        "--collect",
        "--quiet",
        "--uid=fairway",
        "--working-directory=/opt/fairway",
    ),
    *(
        "--property=EnvironmentFile=/etc/fairway/fairway.env",
        "--property=EnvironmentFile=/etc/fairway/owner.env",
    ),
    *("--setenv=FAIRWAY_DATA_DIR=/var/lib/fairway", "--setenv=FAIRWAY_NO_DEV=1", "--property=UMask=0077"),
    *("/opt/fairway/.venv/bin/python", "manage.py"),
)
"""The command line of docs/operations.md."""
PUBLIC_KEYS = [f"{name}_ed25519.pub" for name in ("control", "signing", "tunnel", "watch")]
SPY = """
import os, sys
for pid in sys.argv[1:]:
    for name in ("root/var/lib", "environ", "mem", "maps"):
        path = f"/proc/{pid}/{name}"
        try:
            found = os.listdir(path) if "/" in name else open(path, "rb").read(1)
        except OSError:
            continue
        print(pid, name, found)
"""
"""Prints what a process of the same account reads of others."""

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.rig,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement()),
]


@pytest.fixture(scope="module")
def machine() -> Iterator[SystemdMachine]:
    with running_machine() as running:
        running.run("systemctl", "start", "fairway.target", within_s=180)
        yield running


def manage(machine: SystemdMachine, *words: str, text: str | None = None) -> str:
    return machine.run(*SHELL, *words, text=text, within_s=120).strip()


def test_every_unit_runs_and_a_job_ends(machine: SystemdMachine) -> None:
    assert eventually(machine.is_ready, 90), machine.log()
    link = machine.run("sh", "-c", "cat /run/rig/fairway-prepare.log")
    assert "https://portal.example.org/sign-in/link/#" in link
    jobs: list[str] = []

    def submitted() -> bool:
        jobs[:] = manage(machine, "shell", "--verbosity", "0", text=JOB.read_text()).split()
        return bool(jobs)

    assert eventually(submitted, 60), machine.log()
    state = f"from portal.models import Job; print(Job.objects.get(public_id={jobs[0]!r}).state)"
    assert eventually(lambda: manage(machine, "shell", "--verbosity", "0", "-c", state) == "COMPLETED", 90), (
        machine.log()
    )
    restarts = {
        process.name: machine.run(
            "systemctl", "show", "--property=NRestarts", "--value", f"fairway-{process.name}"
        ).strip()
        for process in PROCESSES
    }
    assert restarts == dict.fromkeys(restarts, "0"), machine.log()
    assert "http" not in machine.run(
        "sh", "-c", "cat /proc/*/cmdline | tr '\\0' '\\n' | grep redis:// || true"
    )


def test_each_unit_is_confined(machine: SystemdMachine) -> None:
    pids = {process.name: machine.main_pid(f"fairway-{process.name}") for process in PROCESSES}
    for process in PROCESSES:
        status = machine.run("cat", f"/proc/{pids[process.name]}/status")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["CapEff"].strip("0\n ") == fields["CapBnd"].strip("0\n ") == "", process.name
        assert (fields["NoNewPrivs"].strip(), fields["Seccomp"].strip(), fields["Umask"].strip()) == (
            "1",
            "2",
            "0077",
        )
        assert set(fields["Uid"].split()) == {machine.run("id", "-u", "fairway").strip()}, process.name
    for path in ("/var/lib/fairway/keys", "/var/lib/fairway", "/run/fairway"):
        assert machine.run("stat", "--format", "%a %U", path).split() == ["700", "fairway"], path


def test_no_process_reads_the_key_of_another(machine: SystemdMachine) -> None:
    """As one account, from inside of the namespaces of each unit."""
    pids = {process.name: machine.main_pid(f"fairway-{process.name}") for process in PROCESSES}
    for process in PROCESSES:
        inside = ("nsenter", "--target", str(pids[process.name]), "--mount", "sh", "-c")
        assert machine.run(*inside, "ls /var/lib/fairway/keys").split() == PUBLIC_KEYS, process.name
        credentials = machine.run(*inside, "find /run/credentials -type f 2>/dev/null || true").split()
        own = [f"/run/credentials/fairway-{process.name}.service/{process.key}_key"] if process.key else []
        assert credentials == own, process.name
    holders = [str(pids[name]) for name in ("gateway", "worker-nodes", "collector")]
    account = (
        "--uid=fairway",
        "--property=PrivateUsers=yes",
        "--property=NoNewPrivileges=yes",
        "--property=CapabilityBoundingSet=",
    )
    words = ("systemd-run", "--pipe", "--wait", "--collect", "--quiet", *account)
    assert machine.run(*words, "/usr/bin/python3", "-c", SPY, *holders) == ""


def test_a_process_that_ends_is_started_again(machine: SystemdMachine) -> None:
    before = {process.name: machine.main_pid(f"fairway-{process.name}") for process in PROCESSES}
    for pid in before.values():
        machine.run("kill", "-9", str(pid))

    def again() -> bool:
        now = {name: machine.main_pid(f"fairway-{name}") for name in before}
        return all(pid and pid != before[name] for name, pid in now.items()) and machine.is_ready()

    assert eventually(again, 90), machine.log()


def test_a_wrong_setting_keeps_everything_from_starting(machine: SystemdMachine) -> None:
    machine.run("systemctl", "stop", "fairway.target", "fairway-prepare.service", within_s=120)
    machine.run("sh", "-c", "echo FAIRWAY_DATABASE_POOL=abc >> /etc/fairway/fairway.env")
    try:
        machine.run("systemctl", "start", "fairway.target", check=False, within_s=120)
        assert eventually(lambda: machine.active("fairway-prepare") == "failed", 30)
        assert machine.active("fairway-web") == "inactive"
        said = machine.run("tail", "-n", "1", "/run/rig/fairway-prepare.log")
        assert said.startswith("CommandError: FAIRWAY_DATABASE_POOL in the environment cannot be read")
    finally:
        machine.run("sed", "-i", "/POOL=abc/d", "/etc/fairway/fairway.env")
