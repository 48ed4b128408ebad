"""docker-compose.yml, the image and the front server: the promises of the production shape, checked on the files."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
import yaml
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from portal.standalone.servers.binaries import find_valkey

ROOT = Path(__file__).parent.parent.parent
SETTINGS = {
    "FAIRWAY_HOST": "portal.example.org",
    "FAIRWAY_APPS_DOMAIN": "apps.example.net",
    "POSTGRES_PASSWORD": "only-here",
    "DATABASE_PASSWORD": "onlyhere",
    "VALKEY_PASSWORD": "onlyhere",
}
PROCESSES = {
    "web",
    "gateway",
    "worker-cycle",
    "worker-ask",
    "worker-replay",
    "worker-nodes",
    "collector",
    "beat",
    "tracking",
}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


@pytest.mark.skipif(
    not shutil.which("docker-compose"), reason="docker-compose is missing (apt-get install docker-compose)"
)
def test_compose_accepts_the_file() -> None:
    command = ["docker-compose", "--file", "docker-compose.yml", "config", "--quiet"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | SETTINGS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "set it in .env" in done.stderr, "no password has a default"


def test_every_process_has_its_service(services: dict[str, Any]) -> None:
    assert set(services) == PROCESSES | {"front", "postgres", "valkey", "init"}


def test_every_service_is_bounded(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["user"].split(":")[0] not in {"0", "root"}, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        if name != "init":
            assert service["healthcheck"]["test"], name
    assert [name for name, service in services.items() if "ports" in service] == ["front"]
    assert not any("docker.sock" in str(service) for service in services.values())


def test_each_key_is_held_by_one_process(services: dict[str, Any]) -> None:
    holders = {name: service["secrets"] for name, service in services.items() if "secrets" in service}
    assert holders == {"gateway": ["tunnel_key"], "worker-nodes": ["control_key"], "collector": ["watch_key"]}
    assert [
        name
        for name, service in services.items()
        if any("./secrets:" in v for v in service.get("volumes", []))
    ] == ["init"]
    private = [
        v for s in services.values() for v in s.get("volumes", []) if "ed25519" in v and ".pub:" not in v
    ]
    assert private == []


def test_servers_are_not_reachable_from_outside(services: dict[str, Any]) -> None:
    networks = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["networks"]
    assert networks["inside"]["internal"] is True
    assert services["postgres"]["networks"] == services["valkey"]["networks"] == ["inside"]


def test_only_init_has_the_credentials_of_the_owner(services: dict[str, Any]) -> None:
    services_url = "postgres://fairway_app:${DATABASE_PASSWORD:?set it in .env}@postgres:5432/fairway"
    for name in PROCESSES | {"init"}:
        assert services[name]["environment"]["DATABASE_URL"] == services_url, name
    knowing = {name for name, service in services.items() if "POSTGRES_PASSWORD" in str(service)}
    assert knowing == {"init", "postgres"}


def test_valkey_has_a_password_that_no_argument_shows(services: dict[str, Any]) -> None:
    password = "${VALKEY_PASSWORD:?set it in .env}"
    assert services["valkey"]["environment"]["VALKEY_PASSWORD"] == password
    assert "VALKEY_PASSWORD:" not in str(services["valkey"]["command"]), (
        "only the shell in the container fills it in"
    )
    for name in PROCESSES | {"init"}:
        assert services[name]["environment"]["REDIS_URL"] == f"redis://:{password}@valkey:6379/0", name


def test_valkey_of_the_compose_file_requires_the_password(services: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "valkey-server").symlink_to(find_valkey().program)
    port = free_port()
    *shell, script = services["valkey"]["command"]
    script = (
        script.replace("$$", "$").replace("/data/", f"{tmp_path}/").replace("--save", f"--port {port} --save")
    )
    process = subprocess.Popen(
        [*shell, f"cd {tmp_path} && {script}"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "VALKEY_PASSWORD": "onlyhere"},
        stdout=subprocess.DEVNULL,
    )
    try:
        retry = Retry(ConstantBackoff(0.1), 100, supported_errors=(redis.ConnectionError,))
        with redis.Redis(port=port, password="onlyhere", retry=retry) as known:
            assert known.ping()
        for wrong in (None, "guess"):
            once = Retry(ConstantBackoff(0), 0)
            outsider = redis.Redis(port=port, password=wrong, retry=once)
            with outsider, pytest.raises(redis.AuthenticationError):
                outsider.ping()
        assert b"onlyhere" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert (tmp_path / "password.conf").stat().st_mode & 0o077 == 0
    finally:
        process.terminate()
        process.wait(10)


def test_the_image_installs_by_hash_and_drops_root() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "make_environment" in text
    assert "pip install" not in text
    assert text.rindex("USER 10001:0") > text.rindex("RUN ")


CERTIFICATE = (
    "openssl",
    "req",
    "-x509",
    "-newkey",
    "rsa:2048",
    "-nodes",
    "-days",
    "2",
    "-subj",
    "/CN=portal.example.org",
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Front(NamedTuple):
    """The port of the front server with TLS, what came through it, and its port without TLS."""

    port: int
    seen: list[bytes]
    plain: int


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    """nginx with our configuration before a listener that keeps what it gets."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if nginx is None or shutil.which("openssl") is None:
        pytest.skip("nginx or openssl is missing (apt-get install nginx-light openssl)")
    for name in ("portal", "apps"):
        files = ("-keyout", str(tmp_path / f"{name}.key"), "-out", str(tmp_path / f"{name}.pem"))
        subprocess.run([*CERTIFICATE, *files], check=True, capture_output=True)
    upstream = socket.create_server(("127.0.0.1", 0))
    seen: list[bytes] = []

    def listen() -> None:
        while True:
            try:
                connection, _ = upstream.accept()
            except OSError:
                return
            connection.settimeout(2)
            seen.append(connection.recv(65_536))
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
            connection.close()

    threading.Thread(target=listen, daemon=True).start()
    plain, secure = free_port(), free_port()
    text = (ROOT / "deploy" / "front" / "nginx.conf.template").read_text().replace("/tmp/", f"{tmp_path}/")
    for old, new in {
        "${FAIRWAY_HOST}": SETTINGS["FAIRWAY_HOST"],
        "${FAIRWAY_APPS_DOMAIN}": SETTINGS["FAIRWAY_APPS_DOMAIN"],
        "${FAIRWAY_GATEWAY}": f"127.0.0.1:{upstream.getsockname()[1]}",
        "/certificates/": f"{tmp_path}/",
        "listen 8080": f"listen 127.0.0.1:{plain}",
        "listen 8443": f"listen 127.0.0.1:{secure}",
    }.items():
        text = text.replace(old, new)
    if os.geteuid() == 0:
        text = "user root;\n" + text
    (tmp_path / "nginx.conf").write_text(text)
    process = subprocess.Popen(
        [nginx, "-c", str(tmp_path / "nginx.conf"), "-g", "daemon off;"], stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", secure), 1).close()
                break
            except OSError:
                threading.Event().wait(0.05)
        yield Front(secure, seen, plain)
    finally:
        process.terminate()
        process.wait(10)
        upstream.close()


def ask(port: int, raw: bytes, host: str = "portal.example.org") -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(
        socket.create_connection(("127.0.0.1", port), 5), server_hostname=host
    ) as connection:
        connection.sendall(raw)
        return connection.recv(4096)


HOST = b"Host: portal.example.org\r\n"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (
            b"POST / HTTP/1.1\r\n"
            + HOST
            + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"400",
        ),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", b"400"),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", b"501"),
        (b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n", b"400"),
        (b"TRACE / HTTP/1.1\r\n" + HOST + b"\r\n", b"405"),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 99999999\r\n\r\n", b"413"),
    ],
    ids=["two framings", "two lengths", "two encodings", "two hosts", "trace", "too large"],
)
def test_the_proxy_refuses_ambiguous_requests(front: Front, raw: bytes, status: bytes) -> None:
    port, seen, _ = front
    assert ask(port, raw).split(b" ")[1] == status
    assert seen == []


