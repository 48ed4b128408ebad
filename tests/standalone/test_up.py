"""`manage.py up` for real: from an empty folder to an answer, through crashes, to nothing left behind."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psycopg
import pytest

from portal.config.data_paths import OWNER_ROLE, SERVICES_ROLE, sockets_dir
from portal.standalone.account import service_account
from portal.tracking.client import TrackingUnavailable, send
from tests.process_environment import SERVER_VARIABLES
from tests.standalone.data_folder_access import make_as_before, wrong_access
from tests.standalone.waiting import READY_LINE, alive, eventually

ROOT = Path(__file__).parent.parent.parent
SERVERS = {"postgres", "valkey", "web", "gateway"}
WORKERS = {"worker-cycle", "worker-ask", "worker-replay", "worker-nodes", "collector", "beat", "tracking"}
KEYS = {"gateway": "TUNNEL", "worker-nodes": "CONTROL", "collector": "WATCH"}
START_LIMIT_S = 120

pytestmark = [pytest.mark.heavy, pytest.mark.early, pytest.mark.timeout(300)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Up:
    """One `manage.py up`, its lines collected as they come."""

    def __init__(self, data: Path, *options: str, port: int | None = None, umask: int = 0o022) -> None:
        self.data, self.port = data, port or free_port()
        drop = SERVER_VARIABLES | {
            "FAIRWAY_SECRET_KEY",
            "FAIRWAY_PORTAL_URL",
            "FAIRWAY_ALLOWED_HOSTS",
        }
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "up", "--data-dir", str(data), "--port", str(self.port), *options],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name not in drop},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            umask=umask,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    def _collect(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_answer(self) -> None:
        assert eventually(
            lambda: READY_LINE.search(self.text) is not None or self.process.poll() is not None, START_LIMIT_S
        )
        assert self.process.poll() is None, self.text

    def wait_end(self) -> int:
        code = self.process.wait(60)
        self._reader.join(5)
        return code

    def pids(self) -> dict[str, int]:
        rows = json.loads((self.data / "run" / "children.json").read_text())
        return {row["name"]: row["pid"] for row in rows}

    def get(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path, headers={"Host": f"localhost:{self.port}"})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()


def as_owner(data: Path) -> psycopg.Connection:
    """A connection to the PostgreSQL of the data folder as the owner of its tables."""
    return psycopg.connect(host=str(sockets_dir(data)), user=OWNER_ROLE, dbname="fairway", autocommit=True)


def drop_services_role(owner: psycopg.Connection) -> bool:
    """Return False if it must be tried again: MLflow was killed before, and changes its tables as it starts."""
    try:
        owner.execute(f"DROP OWNED BY {SERVICES_ROLE}")
        owner.execute(f"DROP ROLE {SERVICES_ROLE}")
    except (psycopg.errors.DeadlockDetected, psycopg.errors.DependentObjectsStillExist):
        return False
    return True


def store_artifact(data: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether the tracking server stored a file of a project."""
    monkeypatch.setenv("FAIRWAY_TRACKING_SOCKET", str(sockets_dir(data) / "tracking.sock"))
    path = "/api/2.0/mlflow-artifacts/artifacts/1/run/artifacts/model/weights.bin"
    try:
        with send("vision", "PUT", path, body=b"private") as answer:
            return answer.status == http.HTTPStatus.OK
    except TrackingUnavailable:
        return False


def replies(data: Path, worker: str) -> bool:
    """Return the result of the health check of the containers of workers."""
    broker = f"redis+socket://{sockets_dir(data)}/valkey.sock"
    command = [sys.executable, "deploy/health.py", "worker", worker]
    return subprocess.run(command, cwd=ROOT, env={"REDIS_URL": broker}, check=False).returncode == 0


