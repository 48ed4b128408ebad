"""Which tests run on this machine; those that do not are named, with the way to get them."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any

import pytest
from django.conf import settings
from django.db import connection
from pytest_django import DjangoDbBlocker
from xdist.scheduler import LoadScopeScheduling

from portal.management.commands.test import INSTALL_LOCK
from portal.standalone.testing_requirements import (
    MACHINE_REQUIREMENTS,
    MachineRequirement,
    missing_requirements,
    skip_reason,
)
from tests import described_answers, table_flush, table_owner
from tests.changed_settings import change_settings

TEMPLATE_DATABASE = "test_template"
UMASK = os.umask(0o022)
os.umask(UMASK)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the long campaigns")


def pytest_configure() -> None:
    gc.disable()  # until all tests are collected: what that allocates is permanent
    table_flush.flush_by_delete()
    described_answers.check_every_answer()
    change_settings()


_loaded_profiles: set[str] = set()


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Load the profile before the first module that uses hypothesis, which takes half a second to import."""
    if "fairway" not in _loaded_profiles and "hypothesis" in module_path.read_text():
        from hypothesis import settings as drawing

        # no test is timed: a busy machine is no fault
        drawing.register_profile("fairway", drawing.default, deadline=None)
        drawing.load_profile("fairway")
        _loaded_profiles.add("fairway")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="long campaigns need --long"))
    items.sort(key=_priority)


def pytest_collection_finish() -> None:
    """Exclude modules and collected tests from every garbage collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def django_db_keepdb() -> bool:
    """Databases on a server of this run's own end with it; dropping them would wait for their last connections."""
    return "FAIRWAY_TESTS_OWN_SERVER" in os.environ


@pytest.fixture(scope="session")
def setup_lock() -> Iterator[IO[str]]:
    """One lane at a time creates what all share: the template, or on a named server the services' role."""
    with open(settings.DATA_DIR / "setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


@pytest.fixture(scope="session")
def django_db_modify_db_settings(
    django_db_modify_db_settings_parallel_suffix: None,
    django_db_blocker: DjangoDbBlocker,
    setup_lock: IO[str],
) -> None:
    """The first lane of a run brings one database up to date; the others, and the first, take copies of it."""
    if not {"FAIRWAY_TESTS_OWN_SERVER", "PYTEST_XDIST_WORKER"} <= os.environ.keys():
        return
    named = connection.settings_dict
    done = settings.DATA_DIR / "template"
    if not done.exists():
        kept = named["NAME"], named["TEST"]["NAME"]
        named["TEST"]["NAME"] = TEMPLATE_DATABASE
        with django_db_blocker.unblock():
            connection.creation.create_test_db(verbosity=0, autoclobber=True, serialize=False)
            # a database is copied only while nobody is connected to it, also not a connection that is to be shared
            connection.close()
            connection.close_pool()
        named["NAME"], named["TEST"]["NAME"] = kept
        done.touch()
    setup_lock.close()
    named["TEST"]["TEMPLATE"] = TEMPLATE_DATABASE


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, setup_lock: IO[str], django_db_blocker: DjangoDbBlocker) -> None:
    """The owner has created and migrated the database; tests connect as the services do."""
    setup_lock.close()
    with django_db_blocker.unblock():
        table_owner.create_function()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for kind in _requirements(item):
        missing = _missing_requirements(kind)
        if missing:
            pytest.skip(skip_reason(kind, missing))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Fail a test that was connected as another role than the services', and restore the umask.

    Commands of an installation set it for their process; jobs could not enter the folders of later tests' nodes.
    """
    os.umask(UMASK)
    if connection.connection is not None:
        assert connection.connection.info.user == connection.settings_dict["USER"]


@cache
def _missing_requirements(kind: str) -> list[MachineRequirement]:
    """Return what is missing once the installation beside the tests, if there is one, has ended."""
    if INSTALL_LOCK in os.environ:
        with open(os.environ[INSTALL_LOCK]) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
    return missing_requirements(kind)


def _requirements(item: pytest.Item) -> list[str]:
    return [kind for kind in MACHINE_REQUIREMENTS if item.get_closest_marker(kind)]


def _priority(item: pytest.Item) -> tuple[bool, bool, bool]:
    """Heavy tests run last, beside few others; what waits for an installation later; what takes long first."""
    waits = INSTALL_LOCK in os.environ and bool(_requirements(item))
    return item.get_closest_marker("heavy") is not None, waits, item.get_closest_marker("early") is None


@cache
def _lane(path: Path) -> str:
    """Return the lane of a file whose tests use the one engine of this machine; its own path for others."""
    text = path.read_text()
    if not any(fixture in text for fixture in ("podman_node", "own_engine")):
        return str(path)
    return "heavy engine" if "mark.heavy" in text else "engine"


class FileScheduling(LoadScopeScheduling):
    """xdist's `loadfile`, but one lane for all files whose tests have the one engine of this machine.

    In other lanes they would wait for it.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _lane(self.config.rootpath / nodeid.split("::", 1)[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return FileScheduling(config, log)
