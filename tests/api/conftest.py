"""Fixtures of the REST tests: a world, and rates that do not carry over from test to test."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from portal import throttle
from tests.api import world as worlds


@pytest.fixture(autouse=True)
def logs_of_this_test(tmp_path: Path, settings: Any) -> None:
    """Logs in a folder of their own."""
    settings.LOG_DIR = tmp_path / "logs"


@pytest.fixture
def world(db: None) -> worlds.World:
    """A fresh world."""
    return worlds.make()


@pytest.fixture(autouse=True)
def rates_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts under a name of its own."""
    monkeypatch.setattr(throttle, "PREFIX", f"test:rate:{secrets.token_hex(6)}")
