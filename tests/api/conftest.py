"""Fixtures of the REST tests: a world, and rates that do not carry over from test to test."""

from __future__ import annotations

import copy
import secrets
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from django.core.signals import request_finished, request_started
from django.db import close_old_connections, transaction
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from portal.valkey import rate_limits
from tests.api import fixture_data as worlds
from tests.saved_rows import make_once


@pytest.fixture(autouse=True)
def logs_of_this_test(tmp_path: Path, settings: Any) -> None:
    """Logs in a folder of their own."""
    settings.LOG_DIR = tmp_path / "logs"


@pytest.fixture(scope="module")
def make_world() -> Callable[[], worlds.FixtureData]:
    """What makes the world of a file's tests; a file may have its own."""
    return worlds.make


@pytest.fixture(scope="module")
def made(
    make_world: Callable[[], worlds.FixtureData],
    django_db_setup: None,
    django_db_blocker: DjangoDbBlocker,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[worlds.FixtureData, Path]]:
    """A world that the tests of a file share, each in a transaction of its own, and its logs."""
    logs = tmp_path_factory.mktemp("made") / "logs"
    with django_db_blocker.unblock(), transaction.atomic():
        with override_settings(LOG_DIR=logs):
            fixture_data = make_once(_signed_in(make_world))
        yield fixture_data, logs
        transaction.set_rollback(True)


@cache
def _signed_in(make_world: Callable[[], worlds.FixtureData]) -> Callable[[], worlds.FixtureData]:
    """What makes the world with a session for each of its users."""

    def make() -> worlds.FixtureData:
        fixture_data = make_world()
        for actor in fixture_data.people:
            fixture_data.sign_in(actor)
        return fixture_data

    return make


@pytest.fixture
def fixture_data(made: tuple[worlds.FixtureData, Path], db: None, settings: Any) -> worlds.FixtureData:
    """A fresh world."""
    fixture_data, logs = made
    shutil.copytree(logs, settings.LOG_DIR)
    return copy.deepcopy(fixture_data)


@pytest.fixture(autouse=True)
def rates_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts under a name of its own."""
    monkeypatch.setattr(rate_limits, "PREFIX", f"test:rate:{secrets.token_hex(6)}")


@pytest.fixture
def wsgi_on_one_connection() -> Iterator[None]:
    """Requests stay on the connection that holds the test's transaction, as with Django's own test client."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)
