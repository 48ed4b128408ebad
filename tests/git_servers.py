"""Real git servers on this machine: over https by git http-backend, and over SSH by sshd."""

from __future__ import annotations

import base64
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

GIT = ("git", "-c", "user.name=ada", "-c", "user.email=ada@example.org", "-c", "protocol.file.allow=always")


class Repository:
    """A bare repository with a branch main, a tag v1 on its first commit, and a way to commit more."""

    def __init__(self, folder: Path) -> None:
        self.bare, self._tree = folder / "lab/vit.git", folder / "tree"
        self.git("init", "-qb", "main", str(self._tree), where=None)
        self.first = self.commit("train.py", "print('first version')\n")
        self.git("tag", "v1")
        self.git("clone", "-q", "--bare", str(self._tree), str(self.bare), where=None)

    def git(self, *words: str, where: Path | str | None = "tree") -> str:
        at = [] if where is None else ["-C", str(self._tree if where == "tree" else where)]
        return subprocess.run([*GIT, *at, *words], check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, name: str, content: str | bytes) -> str:
        """Commit a file; published by ``publish``."""
        path = self._tree / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.git("add", ".")
        self.git("commit", "-qm", name)
        return self.git("rev-parse", "HEAD")

    def publish(self) -> None:
        self.git("push", "-qf", str(self.bare), "main")

    def forget_history(self) -> str:
        """Replace the only branch by a new commit, and remove the old objects."""
        self.git("checkout", "-q", "--orphan", "fresh")
        self.git("commit", "-qm", "fresh")
        self.git("push", "-qf", str(self.bare), "fresh:main", ":refs/tags/v1")
        self.git("reflog", "expire", "--expire=now", "--all", where=self.bare)
        self.git("gc", "-q", "--prune=now", where=self.bare)
        return self.git("rev-parse", "HEAD")


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Return a certificate of this machine that signs itself, and its key."""
    certificate, key = folder / "tls.crt", folder / "tls.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=127.0.0.1"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(words, check=True, capture_output=True)
    certificate.chmod(0o644)
    return certificate, key


@contextmanager
def https_server(folder: Path, token: str = "") -> Iterator[tuple[str, Path]]:
    """Serve the repositories below ``folder``; yield the URL and the certificate that signs it."""
    certificate, key = make_certificate(folder)
    handler = type("Handler", (_Backend,), {"root": folder, "token": token})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}", certificate
    finally:
        server.shutdown()
        server.server_close()


class _Backend(BaseHTTPRequestHandler):
    root: Path
    token: str

    def do_GET(self) -> None:
        wanted = "Basic " + base64.b64encode(f"git:{self.token}".encode()).decode()
        if self.token and self.headers.get("Authorization") != wanted:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="git"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        path, _, query = self.path.partition("?")
        variables: Mapping[str, str] = {
            "GIT_PROJECT_ROOT": str(self.root), "GIT_HTTP_EXPORT_ALL": "1", "PATH_INFO": path,
            "QUERY_STRING": query, "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "HTTP_GIT_PROTOCOL": self.headers.get("Git-Protocol", ""), "PATH": os.environ["PATH"],
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
        }  # fmt: skip
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        answer = subprocess.run(["git", "http-backend"], input=body, env=variables, capture_output=True)
        head, _, content = answer.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.send_response(int(fields.pop("Status", "200 OK").split()[0]))
        for name, value in fields.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_words: object) -> None:
        pass


@contextmanager
def silent_server() -> Iterator[str]:
    """Accept connections and never answer; yield an https URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"https://127.0.0.1:{server.getsockname()[1]}"


def make_key(path: Path) -> tuple[str, str]:
    """Return a new private key, and its public part: type and key."""
    subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path.read_text(), " ".join(path.with_suffix(".pub").read_text().split()[:2])


@contextmanager
def ssh_server(folder: Path, address: str = "127.0.0.1") -> Iterator[tuple[str, str, str]]:
    """Serve git to root over SSH; yield the URL, the deploy key and the public host key."""
    _, host_public = make_key(folder / "host_key")
    deploy, deploy_public = make_key(folder / "deploy_key")
    (folder / "authorized_keys").write_text(f"restrict {deploy_public}\n")
    with socket.create_server((address, 0)) as free:
        port = free.getsockname()[1]
    options = {
        "HostKey": folder / "host_key", "AuthorizedKeysFile": folder / "authorized_keys", "StrictModes": "no",
        "PidFile": "none", "ListenAddress": address, "PermitRootLogin": "yes", "UsePAM": "no",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    process = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", "-p", str(port), *words])
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex((address, port)) == 0:
                    break
            time.sleep(0.05)
        yield f"ssh://root@{address}:{port}", deploy, host_public
    finally:
        process.terminate()
        process.wait()
