"""Nothing we install is below the versions in which known holes were closed (RELIABILITY section 5.4)."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from portal.bootstrap.environment import pins

ROOT = Path(__file__).parent.parent.parent
FLOORS = {
    "django": "5.2.13",
    "djangorestframework": "3.17.2",
    "celery": "5.2.2",
    "paramiko": "3.4",
    "h11": "0.16",
    "pip": "25.3",
    "setuptools": "78.1.1",
}


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock"])
def test_no_pin_is_below_its_floor(lock: str) -> None:
    pinned = {name: Version(version) for name, version, _ in pins((ROOT / lock).read_text())}
    below = {name: str(pinned[name]) for name, floor in FLOORS.items() if pinned[name] < Version(floor)}
    assert below == {}


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock", "package-lock.json"])
def test_locks_name_no_registry(lock: str) -> None:
    text = (ROOT / lock).read_text()
    assert "index-url" not in text.replace("--no-emit-index-url", "")
    assert '"resolved"' not in text


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock"])
def test_every_pin_has_a_hash(lock: str) -> None:
    text = (ROOT / lock).read_text()
    blocks = text.split("\n")
    starts = [i for i, line in enumerate(blocks) if "==" in line and not line.startswith((" ", "#"))]
    assert starts
    assert all("--hash=sha256:" in blocks[i + 1] for i in starts)
