"""Gives every test run a PostgreSQL and a Valkey of its own when the environment names none.

A pytest plugin (loaded by `addopts` in pyproject.toml), because the settings are read before any conftest.py.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from portal.config import data_paths

START_LIMIT_S = 60
NAMED_SERVER_ROLE = "fairway_test_services"
"""The services' role on a server that the environment names; it stays there."""
INFO_OPTIONS = {"--help", "-h", "--version", "--collect-only"}
SERVERLESS = (
    Path("tests/core"),
    Path("tests/replay"),
    Path("tests/planner"),
    Path("tests/recipes"),
)  # a run of these folders alone starts no server
SHARED_FOLDER = Path("/srv/tmp")
"""Of temporary files, for root: the jobs of an agent that runs as root have a /tmp and a /var/tmp of their own, and
tests share folders with them."""
_guardian: subprocess.Popen[str] | None = None
_root: Path | None = None


def _use_shared_folder() -> None:
    SHARED_FOLDER.mkdir(exist_ok=True)
    SHARED_FOLDER.chmod(0o1777)
    os.environ["TMPDIR"] = str(SHARED_FOLDER)
    tempfile.tempdir = None  # read again


def _needs_servers(arguments: list[str]) -> bool:
    if INFO_OPTIONS & set(arguments):
        return False
    root = Path(__file__).parent.parent
    paths = [Path(argument.split("::", 1)[0]).absolute() for argument in arguments if argument[:1] != "-"]
    named = [path.relative_to(root) for path in paths if path.is_relative_to(root) and path.exists()]
    return not named or not all(any(path.is_relative_to(each) for each in SERVERLESS) for path in named)


def _start_services() -> None:
    """A data folder of this run's own, and both servers in it unless others are named; they start meanwhile."""
    global _guardian, _root
    _root = Path(tempfile.mkdtemp(prefix="fairway-tests-"))
    _root.chmod(0o711)
    (_root / "run").mkdir(mode=0o700)  # it exists before an installation reads its settings, too
    os.environ["FAIRWAY_DATA_DIR"] = str(_root)
    os.environ.setdefault("FAIRWAY_SECRET_KEY", secrets.token_urlsafe(64))
    if os.environ.get("DATABASE_URL"):
        _name_services_role()
        if os.environ.get("REDIS_URL"):
            return
    if _needs_servers(sys.argv[1:]):
        if not os.environ.get("DATABASE_URL"):
            os.environ["FAIRWAY_TESTS_OWN_SERVER"] = "1"
        _guardian = subprocess.Popen(
            [sys.executable, "-m", "portal.standalone.temporary_servers", str(_root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
    if not os.environ.get("DATABASE_URL"):
        os.environ["DATABASE_URL"] = data_paths.database_url(_root)
        os.environ["DATABASE_OWNER_URL"] = data_paths.database_url(_root, data_paths.OWNER_ROLE)
    os.environ.setdefault("REDIS_URL", data_paths.redis_url(_root))


def _name_services_role() -> None:
    """Make the role of ``DATABASE_URL`` the owner unless one is named, and create another name for the services."""
    if os.environ.get("DATABASE_OWNER_URL"):
        return
    named = urlsplit(os.environ["DATABASE_URL"])
    os.environ["DATABASE_OWNER_URL"] = named.geturl()
    role = f"{NAMED_SERVER_ROLE}:{secrets.token_urlsafe(24)}"
    os.environ["DATABASE_URL"] = named._replace(netloc=f"{role}@{named.netloc.rpartition('@')[2]}").geturl()


def _use_own_redis_database(lane: str) -> None:
    """A lane empties Valkey as it likes: it has a database of it to itself, as it has one of PostgreSQL."""
    shared, first, _ = os.environ.get("REDIS_URL", "").rpartition("?db=0")
    if first and "FAIRWAY_TESTS_OWN_SERVER" in os.environ:
        os.environ["REDIS_URL"] = f"{shared}?db={int(lane.removeprefix('gw')) + 1}"


if os.geteuid() == 0:
    _use_shared_folder()
if "PYTEST_XDIST_WORKER" not in os.environ:
    _start_services()
else:
    _use_own_redis_database(os.environ["PYTEST_XDIST_WORKER"])


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Waits for the servers after collection, which took about as long as they need."""
    if _guardian is None or _guardian.stdout is None:
        return
    answer = json.loads(_guardian.stdout.readline() or '{"trouble": "the test servers did not start"}')
    if "trouble" in answer:
        pytest.exit(answer["trouble"], returncode=3)


def pytest_unconfigure() -> None:
    if _guardian is not None:
        _guardian.communicate(timeout=START_LIMIT_S)  # the end of its input ends it
    if _root is not None:
        shutil.rmtree(_root, ignore_errors=True)
