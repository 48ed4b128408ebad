"""When this installation was last backed up: a file in the data folder, which no restore carries elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

from agents.node.host.atomic_files import write_atomic

FILE_NAME = "last_backup.json"


def record_backup(data: Path, at_s: float) -> None:
    """Record a successful backup (Unix time); the owner of the folder may read it. Raise OSError."""
    path = data / FILE_NAME
    write_atomic(str(path), json.dumps({"at_s": at_s}).encode())
    if os.geteuid() == 0:
        owner = data.stat()
        # the owner may have put a link there meanwhile
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def last_backup_s(data: Path) -> float | None:
    """Return when the last backup succeeded (Unix time); None if never, or if the file cannot be read."""
    try:
        return float(json.loads((data / FILE_NAME).read_text())["at_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
