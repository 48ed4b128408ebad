"""Paths that the recipes and the map name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TOP_FOLDERS = "agents|bench|client|deploy|docs|portal|scheduler|static|templates|tests"


@pytest.mark.parametrize("page", ["docs/recipes.md", "docs/map.md"])
def test_named_paths_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    paths = set(re.findall(rf"(?<![\w/])(?:{TOP_FOLDERS})/[\w./<>-]*[\w/>]", text))
    assert len(paths) > 20
    missing = sorted(path for path in paths if "<" not in path and not (ROOT / path).exists())
    assert not missing
