"""`up`, the systemd units and docker-compose.yml run the same processes, each with the same key."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from portal.config.variables import BY_NAME, check_environment
from portal.standalone.process_table import PREPARE, PROCESSES, PortalProcess, ProcessAddresses

ROOT = Path(__file__).parent.parent.parent
UNITS = ROOT / "deploy" / "systemd"
PYTHON = "/opt/fairway/.venv/bin/python"
OF_UNITS = ProcessAddresses(
    Path("/run/fairway/web.sock"), Path("/var/lib/fairway/run/beat"), "127.0.0.1", 8000
)
OF_CONTAINERS = ProcessAddresses(Path("/run/fairway/web.sock"), Path("/tmp/beat"), "0.0.0.0", 8000)
MAX_EXPOSURE = 2.0
"""`systemd-analyze security`: 0 is best, 10 is worst; a unit without restrictions has 9.6."""

Unit = dict[str, dict[str, list[str]]]


def read_unit(name: str) -> Unit:
    """Return section, key and values of a unit; a key may be set several times."""
    sections: Unit = {}
    for line in (UNITS / name).read_text().splitlines():
        if line.startswith("["):
            sections[line.strip("[]")] = defaultdict(list)
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            list(sections.values())[-1][key].append(value)
    return sections


def words(unit: Unit, section: str, key: str) -> list[str]:
    return " ".join(unit[section].get(key, [])).split()


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return loaded


@pytest.mark.parametrize("process", [*PROCESSES, PREPARE], ids=lambda process: process.name)
def test_a_unit_runs_what_up_runs(process: PortalProcess) -> None:
    unit = read_unit(f"fairway-{process.name}.service")
    (command,) = unit["Service"]["ExecStart"]
    assert shlex.split(command) == [PYTHON, *process.arguments(OF_UNITS)]
    assert unit["Service"].get("Nice", ["0"]) == [str(process.niceness)]
    variables = dict(word.split("=", 1) for word in words(unit, "Service", "Environment"))
    keys = {name: value for name, value in variables.items() if name.endswith("_KEY")}
    credentials = unit["Service"].get("LoadCredential", [])
    if process.key is None:
        assert (keys, credentials) == ({}, [])
    else:
        assert keys == {process.key_variable: f"%d/{process.key}_key"}
        assert credentials == [f"{process.key}_key:/var/lib/fairway/keys/{process.key}_ed25519"]
    known = {
        name: value for name, value in variables.items() if name not in keys and not name.startswith("PYTHON")
    }
    assert set(known) <= set(BY_NAME) and check_environment(known) == []


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
def test_a_service_of_compose_runs_what_up_runs(process: PortalProcess, services: dict[str, Any]) -> None:
    service = services[process.name]
    nice = ["nice", "-n", str(process.niceness)] if process.niceness else []
    assert service["command"] == [*nice, "python", *process.arguments(OF_CONTAINERS)]
    keys = {
        name: value
        for name, value in service["environment"].items()
        if re.fullmatch(r"FAIRWAY_\w+_KEY", name)
    }
    keys.pop("FAIRWAY_SECRET_KEY")
    expected = {} if process.key is None else {process.key_variable: f"/run/secrets/{process.key}_key"}
    assert keys == expected
    assert service.get("secrets", []) == ([f"{process.key}_key"] if process.key else [])
    if process.name.startswith("worker-"):
        probe = ["CMD", "python", "deploy/health.py", "worker", f"{process.name}@fairway"]
        assert service["healthcheck"]["test"] == probe


def test_init_prepares_as_the_unit_does(services: dict[str, Any]) -> None:
    assert services["init"]["command"] == ["python", *PREPARE.arguments(OF_CONTAINERS)]


def test_there_is_a_unit_for_each_process_and_the_target_groups_them() -> None:
    names = {f"fairway-{process.name}.service" for process in (*PROCESSES, PREPARE)}
    assert {path.name for path in UNITS.glob("*.service")} == names
    assert set(words(read_unit("fairway.target"), "Unit", "Wants")) == names
    for name in names:
        unit = read_unit(name)
        assert unit["Unit"]["PartOf"] == unit["Install"]["WantedBy"] == ["fairway.target"], name
        if name != "fairway-prepare.service":
            assert unit["Unit"]["Requires"] == ["fairway-prepare.service"], name
            assert "fairway-prepare.service" in words(unit, "Unit", "After"), name
            assert unit["Service"]["Restart"] == ["always"], name


def test_every_unit_has_the_same_restrictions_and_only_prepare_may_read_private_keys() -> None:
    own = {"ExecStart", "Environment", "LoadCredential", "Nice", "LimitNOFILE", "TimeoutStopSec"}
    shared: dict[str, Any] = {}
    for process in PROCESSES:
        service = read_unit(f"fairway-{process.name}.service")["Service"]
        restrictions = {key: values for key, values in service.items() if key not in own}
        shared = shared or restrictions
        assert restrictions == shared, process.name
    assert shared["TemporaryFileSystem"] == ["/var/lib/fairway/keys:ro"]
    bound = " ".join(shared["BindReadOnlyPaths"]).split()
    assert bound and all(path.endswith(".pub") for path in bound)
    prepare = read_unit("fairway-prepare.service")["Service"]
    different = {
        "Type",
        "Restart",
        "RestartSec",
        "KillMode",
        "TemporaryFileSystem",
        "BindReadOnlyPaths",
        "EnvironmentFile",
    }
    assert {k: v for k, v in prepare.items() if k in shared and k not in different} == {
        k: v for k, v in shared.items() if k not in different
    }
    owners = [path.name for path in UNITS.glob("*.service") if "owner.env" in path.read_text()]
    assert owners == ["fairway-prepare.service"]


@pytest.fixture
def unit_root(tmp_path: Path) -> Path:
    """A root folder with the units and the program that they start."""
    shutil.copytree(UNITS, tmp_path / "etc" / "systemd" / "system")
    program = tmp_path / PYTHON.lstrip("/")
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for name in ("sysinit", "basic", "shutdown", "network-online", "multi-user"):
        (tmp_path / "etc" / "systemd" / "system" / f"{name}.target").write_text(
            f"[Unit]\nDescription={name}\n"
        )
    return tmp_path


@pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="systemd-analyze is missing (apt-get install systemd)"
)
def test_systemd_accepts_the_units(unit_root: Path) -> None:
    names = sorted(path.name for path in UNITS.iterdir() if path.suffix in {".service", ".target"})
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", f"--root={unit_root}", *names],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")


@pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="systemd-analyze is missing (apt-get install systemd)"
)
@pytest.mark.parametrize("process", [*PROCESSES, PREPARE], ids=lambda process: process.name)
def test_systemd_finds_a_unit_restricted(process: PortalProcess) -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", UNITS / f"fairway-{process.name}.service"],
        capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found.group(1)) <= MAX_EXPOSURE


def test_the_image_copies_files_that_exist_and_starts_the_gateway() -> None:
    """No image is built by the tests: deploy/e2e/run.py does."""
    lines = re.sub(r"\\\n\s*", " ", (ROOT / "deploy" / "Dockerfile").read_text()).splitlines()
    stages: set[str] = set()
    for line in lines:
        if line.startswith("FROM ") and " AS " in line:
            stages.add(line.split()[-1])
        if line.startswith("COPY "):
            *sources, _ = (word for word in line.split()[1:] if not word.startswith("--"))
            source = re.search(r"--from=(\S+)", line)
            if source:
                assert source.group(1) in stages, line
            else:
                assert [name for name in sources if not (ROOT / name).exists()] == [], line
    (command,) = (line.removeprefix("CMD ") for line in lines if line.startswith("CMD "))
    gateway = next(process for process in PROCESSES if process.name == "gateway")
    assert yaml.safe_load(command) == ["python", *gateway.arguments(OF_CONTAINERS)]
    variables = dict(
        word.split("=", 1) for line in lines if line.startswith("ENV ") for word in line.split()[1:]
    )
    known = {name: value for name, value in variables.items() if name.startswith("FAIRWAY_")}
    assert set(known) <= set(BY_NAME) and check_environment(known) == []