def submit_short_job(data: Path) -> str:
    """Submit a job that prints its umask, as a member of a project of the demo; return its public id."""
    program = """
from portal.models import Environment, Membership, NodePool
from portal.services.jobs.submission import JobRequest, do_submit_job
member = Membership.objects.filter(project__name="vision").first()
words = ("sh", "-c", "umask; touch ~/kept /tmp/own && id -u")
request = JobRequest(name="short", project=member.project, environment=Environment.objects.get(name="demo-python"),
    pool=NodePool.objects.get(name="demo"), tasks=1, gpus_per_task=0, cpu_milli=100, memory_mib=64, command=words)
print(do_submit_job(member.user, request).public_id)
"""
    kept = {n: v for n, v in os.environ.items() if n not in SERVER_VARIABLES | {"FAIRWAY_SECRET_KEY"}}
    done = subprocess.run(
        [sys.executable, "manage.py", "shell", "--verbosity", "0"],
        cwd=ROOT,
        env=kept | {"FAIRWAY_DATA_DIR": str(data)},
        input=program,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def job_state(data: Path, job: str) -> str:
    with as_owner(data) as owner:
        return str(owner.execute("SELECT state FROM portal_job WHERE public_id = %s", [job]).fetchall()[0][0])


def left_in(data: Path) -> list[str]:
    """Processes whose environment or command line names the data folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(data).encode() in words and alive(int(entry.name)):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80])
    return found


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    """A data folder that the servers' account can pass to, unlike pytest's own folders."""
    folder = Path(tempfile.mkdtemp(prefix="fairway-up-"))
    folder.chmod(0o711)
    yield folder / "data"
    shutil.rmtree(folder)


@pytest.fixture
def start(data: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def begin(*options: str, **how: int) -> Up:
        started.append(Up(data, "--no-local-node", *options, **how))
        return started[-1]

    yield begin
    for up in started:
        if up.process.poll() is None:
            up.process.send_signal(signal.SIGTERM)
            up.wait_end()


def test_up_serves_protects_its_keys_survives_kills_and_cleans_up(
    start: Callable[..., Up], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = start(umask=0o000)
    up.wait_answer()
    assert up.get("/healthz") == up.get("/readyz") == up.get("/sign-in/") == 200
    link = re.search(rf"http://localhost:{up.port}/sign-in/link/#(\S+)", up.text)
    assert link
    assert f"ssh -L {up.port}:127.0.0.1:{up.port} " in up.text
    assert eventually(lambda: set(up.pids()) == SERVERS | WORKERS)

    for name, pid in up.pids().items():
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        held = {
            word.split("=")[0].removeprefix("FAIRWAY_").removesuffix("_KEY")
            for word in environment
            if "_KEY=" in word
        }
        assert held == ({KEYS[name]} if name in KEYS else set()), name
    workers = [f"{name}@fairway" for name in up.pids() if name.startswith("worker-")]
    assert [eventually(partial(replies, data, name)) for name in workers] == [True] * 4
    assert not replies(data, "worker-unknown@fairway")
    assert eventually(lambda: store_artifact(data, monkeypatch)), up.text
    assert wrong_access(data, service_account()) == []
    listening = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=False).stdout
    listeners = [
        line for line in listening.splitlines() if any(f"pid={pid}," in line for pid in up.pids().values())
    ]
    assert [line.split()[3] for line in listeners] in ([], [f"127.0.0.1:{up.port}"])

    with as_owner(data) as owner:
        users = owner.execute(
            "SELECT DISTINCT usename FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        ).fetchall()
        assert users == [(SERVICES_ROLE,)], "no process is the owner of the tables"

    second = start()
    assert second.wait_end() == 1
    assert re.search(
        rf"already running with {data} \(process {up.process.pid}, http://localhost:{up.port}\)", second.text
    )

    at_its_port = start(port=up.port)
    assert at_its_port.wait_end() == 1
    assert f"(process {up.process.pid}, http://localhost:{up.port})" in at_its_port.text, (
        "not: the port is taken"
    )

    before, copy = up.pids(), data.with_name("copy")
    subprocess.run(["cp", "-a", str(data), str(copy)], check=False, capture_output=True)  # files come and go
    beside = Up(copy, "--no-local-node")
    assert beside.wait_end() == 1
    assert re.search(rf"{copy} is a copy of {data} on .*begin-recovery --data-dir {copy}$", beside.text, re.M)
    shutil.rmtree(copy)
    assert up.pids() == before and up.get("/readyz") == 200

    former = up.pids()["worker-ask"]
    os.kill(former, signal.SIGKILL)
    assert eventually(lambda: up.pids().get("worker-ask", former) != former)
    os.kill(up.pids()["postgres"], signal.SIGKILL)
    assert eventually(lambda: up.get("/readyz") == 503, 15)
    assert eventually(lambda: set(up.pids()) == SERVERS | WORKERS and up.get("/readyz") == 200, 60), up.text
    before = up.pids()
    ours = (SERVERS | WORKERS) - {"postgres", "valkey", "worker-replay"}
    for name in ours:  # all at once
        os.kill(before[name], signal.SIGKILL)
    assert eventually(lambda: not {(n, before[n]) for n in ours} & set(up.pids().items()), 60), up.text
    assert eventually(lambda: set(up.pids()) == SERVERS | WORKERS and up.get("/readyz") == 200, 60), up.text
    os.kill(up.pids()["valkey"], signal.SIGKILL)
    assert eventually(lambda: up.pids().get("valkey") is not None and up.get("/readyz") == 200, 60), up.text

    secret = (data / "secret_key").read_bytes()
    cluster = (data / "keys" / "control_ed25519.pub").read_bytes()
    with as_owner(data) as owner:
        # like a data folder that was made before there were two roles
        assert eventually(lambda: drop_services_role(owner), 60)
    up.process.kill()  # the supervisor; what it started lives on
    up.process.wait()
    make_as_before(data)
    again = start("--demo", umask=0o077)
    again.wait_answer()
    assert again.get("/readyz") == 200
    assert (data / "secret_key").read_bytes() == secret
    assert (data / "keys" / "control_ed25519.pub").read_bytes() == cluster
    assert eventually(lambda: again.text.count("scheduler.nodes.dispatch started") > 2, 60), again.text
    job = submit_short_job(data)
    assert eventually(lambda: job_state(data, job) in ("COMPLETED", "FAILED"), 60), again.text
    assert job_state(data, job) == "COMPLETED"
    assert [path.read_bytes() for path in (data / "logs" / job).rglob("0.*") if b"0027" in path.read_bytes()]
    assert wrong_access(data, service_account()) == []
    again.process.send_signal(signal.SIGINT)
    assert again.wait_end() == 0
    assert re.search(r"stopping \d+ jobs? of the demo's simulated nodes", again.text)
    assert left_in(data) == []  # no job of a pretend node outlives its demo


def test_causes_of_a_failed_start_are_reported(start: Callable[..., Up], data: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = start(port=port)
        assert up.wait_end() == 1
        assert f"Port {port} on 127.0.0.1 cannot be used" in up.text
        assert "--port" in up.text
    up = start("--bind", "0.0.0.0")
    assert up.wait_end() == 1
    assert "needs --tls-cert and --tls-key" in up.text
    up = start("--tls-cert", "/nonexistent.pem", "--tls-key", "/nonexistent.key")
    assert up.wait_end() == 1
    assert "/nonexistent.pem cannot be read" in up.text
    mark = data / "postgres" / "PG_VERSION"
    kept = mark.read_text()
    mark.write_text("14\n")
    try:
        up = start()
        assert up.wait_end() == 1
        assert "written by PostgreSQL 14" in up.text
    finally:
        mark.write_text(kept)
    assert left_in(data) == []
