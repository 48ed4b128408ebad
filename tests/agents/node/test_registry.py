"""Images from a registry that wants a login, with real podman: who is refused, who is not, and what stays of it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agents.link import AgentError
from tests.agents.node.conftest import LoneNode

NAME, PASSWORD = "robot", "open-sesame-5d1"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Registry(ThreadingHTTPServer):
    """A registry of one small image, for those who give the password; it looks for it in argument lists."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            entry = tarfile.TarInfo("hello")
            entry.size = 6
            tar.addfile(entry, io.BytesIO(b"hello\n"))
        packed = gzip.compress(layer.getvalue(), mtime=0)
        reported = {
            "architecture": "amd64",
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer.getvalue())]},
        }
        config = json.dumps(reported).encode()
        parts = [("config", "config.v1+json", config), ("layer", "layer.v1.tar+gzip", packed)]
        rows = {
            part: {
                "mediaType": f"application/vnd.oci.image.{kind}",
                "digest": _digest(blob),
                "size": len(blob),
            }
            for part, kind, blob in parts
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": rows["config"],
            "layers": [rows["layer"]],
        }
        self.manifest = json.dumps(manifest).encode()
        self.blobs = {_digest(blob): blob for _, _, blob in parts}
        self.leaks: list[str] = []

    @property
    def image(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}/lab/hello:1"


class _Answer(BaseHTTPRequestHandler):
    server: Registry
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                self.server.leaks += [str(path)] if PASSWORD.encode() in path.read_bytes() else []
            except OSError:
                continue
        wanted = "Basic " + base64.b64encode(f"{NAME}:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != wanted:
            self._say(401, b'{"errors": [{"code": "UNAUTHORIZED", "message": "authentication required"}]}')
        elif "/manifests/" in self.path:
            self._say(200, self.server.manifest, MANIFEST)
        elif "/blobs/" in self.path:
            self._say(200, self.server.blobs[self.path.rpartition("/")[2]])
        else:
            self._say(200, b"{}")

    do_HEAD = do_GET  # noqa: N815 - the name that http.server looks for

    def _say(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="lab"')
        self.send_header("Content-Type", kind)
        self.send_header("Docker-Content-Digest", _digest(body))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


@pytest.fixture
def registry(podman_node: LoneNode) -> Iterator[Registry]:
    with Registry() as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        conf = podman_node.folder / "registries.conf"
        conf.write_text(f'[[registry]]\nlocation = "{served.image.partition("/")[0]}"\ninsecure = true\n')
        podman, *others = json.loads(podman_node.settings_path.read_text())["runtimes"]
        podman["program"] = ["env", f"CONTAINERS_REGISTRIES_CONF={conf}", "podman"]
        podman_node.configure(runtimes=[podman, *others])
        yield served
        served.shutdown()


@pytest.mark.rig
def test_only_the_right_login_pulls_the_image_and_no_credentials_remain(
    podman_node: LoneNode, registry: Registry
) -> None:
    link = podman_node.open()
    with pytest.raises(
        AgentError, match="requires credentials, which an administrator enters under Registries"
    ):
        link.request("pull", timeout_s=60, image=registry.image)
    wrong = {"username": NAME, "password": "guessed"}
    with pytest.raises(AgentError, match="rejected its stored credentials"):
        link.request("pull", timeout_s=60, image=registry.image, login=wrong)
    right = {"username": NAME, "password": PASSWORD}
    answer = link.request("pull", timeout_s=60, image=registry.image, login=right)
    assert answer["image"]["refs"] == [registry.image]
    uploads = podman_node.folder / "state/uploads"
    assert list(uploads.iterdir()) == [] and registry.leaks == []
    held = [path for path in podman_node.folder.rglob("*") if path.is_file() and path.stat().st_size < 10**6]
    words = base64.b64encode(f"{NAME}:{PASSWORD}".encode())
    assert not [path for path in held if words in path.read_bytes() or PASSWORD.encode() in path.read_bytes()]