def test_the_proxy_sets_the_client_address(front: Front) -> None:
    port, seen, _ = front
    forged = b"X-Forwarded-For: 6.6.6.6\r\nX_Forwarded_For: 6.6.6.6\r\nForwarded: for=6.6.6.6\r\n"
    answer = ask(port, b"GET /jobs HTTP/1.1\r\n" + HOST + forged + b"\r\n")
    assert b" 200 " in answer
    assert b"max-age=31536000" in answer
    assert b"6.6.6.6" not in seen[0]
    assert b"X-Forwarded-For: 127.0.0.1" in seen[0]


def test_the_proxy_serves_no_other_host(front: Front) -> None:
    with pytest.raises(ssl.SSLError):
        ask(front[0], b"GET / HTTP/1.1\r\nHost: other.example.org\r\n\r\n", host="other.example.org")


def test_the_front_passes_on_no_other_protocol(front: Front) -> None:
    h2c = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    ask(front.port, b"GET /jobs HTTP/1.1\r\n" + HOST + h2c + b"\r\n")
    ask(front.port, b"GET /live/ HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: WebSocket\r\n\r\n")
    plain, socketed = front.seen
    assert b"pgrade" not in plain
    assert b"Upgrade: websocket\r\n" in socketed and b"Connection: upgrade\r\n" in socketed


def test_the_front_means_one_host(front: Front) -> None:
    ask(front.port, b"GET https://portal.example.org/ HTTP/1.1\r\nHost: ws-abc.apps.example.net\r\n\r\n")
    assert b"Host: portal.example.org\r\n" in front.seen[0]


def test_the_proxy_redirects_nowhere_else(front: Front) -> None:
    for host, status in ((b"evil.example", b"421"), (b"portal.example.org", b"308")):
        with socket.create_connection(("127.0.0.1", front.plain), 5) as wire:
            wire.sendall(b"GET /x HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
            assert wire.recv(4096).split(b" ")[1] == status


def test_every_service_imports_with_the_packages_of_its_image() -> None:
    program = Path(__file__).with_name("runtime_only.py")
    settings = {
        "DJANGO_SETTINGS_MODULE": "portal.config.settings",
        "FAIRWAY_SECRET_KEY": "".join(map(chr, range(48, 123))),
    }
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
