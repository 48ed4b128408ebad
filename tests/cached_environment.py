"""Virtual environments with packages that are not requirements of the tests, built once per machine."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

CACHE = Path(os.environ.get("FAIRWAY_TEST_CACHE", "/var/tmp/fairway-tests"))


def cached_environment(requirement: str) -> Path:
    """Return the folder of a virtual environment with ``name==version``."""
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = CACHE / requirement.replace("==", "-")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            subprocess.run([str(folder / "bin/pip"), "install", "-q", requirement], check=True)
            (folder / "complete").touch()
    return folder
