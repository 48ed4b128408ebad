"""SSH to a running job with the real OpenSSH client: command line, gateway, engine, agent and a real task."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from portal.asgi import application
from portal.models import ApiToken, AuditEntry, Job, User
from portal.services.accounts.tokens import Scope, do_create_token, do_revoke_token
from portal.services.jobs.submission import do_cancel_job
from tests import factories
from tests.engine_harness import wait_for
from tests.gateway.gateway_harness import Testbed

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.ssh


class WholeTestbed(Testbed):
    """With the real web application behind the gateway, whose report of addresses it trusts as in production."""

    web_application = staticmethod(ProxyHeadersMiddleware(application, trusted_hosts="*"))


class Laptop:
    """A computer of a user with the command line and a block in its SSH configuration."""

    def __init__(self, folder: Path, url: str, token: str) -> None:
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FAIRWAY_")},
            "FAIRWAY_URL": url,
            "FAIRWAY_TOKEN": token,
            "XDG_CONFIG_HOME": str(folder),
            "PYTHONPATH": str(ROOT),
        }
        self._config = folder / "ssh_config"

    def fairway(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "client", *words],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        )

    def configure(self) -> None:
        printed = self.fairway("ssh-config")
        assert printed.returncode == 0, printed.stderr
        self._config.write_bytes(printed.stdout)

    def start(self, *words: str, **pipes: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["ssh", "-F", str(self._config), *words], env=self.environment, **pipes)

    def ssh(self, *words: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["ssh", "-F", str(self._config), *words],
            env=self.environment,
            input=data,
            capture_output=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def portal(transactional_db: None, tmp_path: Path) -> Iterator[str]:
    with WholeTestbed(tmp_path) as running:
        yield f"http://localhost:{running.port}"


def laptop_of(user: User, portal: str, folder: Path) -> Laptop:
    folder.mkdir()
    return Laptop(folder, portal, do_create_token(user, name="laptop", scopes=[Scope.SSH])[1])


@pytest.fixture
def laptop(owner: User, portal: str, tmp_path: Path) -> Laptop:
    found = laptop_of(owner, portal, tmp_path / "laptop")
    found.configure()
    return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_commands_terminals_and_forwarded_ports(
    laptop: Laptop, portal: str, owner: User, running: Job
) -> None:
    host = f"{running.public_id}.fairway"
    data = os.urandom(1_000_000)
    done = laptop.ssh(host, "cat; echo out-$FAIRWAY_JOB; echo err >&2; exit 7", data=data)
    assert done.returncode == 7, done.stderr
    assert done.stdout == data + f"out-{running.public_id}\n".encode()
    assert done.stderr == b"err\n"

    own = laptop.fairway("ssh", running.public_id, "echo", "$FAIRWAY_JOB")
    assert (own.returncode, own.stdout) == (0, f"{running.public_id}\n".encode()), own.stderr

    # what VS Code sends: a script to bash without a terminal, and connections through a SOCKS port
    inside, outside, socks = free_port(), free_port(), free_port()
    forwarding = laptop.start(
        *("-T", "-L", f"{outside}:127.0.0.1:{inside}", "-D", str(socks), host, "bash"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert forwarding.stdin is not None and forwarding.stdout is not None
    script = (
        'cd "$(mktemp -d)" && printf "hello from the job" > hello.txt\n'
        f"python3 -m http.server --bind 127.0.0.1 {inside} >/dev/null 2>&1 &\n"
        "echo began\n"
    )
    forwarding.stdin.write(script.encode())
    forwarding.stdin.flush()
    assert forwarding.stdout.readline() == b"began\n"
    wait_for(
        "the server answers", lambda: read(f"http://127.0.0.1:{outside}/hello.txt") == "hello from the job"
    )
    with socket.create_connection(("127.0.0.1", socks), timeout=10) as sock:
        sock.sendall(b"\x05\x01\x00")
        assert sock.recv(2) == b"\x05\x00"
        sock.sendall(b"\x05\x01\x00\x01\x7f\x00\x00\x01" + inside.to_bytes(2, "big"))
        assert sock.recv(10)[:2] == b"\x05\x00"
        sock.sendall(b"GET /hello.txt HTTP/1.0\r\n\r\n")
        answer = b""
        while piece := sock.recv(4096):
            answer += piece
        assert answer.endswith(b"hello from the job")
    forwarding.stdin.write(b"kill %1; exit 3\n")
    forwarding.stdin.close()
    assert forwarding.wait(30) == 3

    pid, master = pty.fork()
    if pid == 0:
        os.execvpe("ssh", ["ssh", "-F", str(laptop._config), host], laptop.environment)
    shown = type_into(master, "stty rows 31 columns 97; stty size; tty | cut -c1-8\n", "31 97")
    shown += type_into(master, "echo bye''bye; exit 5\n", "byebye")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    os.close(master)
    assert "/dev/pts" in shown

    wait_for("all ends are audited", lambda: audited(running).count("ssh.close") == 4)
    assert audited(running).count("ssh.open") == 4
    entry = AuditEntry.objects.filter(action="ssh.open").latest("pk")
    assert entry.actor_name == owner.username and entry.address == "127.0.0.1"
    assert entry.after["token"] == "laptop"


def test_others_are_refused_and_connections_end_with_the_token_and_the_job(
    laptop: Laptop, portal: str, owner: User, running: Job, tmp_path: Path
) -> None:
    host = f"{running.public_id}.fairway"
    manager = factories.user()
    running.project.memberships.create(user=manager, role="manager")
    tried = laptop_of(manager, portal, tmp_path / "manager").fairway("ssh-proxy", host)
    assert tried.returncode == 1 and b"permission" in tried.stderr.lower(), tried.stderr
    assert b"is not JOB.fairway" in laptop.fairway("ssh-proxy", "../x").stderr
    assert laptop.ssh("-o", "ExitOnForwardFailure=yes", "-W", "10.0.0.1:80", host).returncode != 0
    assert not AuditEntry.objects.filter(action="ssh.open").exclude(actor=owner).exists()

    other = laptop_of(owner, portal, tmp_path / "second")
    other.configure()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    by_token, by_job = (each.start(host, "echo ready; cat", **pipes) for each in (other, laptop))
    for each in (by_token, by_job):
        assert each.stdout is not None and each.stdout.readline() == b"ready\n"
    do_revoke_token(owner, ApiToken.objects.filter(owner=owner, scopes=["ssh"]).latest("pk").public_id)
    assert by_token.wait(20) == 255
    assert by_job.poll() is None
    do_cancel_job(owner, Job.objects.get(pk=running.pk))
    assert by_job.wait(20) != 0
    closes = AuditEntry.objects.filter(action="ssh.close")
    wait_for("both ends are audited", lambda: closes.filter(reason__contains="revoked").exists())
    assert laptop.ssh(host, "true").returncode == 255


def read(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())
    except OSError:
        time.sleep(0.1)
        return ""


def type_into(master: int, line: str, answer: str) -> str:
    """What a terminal showed up to the answer to a line."""
    os.write(master, line.encode())
    shown = ""
    while answer not in shown.replace(line.strip(), ""):
        shown += os.read(master, 4096).decode("utf-8", "replace")
    return shown


def audited(job: Job) -> list[str]:
    return list(AuditEntry.objects.filter(object_id=job.public_id).values_list("action", flat=True))
