"""Lists the notebooks of a home with their cell of parameters, in a separate process with the owner's rights.

Nothing is executed. Users choose names, sizes and contents, so everything is bounded and no symbolic link is
followed.
"""

from __future__ import annotations

import base64
import json
import os
import stat
import sys
from typing import Any, Dict, Iterator, List, Tuple

from agents.node.errors import invalid_spec
from agents.node.spec.task_spec import parse_mount
from agents.node.storage.job_account import NO_FOLLOW, account_fields, become_account, run_program
from agents.node.storage.volumes import Volumes

MAX_DEPTH = 6
MAX_ENTRIES = 20_000
"""Entries of all folders that are looked at."""
MAX_LISTED = 100
MAX_FILE_BYTES, MAX_READ_BYTES = 8 * 1024 * 1024, 64 * 1024 * 1024
"""Larger notebooks are listed without parameters, and so are those after this total."""
MAX_SOURCE_LENGTH, MAX_SOURCES_BYTES = 4_000, 256 * 1024
MAX_PATH_LENGTH = 400
_TAG = "parameters"
_SKIPPED = ("node_modules", "site-packages", "__pycache__")
_CPU_S = 10


def handle_notebooks(volumes: Volumes, agent_command: List[str], fields: Dict[str, Any]) -> Dict[str, Any]:
    """Return the newest notebooks below the home ``mount``."""
    mount = parse_mount(fields.get("mount"))
    if mount.kind not in ("home", "host_path"):
        raise invalid_spec("The mount is not a home.")
    folder = volumes.locate(mount)
    try:
        owner = os.stat(folder)
    except OSError:  # missing, or a share that hides folders from root
        owner = None
    request = {"folder": folder, **account_fields(mount, owner, fields)}
    return run_program([*agent_command, "notebooks", json.dumps(request)], "The notebooks")


def main(request: str) -> int:
    """Carry out a JSON request and print the answer as JSON."""
    fields: Dict[str, Any] = json.loads(request)
    become_account(fields, _CPU_S)
    answer: Dict[str, Any] = {"notebooks": [], "problem": ""}
    try:
        os.chdir(fields["folder"])
        answer = list_notebooks()
    except FileNotFoundError:
        pass
    except OSError as error:
        answer["problem"] = f"The home cannot be read: {error.strerror}."
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def list_notebooks() -> Dict[str, Any]:
    """Return the notebooks below the working directory, newest first, and why some may be missing."""
    found: List[Tuple[float, int, str]] = []
    problem = ""
    for count, path in enumerate(_walk()):
        if count >= MAX_ENTRIES:
            problem = f"Only {MAX_ENTRIES} files were looked at."
            break
        if path.endswith(".ipynb") and len(path) <= MAX_PATH_LENGTH and _is_text(path):
            facts = os.stat(path, follow_symlinks=False)
            found.append((facts.st_mtime, facts.st_size, path))
    if len(found) > MAX_LISTED:
        problem = problem or f"Only the {MAX_LISTED} newest of {len(found)} notebooks are listed."
    rows, read_bytes, source_bytes = [], 0, 0
    for modified_s, size_bytes, path in sorted(found, reverse=True)[:MAX_LISTED]:
        source, fault = "", "It is too large to read its parameters."
        if size_bytes <= MAX_FILE_BYTES and read_bytes + size_bytes <= MAX_READ_BYTES:
            read_bytes += size_bytes
            source, fault = _read_parameters(path)
        encoded = base64.b64encode(source.encode(errors="replace")).decode()
        source_bytes += len(encoded)
        if source_bytes > MAX_SOURCES_BYTES:
            encoded, fault = "", "There are too many parameters to list them all."
        row = {"path": path, "modified_s": modified_s, "size_bytes": size_bytes}
        rows.append({**row, "source_b64": encoded, "problem": fault})
    return {"notebooks": rows, "problem": problem}


def _walk() -> Iterator[str]:
    """Yield the regular files, and folders as "", without hidden ones."""
    folders = [("", 0)]
    while folders:
        folder, depth = folders.pop()
        try:
            entries = list(os.scandir(folder or "."))
        except OSError:
            continue
        for entry in entries:
            path = os.path.join(folder, entry.name)
            if entry.name.startswith(".") or entry.name in _SKIPPED:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield ""
                if depth < MAX_DEPTH:
                    folders.append((path, depth + 1))
            elif entry.is_file(follow_symlinks=False):
                yield path


def _is_text(path: str) -> bool:
    return all(char.isprintable() for char in path)  # a surrogate of undecodable bytes is not


def _read_parameters(path: str) -> Tuple[str, str]:
    """Return the source of the cell with the tag ``parameters``, and what is wrong with the file."""
    try:
        with open(os.open(path, NO_FOLLOW), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return "", "It is not a regular file."
            content = json.loads(file.read(MAX_FILE_BYTES))
        cells = [cell for cell in content["cells"] if _TAG in cell.get("metadata", {}).get("tags", ())]
        source: Any = cells[0]["source"] if cells else ""
        text = source if isinstance(source, str) else "".join(source)
    except OSError as error:
        return "", f"It cannot be read: {error.strerror}."
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError):
        return "", "It is not a notebook."
    if len(text) > MAX_SOURCE_LENGTH:
        return "", f"Its cell of parameters has more than {MAX_SOURCE_LENGTH} characters."
    return text, ""
