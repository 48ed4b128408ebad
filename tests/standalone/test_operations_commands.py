"""The command blocks of docs/operations.md: each runs here as it is printed, but for addresses and passwords."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import pytest
import yaml

from tests.standalone.systemd_machine import ROOT, UNITS, SystemdMachine, missing_requirement, running_machine
from tests.standalone.waiting import eventually

PAGE = ROOT / "docs" / "operations.md"
IN_CONTAINERS = "docker compose run --rm --volume /safe/place:/safe init"
"""Begins the block that `deploy/e2e/run.py` runs."""
UP = "python3 manage.py up"
"""The block that `test_up.py` runs."""
ELSEWHERE = (UP, IN_CONTAINERS)
DROP_IN, SCRAPE = "[Service]", "scrape_configs:"
NODE_SETUP, BACKUP, UNIT_BACKUP = (
    "python3 manage.py node-setup",
    "python3 manage.py backup",
    "systemd-run --pipe",
)
INSTALL = (
    "git clone ADDRESS /opt/fairway",
    "cp deploy/systemd/fairway.sysusers.conf",
    "sudo -u postgres psql",
    "install -d -m 700 /etc/fairway",
)
KNOWN = (*ELSEWHERE, DROP_IN, SCRAPE, NODE_SETUP, BACKUP, UNIT_BACKUP, *INSTALL)


def blocks() -> list[str]:
    """Return the indented blocks, without their indentation."""
    found = re.findall(r"\n\n((?: {4,}\S.*\n)+)", PAGE.read_text())
    return [textwrap.dedent(text).strip() for text in found]


def block(start: str) -> str:
    (found,) = (each for each in blocks() if each.startswith(start))
    return found


def test_every_command_block_is_run_by_a_test() -> None:
    unknown = [each for each in blocks() if not each.startswith(KNOWN)]
    assert not unknown and len(blocks()) == len(KNOWN)


def test_the_scrape_configuration_is_one() -> None:
    (job,) = yaml.safe_load(block(SCRAPE))["scrape_configs"]
    assert (job["metrics_path"], job["scheme"]) == ("/metrics", "https")


@pytest.fixture(scope="module")
def machine() -> Iterator[SystemdMachine]:
    """A machine with PostgreSQL and Valkey, and without Fairway."""
    with running_machine(bare=True) as running:
        yield running


def shell(machine: SystemdMachine, text: str, *, within_s: float = 180) -> str:
    python = "export LD_LIBRARY_PATH=/opt/python/lib PATH=/opt/python/bin:$PATH"
    return machine.run(
        "sh", "-ec", f"{python}\ncd /opt/fairway 2>/dev/null || cd /\n{text}", within_s=within_s
    )


@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement())
def test_install_and_back_up_by_the_page(machine: SystemdMachine) -> None:
    clone, build = block(INSTALL[0]).splitlines()
    shell(machine, clone.replace("ADDRESS", "/run/rig/source/fairway"))
    shell(machine, machine.environment_script)  # what the next line would download
    machine.run("systemctl", "restart", "rig-valkey")  # its program is among the packages
    shell(machine, build)
    shell(machine, block(INSTALL[1]))
    shell(machine, block(INSTALL[2]).replace("'...'", f"'{machine.passwords['owner']}'"))
    shell(machine, block(INSTALL[3]))
    for name in ("fairway.env", "owner.env"):  # "then edit both"
        machine.run("tee", f"/etc/fairway/{name}", text=machine.with_passwords((UNITS / name).read_text()))
        assert machine.run("stat", "--format", "%a %U", f"/etc/fairway/{name}").split() == ["600", "root"]
    assert "`systemctl enable --now fairway.target`" in PAGE.read_text()
    shell(machine, "systemctl enable --now fairway.target", within_s=300)
    assert machine.run("systemctl", "is-enabled", "fairway.target").strip() == "enabled"

    assert eventually(machine.is_ready, 120), machine.log()

    shell(machine, "install -d -o fairway -m 700 /safe/place || mkdir -p /run/safe/place")
    place = "/safe/place" if "place" in machine.run("ls", "/safe", check=False) else "/run/safe/place"
    shell(machine, f"chown fairway {place}")
    shell(machine, block(UNIT_BACKUP).replace("/safe/place", place))
    assert machine.run("stat", "--format", "%a %U", f"{place}/fairway-monday.tar").split() == [
        "600",
        "fairway",
    ]

    as_unit = block(UNIT_BACKUP).partition("/opt/fairway/.venv")[0]
    for line in (block(NODE_SETUP).partition("#")[0], block(BACKUP).splitlines()[0].partition("#")[0]):
        command = line.strip().partition(">")[0].replace("python3", "/opt/fairway/.venv/bin/python")
        shell(machine, as_unit + command.replace("/safe/place/fairway-monday", f"{place}/second"))

    _check_drop_in(machine)

    # the second line of the block restores, into an empty data folder and database
    psql = "psql -h /run/postgresql -U postgres -c"
    machine.run("sh", "-c", f"{psql} 'CREATE DATABASE elsewhere OWNER fairway'", account="postgres")
    restore = block(BACKUP).splitlines()[1].replace("python3", "/opt/fairway/.venv/bin/python")
    restore = restore.replace("/safe/place", place).replace("/new/place", "/var/lib/fairway/elsewhere")
    for name in ("fairway.env", "owner.env"):
        machine.run("sed", "-i", "s,/fairway$,/elsewhere,", f"/etc/fairway/{name}")
    said = shell(machine, as_unit + restore)
    assert "Restored cluster" in said


def _check_drop_in(machine: SystemdMachine) -> None:
    """The password of the mail server is a credential of worker-nodes."""
    text = re.sub(r" +#.*", "", block(DROP_IN))
    machine.run("tee", "/etc/fairway/smtp_password", text="secret")
    machine.run("mkdir", "-p", "/etc/systemd/system/fairway-worker-nodes.service.d")
    machine.run("tee", "/etc/systemd/system/fairway-worker-nodes.service.d/override.conf", text=text + "\n")
    shell(machine, "systemctl daemon-reload && systemctl restart fairway-worker-nodes")
    assert eventually(lambda: machine.main_pid("fairway-worker-nodes") != 0, 30)
    credentials = "/run/credentials/fairway-worker-nodes.service"
    pid = str(machine.main_pid("fairway-worker-nodes"))
    assert (
        machine.run("nsenter", "--target", pid, "--mount", "cat", f"{credentials}/smtp_password") == "secret"
    )
