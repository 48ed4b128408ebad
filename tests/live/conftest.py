"""A web process with the live socket, for tests that ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine_harness import harness, shared_harness
from tests.live.testbed import LiveTestbed

__all__ = ["harness", "shared_harness"]


@pytest.fixture(scope="session")
def _running(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveTestbed]:
    """One web process for all tests: starting and ending it takes longer than most of them."""
    with LiveTestbed(tmp_path_factory.mktemp("live")) as running:
        yield running


@pytest.fixture
def testbed(transactional_db: None, _running: LiveTestbed) -> LiveTestbed:
    return _running
