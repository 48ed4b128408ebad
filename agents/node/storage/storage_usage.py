"""Measures the folders of homes and project volumes in a separate process with the lowest priority.

The quota of the file system is read where it counts a folder; other folders are counted file by file.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Dict, List, Tuple

from agents.node.errors import ENGINE_ERROR, AgentError, invalid_spec
from agents.node.host.procfs import read_text
from agents.node.settings import Settings
from agents.node.storage.disk_usage import MAX_ENTRIES, measure_disk_usage
from agents.node.storage.project_quota import read_quota
from agents.node.storage.volumes import LOCAL_FILESYSTEMS, MOUNTINFO, find_mount, is_inside

TIME_LIMIT_S = 300.0
MAX_ROOTS, MAX_FOLDERS = 100, 2000
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}")
_NICE = 19
_POLL_S = 0.2


class StorageMeter:
    """Runs one measurement at a time; ``closing`` ends it."""

    def __init__(self, settings: Settings, agent_command: List[str], closing: threading.Event) -> None:
        self._settings = settings
        self._command = agent_command
        self._closing = closing
        self._lock = threading.Lock()

    def measure(self, fields: Dict[str, Any]) -> Dict[str, Any]:
        """Return the usage of each folder in the folders ``roots``; a blank root is that of the node's homes."""
        roots = fields.get("roots")
        valid = isinstance(roots, list) and len(roots) <= MAX_ROOTS
        if not valid or not all(isinstance(root, str) for root in roots or ()):
            raise invalid_spec(f"roots is not a list of at most {MAX_ROOTS} paths.")
        request = {
            "roots": roots,
            "home_root": self._settings.home_root,
            "allowed": list(self._settings.allowed_mount_roots),
        }
        if not self._lock.acquire(blocking=False):
            raise AgentError(ENGINE_ERROR, "The previous measurement has not ended.")
        with tempfile.TemporaryFile() as out:
            try:
                process = subprocess.Popen(
                    [*self._command, "storage-usage", json.dumps(request)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                )
            except OSError:
                self._lock.release()
                raise
            threading.Thread(target=self._reap, args=(process,), name="storage", daemon=True).start()
            deadline_s = time.monotonic() + TIME_LIMIT_S
            while process.returncode is None and time.monotonic() < deadline_s:
                if self._closing.wait(_POLL_S):
                    break
            in_time = process.returncode is not None
            if not in_time:
                process.kill()  # not waited for: a process that waits for a file server does not end
            out.seek(0)
            rows = [json.loads(line) for line in out.read().splitlines(keepends=True) if line.endswith(b"\n")]
        if in_time and process.returncode != 0:
            raise AgentError(ENGINE_ERROR, f"The measurement ended with status {process.returncode}.")
        newest = {(row["root"], row["name"]): row for row in rows}
        return {"folders": list(newest.values())}

    def _reap(self, process: "subprocess.Popen[bytes]") -> None:
        process.wait()
        self._lock.release()


def main(request: str) -> int:
    """Carry out a JSON request and print a JSON line for each folder; a later line replaces an earlier one."""
    os.nice(_NICE)
    fields: Dict[str, Any] = json.loads(request)
    mounts = read_text(MOUNTINFO) or ""
    paths = [(number, root or fields["home_root"]) for number, root in enumerate(fields["roots"])]
    local = [each for each in paths if find_mount(mounts, each[1])[1] in LOCAL_FILESYSTEMS]
    left = MAX_FOLDERS
    # shares last: a server that does not answer must not hide the results of local disks
    for each in (local, [path for path in paths if path not in local]):
        left -= _measure_roots(each, fields, left)
    return 0


def _measure_roots(roots: List[Tuple[int, str]], fields: Dict[str, Any], max_folders: int) -> int:
    """Print the folders of some roots; return their number."""
    found: List[Tuple[int, str, str]] = []
    for number, root in roots:
        path = os.path.realpath(root)
        if root != fields["home_root"] and not is_inside(path, fields["allowed"]):
            _print(number, "", problem=f"{root} is not in a folder that this node allows for jobs.")
            continue
        try:
            with os.scandir(path) as listed:
                names = sorted(each.name for each in listed if each.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            names = []
        except OSError as error:
            _print(number, "", problem=f"{root} cannot be read: {error.strerror}.")
            continue
        found += [(number, name, os.path.join(path, name)) for name in names if _NAME.fullmatch(name)]
    if len(found) > max_folders:
        _print(found[max_folders][0], "", problem=f"Only {MAX_FOLDERS} folders of a node are measured.")
    counted = [each for each in found[:max_folders] if not _print_quota(*each)]
    for number, name, _ in counted:
        _print(number, name, problem=f"It was not counted within {TIME_LIMIT_S:.0f} s.")
    random.shuffle(counted)  # a folder that takes all the time does not always hide the same ones
    for each in counted:
        _print_count(*each)
    return min(len(found), max_folders)


def _print_quota(number: int, name: str, path: str) -> bool:
    """Print what the file system counts; return False where it does not count this folder."""
    try:
        quota = read_quota(path)
    except OSError:  # the count says why
        return False
    if quota is not None:
        _print(number, name, **quota._asdict())
    return quota is not None


def _print_count(number: int, name: str, path: str) -> None:
    try:
        used = measure_disk_usage([path])
    except OSError as error:
        _print(number, name, problem=f"It cannot be read: {error.strerror}.")
        return
    problem = "" if used.complete else f"Not all of its files were counted; the limit is {MAX_ENTRIES}."
    _print(number, name, used_bytes=used.used_bytes[0], files=used.entries, problem=problem)


def _print(number: int, name: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"root": number, "name": name, **fields}) + "\n")
    sys.stdout.flush()
