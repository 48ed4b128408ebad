"""Renewed TLS files are used by new connections of a running gateway; open connections stay."""

from __future__ import annotations

import datetime as dt
import http.client
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from django.conf import settings

from portal.valkey import portal_health as stored
from tests.standalone.waiting import eventually

ROOT = Path(__file__).parents[2]


def write_pair(folder: Path, serial: int, *, password: bytes | None = None) -> None:
    folder.mkdir(exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=serial))
        .sign(key, hashes.SHA256())
    )
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    )


def point_to(live: Path, target: Path) -> None:
    """Replace a link at once, as certbot does."""
    part = live.with_name("part")
    part.symlink_to(target)
    part.replace(live)


class RunningGateway:
    def __init__(self, live: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.log = log
        environment = {
            **os.environ,
            "REDIS_URL": settings.REDIS_URL,
            "FAIRWAY_WEB_SOCKET": "/nonexistent/web.sock",
            "FAIRWAY_PORTAL_URL": f"https://localhost:{self.port}",
            "FAIRWAY_APPS_DOMAIN": f"apps.localhost:{self.port}",
        }
        tls = ("--tls-cert", str(live / "cert.pem"), "--tls-key", str(live / "key.pem"))
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "portal.gateway", "--port", str(self.port), *tls],
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    def connect(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection("localhost", self.port, timeout=10, context=context)
        connection.connect()
        return connection

    def serial(self) -> int | None:
        """Return the serial number of the certificate that a new connection gets; None without one."""
        try:
            connection = self.connect()
        except OSError:
            return None
        encoded = connection.sock.getpeercert(binary_form=True)
        connection.close()
        return x509.load_der_x509_certificate(encoded).serial_number


@pytest.fixture
def live(tmp_path: Path) -> Path:
    write_pair(tmp_path / "1", 30)
    (tmp_path / "live").symlink_to(tmp_path / "1")
    return tmp_path / "live"


@pytest.fixture
def gateway(live: Path, tmp_path: Path) -> Iterator[RunningGateway]:
    running = RunningGateway(live, tmp_path / "log")
    try:
        assert eventually(lambda: running.serial() == 30, 60), running.log.read_text()
        yield running
    finally:
        running.process.terminate()
        running.process.wait(20)
        stored.forget_gateway_certificate()


def test_renewed_files_are_used_without_a_restart(gateway, live, tmp_path):
    opened = gateway.connect()

    write_pair(tmp_path / "2", 60)
    point_to(live, tmp_path / "2")
    assert eventually(lambda: gateway.serial() == 60, 40), gateway.log.read_text()

    opened.request("GET", "/")
    assert opened.getresponse().read()  # the connection from before was not closed

    # the certificate first and its key long after, in place
    write_pair(tmp_path / "3", 90)
    (tmp_path / "2" / "cert.pem").write_bytes((tmp_path / "3" / "cert.pem").read_bytes())
    assert eventually(lambda: "is not loaded" in gateway.log.read_text(), 40)
    assert gateway.serial() == 60
    assert eventually(lambda: "KEY_VALUES_MISMATCH" in str(refusal()), 20)
    time.sleep(12)
    assert gateway.log.read_text().count("is not loaded") == 1  # once, not at each check
    (tmp_path / "2" / "key.pem").write_bytes((tmp_path / "3" / "key.pem").read_bytes())
    assert eventually(lambda: gateway.serial() == 90, 40)
    assert eventually(lambda: refusal() == "", 20)


def refusal() -> str | None:
    encoded = stored.valkey_client(stored.VALKEY_TIMEOUT_S).hget(stored._KEY, "certificate")
    return None if encoded is None else stored.json.loads(encoded)["refused"]


@pytest.mark.parametrize("damage", ["missing", "empty", "password"])
def test_files_that_cannot_be_used_keep_the_former_certificate(gateway, live, tmp_path, damage):
    write_pair(tmp_path / "2", 60, password=b"secret" if damage == "password" else None)
    if damage == "missing":
        (tmp_path / "2" / "key.pem").unlink()
    if damage == "empty":
        (tmp_path / "2" / "cert.pem").write_bytes(b"")
    point_to(live, tmp_path / "2")
    assert eventually(lambda: "is not loaded" in gateway.log.read_text(), 40)
    assert gateway.serial() == 30
