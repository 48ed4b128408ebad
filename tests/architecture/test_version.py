"""One version of Fairway, in everything that names it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import client
from agents.node.server import AGENT_VERSION
from portal.version import VERSION

ROOT = Path(__file__).parent.parent.parent


def test_every_package_has_the_same_version() -> None:
    declared = {
        name: tomllib.loads((ROOT / name).read_text())["project"]["version"]
        for name in ("pyproject.toml", "client/pyproject.toml")
    }
    declared |= {"agent": AGENT_VERSION, "client": client.__version__}
    assert declared == dict.fromkeys(declared, VERSION)


def test_the_changelog_has_the_version() -> None:
    releases = re.findall(
        r"^## (\S+)(?: \((\d{4}-\d\d-\d\d)\))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert releases[0] == ("Unreleased", "")
    assert releases[1][0] == VERSION and releases[1][1]


def test_the_command_line_prints_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "client", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"fairway {VERSION}\n"
