"""Files and folders of an installation and of a node get their modes from ``make_folder`` and ``write_atomic``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("agents", "portal", "scheduler")
WRITERS = {"mkdir", "makedirs", "write_text", "write_bytes", "touch", "copyfile", "copy2", "copytree"}
MODES = {"w", "wb", "wt", "a", "ab", "at", "x", "xb", "xt", "w+", "w+b", "a+"}
OTHER_MODULES = {
    "agents/bundle.py": "sets the mode of the program that it builds",
    "agents/node/host/atomic_files.py": "defines the two functions",
    "agents/node/host/cgroup.py": "control groups have modes of their own",
    "agents/node/host/mount_namespace.py": "sets the umask for the mount points of a job",
    "agents/node/inspection/environment_program.py": "runs beside a job and writes to /proc",
    "agents/node/maintenance/upgrade.py": "sets the mode of the program that it receives",
    "agents/node/storage/archives.py": "writes the code of a job with its account",
    "agents/node/storage/files.py": "writes files of a user with a umask of its own",
    "agents/node/storage/volumes.py": "creates private folders of users, which nobody else enters",
    "portal/bootstrap/environment.py": "writes in the checkout",
    "portal/bootstrap/frontend.py": "writes in the checkout",
    "portal/downloads.py": "writes entries of an archive",
    "portal/management/commands/policy_docs.py": "writes in the checkout",
    "portal/management/commands/subject_docs.py": "writes in the checkout",
    "portal/services/environments/code_server.py": "sets the modes of the folders that it copies",
    "portal/services/environments/code_server_start.py": "writes in the home of a user with its account",
    "portal/standalone/servers/server.py": "sets the modes of the programs that it copies",
    "portal/standalone/temporary_servers.py": "serves tests",
}


def writes(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each call that creates a file or a folder with a mode that the umask changes."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        words = [word.value for word in ast.walk(node) if isinstance(word, ast.Constant)]
        named = {word.arg for word in node.keywords}
        if name in WRITERS or (name == "open" and MODES & set(words) and not named & {"opener", "fileobj"}):
            yield node.lineno, name


def test_every_writer_of_an_installation_names_the_mode() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line} {name}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if str(path.relative_to(ROOT)) not in OTHER_MODULES
        for line, name in writes(path.read_text())
    }
    assert found == set(), "use make_folder or write_atomic of agents/node/host/atomic_files.py"


def test_every_exception_is_needed() -> None:
    assert {name for name in OTHER_MODULES if not list(writes((ROOT / name).read_text()))} == set()
