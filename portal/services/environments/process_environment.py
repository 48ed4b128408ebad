"""Creates the environment of the runtime ``process``: JupyterLab in its own virtual environment."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from django.conf import settings

from agents.node.host.atomic_files import file_lock, make_folder, write_atomic
from portal.errors import ServiceUnavailable

IMAGE_RECIPE_DIR = Path(settings.BASE_DIR) / "deploy" / "images" / "jupyterlab"
LOCK_FILE = IMAGE_RECIPE_DIR / "requirements.lock"
SERVER_CONFIG = IMAGE_RECIPE_DIR / "files" / "usr" / "local" / "etc" / "jupyter" / "jupyter_server_config.py"
GATEWAY_IDENTITY = SERVER_CONFIG.with_name("gateway_identity.py")
DEFAULT_SETTINGS = SERVER_CONFIG.parent / "labconfig" / "default_setting_overrides.json"
"""JupyterLab asks no new user for news, which would be loaded from another site."""
INSTALL_TIMEOUT_S = 900
MIN_PYTHON = (3, 11)
SYSTEM_PYTHONS = (Path("/usr/bin/python3"), Path("/usr/local/bin/python3"))
TOOL_PORT = 8888
SECRET_FILE = "token"  # noqa: S105  (the name of a file)
"""Name of the secret file (``secret_files`` of a start) that the tool or its configuration reads."""
JUPYTERLAB_TOOL = "jupyterlab"


def jupyterlab_command(prefix: Path | None = None) -> list[str]:
    """Return JupyterLab's argument list; the node fills in {address} and {port}. The secret is in a file.

    Without a prefix JupyterLab is taken from the PATH of the image. These options override a user's own
    configuration, which must not expose the server to the network.
    """
    return [
        str(prefix / "bin" / "jupyter-lab") if prefix else "jupyter-lab",
        "--ServerApp.ip={address}",
        "--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        "--ServerApp.base_url=/",
        "--ServerApp.allow_remote_access=True",
        "--ServerApp.open_browser=False",
        "--ServerApp.terminals_enabled=True",
        "--no-browser",
    ]


def with_gateway_identity(command: list[str]) -> list[str]:
    """Return the command of JupyterLab with the folder of its secrets as the first folder of its configuration.

    ``gateway_identity`` is in it under Jupyter's own name for such a file, so it holds for images of all kinds.
    """
    script = (
        'JUPYTER_CONFIG_PATH="$FAIRWAY_SECRETS${JUPYTER_CONFIG_PATH:+:$JUPYTER_CONFIG_PATH}"; '
        'export JUPYTER_CONFIG_PATH; exec "$@"'
    )
    return ["/bin/sh", "-c", script, "fairway", *command]


@cache
def gateway_identity() -> dict[str, str]:
    """Return the files that a JupyterLab of any image needs beside its secret."""
    return {SERVER_CONFIG.name: GATEWAY_IDENTITY.read_text()}


def code_server_command(program: str = "code-server") -> list[str]:
    """Return code-server's argument list (VS Code); the node fills in {address}, {port} and {secret_file}.

    The gateway sends the hash of the secret as its session cookie; the secret itself is in no argument.
    """
    script = (
        'HASHED_PASSWORD=$(tr -d "\\n" <"$1" | sha256sum | cut -c1-64); export HASHED_PASSWORD; '
        'exec "$0" --auth password --bind-addr "$2" --disable-telemetry --disable-update-check "$HOME"'
    )
    return ["sh", "-c", script, program, "{secret_file}", "{address}:{port}"]


def ensure_process_jupyterlab(data_dir: Path) -> Path:
    """Install JupyterLab from the hash-locked file below ``data_dir`` unless installed; return its directory.

    Repeatable and safe for concurrent calls: a lock file makes a second caller wait, and an interrupted
    install is started again. Raise ServiceUnavailable with the end of the installer's output.
    """
    files = (LOCK_FILE, SERVER_CONFIG, GATEWAY_IDENTITY, DEFAULT_SETTINGS)
    lock = b"".join(each.read_bytes() for each in files) + sys.version.encode()
    name = f"jupyterlab-{hashlib.sha256(lock).hexdigest()[:12]}"
    home = data_dir / "environments"
    make_folder(str(home), 0o755)
    make_folder(str(data_dir / "run"), 0o700)
    prefix = home / name
    with file_lock(str(data_dir / "run" / f"{name}.lock")):
        if not (prefix / "complete").is_file():
            shutil.rmtree(prefix, ignore_errors=True)
            _install(prefix)
            write_atomic(str(prefix / "complete"), b"", mode=0o644)
    return prefix


def _install(prefix: Path) -> None:
    # the portal's own pip, so that a system without ensurepip works too
    _run([str(world_readable_python()), "-m", "venv", "--without-pip", str(prefix)])
    _run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(prefix / "bin" / "python"),
            "install",
            "--quiet",
            "--no-input",
            "--disable-pip-version-check",
            "--require-hashes",
            "--only-binary",
            ":all:",
            "-r",
            str(LOCK_FILE),
        ]
    )
    config = prefix / "etc" / "jupyter"
    make_folder(str(config), 0o755)
    make_folder(str(config / DEFAULT_SETTINGS.parent.name), 0o755)
    for file in (SERVER_CONFIG, GATEWAY_IDENTITY, DEFAULT_SETTINGS):
        write_atomic(str(config / file.relative_to(SERVER_CONFIG.parent)), file.read_bytes(), mode=0o644)


def world_readable_python() -> Path:
    """Return a Python that every account can run: this one, or the system's if this one is not accessible.

    A Python below root's home, for example, cannot be used by the accounts of tasks.
    """
    own = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (own, *SYSTEM_PYTHONS):
        real = python.resolve()
        if not real.is_file() or not all(folder.stat().st_mode & 0o001 for folder in real.parents):
            continue
        version = subprocess.run(
            [str(python), "-c", "import sys, venv; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        if version.returncode == 0 and tuple(map(int, version.stdout.split())) >= MIN_PYTHON:
            return python
    raise ServiceUnavailable(
        f"JupyterLab needs Python {'.'.join(map(str, MIN_PYTHON))} or newer that every account can run; {own} is "
        "in a folder without access for other accounts. Install the distribution's python3.",
        code="environment_failed",
    )


def _run(command: list[str]) -> None:
    try:
        # Tasks run under other accounts: installed files must be readable by them.
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, umask=0o022
        )
    except subprocess.CalledProcessError as error:
        words = (error.stderr or error.stdout or "").strip().splitlines()[-5:]
        raise ServiceUnavailable(
            "JupyterLab could not be installed: " + " ".join(words), code="environment_failed"
        ) from error
    except subprocess.TimeoutExpired as error:
        message = f"Installing JupyterLab took longer than {INSTALL_TIMEOUT_S} s."
        raise ServiceUnavailable(message, code="environment_failed") from error
