"""Recognizes a copied data folder: two portals with one cluster's keys would each stop the other's jobs.

The file `original` holds its own inode number. Renaming the folder, a link and a mount elsewhere keep it; a copy, an
archive and a file-based backup do not.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from portal.standalone.errors import StartError

NAME = "original"


def refuse_copy(root: Path) -> None:
    """Raise StartError for a copy; write the file where there is none yet."""
    path = root / NAME
    try:
        inode = path.stat().st_ino
        if not path.is_file():
            raise StartError(f"{path} is not a file: remove it if {root} was never copied.")
        said = json.loads(path.read_text())
        original, where = int(said["inode"]), f"{said['path']} on {said['host']}"
    except FileNotFoundError:
        accept_folder(root)
        return
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        inode, original, where = 1, 0, "another folder"
    if inode != original:
        raise StartError(
            f"The data folder {root} is a copy of {where}: if both ran, each would stop the jobs of the other. "
            "Use the original; or, if it never runs again, accept this copy with: "
            f"manage.py begin-recovery --data-dir {root}"
        )


def accept_folder(root: Path) -> None:
    """Make this folder the original. Raise StartError where it cannot be written."""
    draft = root / f"{NAME}.{os.getpid()}"
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w") as file:
            facts = {
                "inode": os.fstat(handle).st_ino,
                "path": str(root.resolve()),
                "host": socket.gethostname(),
            }
            json.dump(facts, file)
            file.flush()
            os.fsync(handle)
        draft.replace(root / NAME)
    except OSError as error:
        raise StartError(f"{root / NAME} cannot be written: {error.strerror}.") from error
