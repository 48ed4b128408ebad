"""A web process with the live socket, for tests that ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.stand import LiveStand


@pytest.fixture
def stand(transactional_db: None, tmp_path: Path) -> Iterator[LiveStand]:
    with LiveStand(tmp_path) as running:
        yield running
