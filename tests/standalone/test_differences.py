"""The process of the tests differs from a service in what docs/reliability.md lists, and in nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connection

from tests.changed_settings import CHANGED, CHANGED_BY_DJANGO
from tests.process_environment import service_environment

ROOT = Path(__file__).parent.parent.parent
HEADING = "## Differences between tests and an installation"
SERVICE = """
import json, django
django.setup()
from django.conf import settings
from django.db import connection
row = connection.cursor().execute("SELECT session_user, current_database()").fetchone()
named = {name: repr(getattr(settings, name)) for name in dir(settings) if name.isupper()}
print(json.dumps({"session": row, "settings": named}))
"""


@pytest.fixture
def service(db: None) -> dict[str, Any]:
    """What a process of the portal that a test starts says of itself."""
    environment = service_environment() | {"DJANGO_SETTINGS_MODULE": "portal.config.settings"}
    done = subprocess.run(
        [sys.executable, "-c", SERVICE], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_process_that_a_test_starts_is_a_service_and_tests_differ_in_the_listed_settings(
    service: dict[str, Any],
) -> None:
    named = connection.settings_dict
    assert service["session"] == [named["USER"], named["NAME"]]
    assert service["settings"]["DATABASE_OWNER"] == "{}"  # only tests know it, to prepare rows
    here = {name: repr(getattr(settings, name)) for name in dir(settings) if name.isupper()}
    differing = {
        name for name in here | service["settings"] if here.get(name) != service["settings"].get(name)
    }
    assert differing == CHANGED | CHANGED_BY_DJANGO | {"DATABASE_OWNER"}


def test_each_changed_setting_is_documented() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    section = text.partition(HEADING)[2].partition("\n## ")[0]
    documented = set(re.findall(r"`([A-Z][A-Z_]+)`", section))
    assert documented >= CHANGED | CHANGED_BY_DJANGO | {"DATABASE_OWNER"}


def test_files_that_the_differences_name_exist() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    section = text.partition(HEADING)[2].partition("\n## ")[0]
    named = set(re.findall(r"\*(\w+/[\w/]+\.py)\*", section))
    assert named and not [name for name in named if not (ROOT / "tests" / name).is_file()]
