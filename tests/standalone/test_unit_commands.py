"""Each `ExecStart=` line runs as its unit runs it, without systemd: environment, credential, umask and account."""

from __future__ import annotations

import http.client
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from portal.models import Job
from portal.standalone.account import service_account
from portal.standalone.process_table import PREPARE, PROCESSES, PortalProcess
from tests.process_environment import service_environment
from tests.standalone.test_process_shapes import ROOT, UNITS, Unit, read_unit, words
from tests.standalone.waiting import eventually

JOB = Path(__file__).with_name("one_local_job.py")

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]


def account_of_units() -> str | None:
    """The account `fairway` if it may use this Python; the units' own account has its packages in /opt."""
    folders = [*Path(sys.executable).resolve().parents, *ROOT.resolve().parents]
    return service_account() if all(folder.stat().st_mode & 0o001 for folder in folders) else None


class Units:
    """The processes of the units, with their paths moved into one folder."""

    def __init__(self, folder: Path) -> None:
        self.data, self.sockets, self.log = folder / "data", folder / "run", folder / "log"
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = int(taken.getsockname()[1])
        self._credentials = folder / "credentials"
        self._account = account_of_units()
        self._moved = {
            "/opt/fairway/.venv/bin/python": sys.executable,
            "/opt/fairway": str(ROOT),
            "/var/lib/fairway": str(self.data),
            "/run/fairway": str(self.sockets),
        }
        for place in (self.data, self.sockets, self._credentials):
            place.mkdir()
            if self._account:
                shutil.chown(place, self._account)
        self.data.chmod(0o711)  # root's jobs have accounts of their own
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def _place(self, text: str) -> str:
        for old, new in self._moved.items():
            text = text.replace(old, new)
        return text

    def environment(self, unit: Unit, process: PortalProcess) -> dict[str, str]:
        """Return the variables of the unit; servers are those of the tests."""
        lines = "\n".join(
            (UNITS / Path(path).name).read_text() for path in unit["Service"]["EnvironmentFile"]
        )
        variables = dict(
            line.split("=", 1) for line in lines.splitlines() if line and not line.startswith("#")
        )
        named = service_environment()
        variables |= {name: named[name] for name in ("DATABASE_URL", "REDIS_URL")}
        if "DATABASE_OWNER_URL" in variables:
            owner = os.environ["DATABASE_OWNER_URL"]
            name = named["DATABASE_URL"].rpartition("/")[2]
            variables["DATABASE_OWNER_URL"] = f"{owner.rpartition('/')[0]}/{name}"
        variables |= {
            "FAIRWAY_PORTAL_URL": f"http://localhost:{self.port}", "FAIRWAY_ALLOWED_HOSTS": "localhost",
            "FAIRWAY_APPS_DOMAIN": f"localhost:{self.port}", "FAIRWAY_STATIC_FINDERS": "true",
        }  # fmt: skip
        credentials = self._credentials / process.name
        for word in words(unit, "Service", "Environment"):
            name, _, value = word.partition("=")
            variables.setdefault(name, self._place(value.replace("%d", str(credentials))))
        for line in unit["Service"].get("LoadCredential", []):
            name, _, path = line.partition(":")
            credentials.mkdir(exist_ok=True)
            shutil.copy(self._place(path), credentials / name)
            (credentials / name).chmod(0o400)
            if self._account:
                shutil.chown(credentials, self._account)
                shutil.chown(credentials / name, self._account)
        return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.data), **variables}

    def start(self, process: PortalProcess) -> subprocess.Popen[bytes]:
        unit = read_unit(f"fairway-{process.name}.service")
        (line,) = unit["Service"]["ExecStart"]
        command = [self._place(word) for word in shlex.split(line)]
        command = [str(self.port) if word == "8000" else word for word in command]
        account = {"user": self._account, "group": self._account, "extra_groups": []} if self._account else {}
        with self.log.open("ab") as log:
            self.running[process.name] = subprocess.Popen(
                command,
                cwd=self._place(unit["Service"]["WorkingDirectory"][0]),
                env=self.environment(unit, process),
                umask=int(unit["Service"]["UMask"][0], 8),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **account,  # type: ignore[arg-type]
            )
        return self.running[process.name]

    def shell(self, program: str) -> str:
        unit = read_unit("fairway-prepare.service")
        done = subprocess.run(
            [sys.executable, "manage.py", "shell", "--verbosity", "0"], cwd=ROOT, env=self.environment(unit, PREPARE),
            user=self._account, group=self._account, input=program, capture_output=True, text=True, timeout=120,
            umask=0o077, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=3)
        try:
            connection.request("GET", "/readyz", headers={"Host": f"localhost:{self.port}"})
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


@pytest.fixture
def units(transactional_db: None) -> Iterator[Units]:
    folder = Path(tempfile.mkdtemp(prefix="fw-units-"))
    folder.chmod(0o711)
    started = Units(folder)
    try:
        yield started
    finally:
        for process in started.running.values():
            process.terminate()
        for process in started.running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_the_commands_of_the_units_serve_and_run_a_job(units: Units) -> None:
    assert units.start(PREPARE).wait(120) == 0, units.log.read_text()
    assert re.search(rf"http://localhost:{units.port}/sign-in/link/#\S+", units.log.read_text())
    assert (units.data / "keys").stat().st_mode & 0o777 == 0o700
    for process in PROCESSES:
        units.start(process)
    assert eventually(units.ready, 90), units.log.read_text()[-5000:]
    for name, process in units.running.items():
        if name != PREPARE.name:
            assert process.poll() is None, (name, units.log.read_text()[-5000:])
            held = {
                line.split("=")[0]
                for line in Path(f"/proc/{process.pid}/environ").read_bytes().decode().split("\0")
                if re.match(r"FAIRWAY_\w+_KEY=.", line)
            }
            (declared,) = (each for each in PROCESSES if each.name == name)
            assert held == ({declared.key_variable} if declared.key else set()), name
    assert eventually(lambda: bool(units.shell(JOB.read_text())), 60), units.log.read_text()[-5000:]
    ended = Job.objects.filter(state="COMPLETED")
    assert eventually(ended.exists, 90), units.log.read_text()[-5000:]
