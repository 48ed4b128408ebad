"""Gives every test run a PostgreSQL and a Valkey of its own when the environment names none.

A pytest plugin (loaded by `addopts` in pyproject.toml), because the settings are read before any conftest.py.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from portal.config import places

START_LIMIT_S = 60
_guardian: subprocess.Popen[str] | None = None

os.environ.setdefault("FAIRWAY_SECRET_KEY", secrets.token_urlsafe(64))


def _needed() -> bool:
    return not (os.environ.get("DATABASE_URL") and os.environ.get("REDIS_URL"))


def _is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def _begin() -> None:
    """Starts both servers in the background; their addresses are known before they answer."""
    global _guardian
    root = Path(tempfile.mkdtemp(prefix="fairway-tests-"))
    _guardian = subprocess.Popen(
        [sys.executable, "-m", "portal.standalone.temporary", str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    os.environ.setdefault("DATABASE_URL", places.database_url(root))
    os.environ.setdefault("REDIS_URL", places.redis_url(root))


if _needed() and not _is_worker() and not {"--help", "-h", "--version", "--collect-only"} & set(sys.argv):
    _begin()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Waits for the servers after collection, which took about as long as they need."""
    if _guardian is None or _guardian.stdout is None:
        return
    answer = json.loads(_guardian.stdout.readline() or '{"trouble": "the test servers did not start"}')
    if "trouble" in answer:
        pytest.exit(answer["trouble"], returncode=3)


def pytest_unconfigure() -> None:
    if _guardian is not None and _guardian.stdin is not None:
        _guardian.stdin.close()
        _guardian.wait(START_LIMIT_S)
