"""A web process with the live socket, for tests that ask for it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from django.conf import settings

from tests.engine_harness import harness, shared_harness
from tests.live.testbed import LiveTestbed

__all__ = ["harness", "shared_harness"]

# Test processes beside this one use the same Redis; each has groups of its own.
settings.CHANNEL_LAYERS["default"]["CONFIG"]["prefix"] = f"fairway-{os.getpid()}"


@pytest.fixture(scope="session")
def _running(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveTestbed]:
    """One web process for all tests: starting and ending it takes longer than most of them."""
    with LiveTestbed(tmp_path_factory.mktemp("live")) as running:
        yield running


@pytest.fixture
def testbed(transactional_db: None, _running: LiveTestbed) -> LiveTestbed:
    return _running
