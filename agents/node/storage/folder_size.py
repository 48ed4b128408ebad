"""Measures the size of a directory or file of a volume for the portal: bytes and number of files.

A separate process with a low priority and a time limit counts, with the rights of a user's account. The request
is repeated until it has ended.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from typing import Any, Dict, List, NamedTuple

from agents.node import errors
from agents.node.errors import AgentError, invalid_spec
from agents.node.spec.task_spec import parse_mount
from agents.node.storage.files import decode_path, encode_path
from agents.node.storage.job_account import account_fields, become_account, open_beneath
from agents.node.storage.tree_walk import HardLinks, walk_tree
from agents.node.storage.volumes import Volumes

MAX_ENTRIES = 20_000_000
MAX_COUNTS = 2
"""At the same time in one agent process."""
LIMIT_S = 1800
WAIT_S = 2.0
"""How long a request waits for the end of its count."""
_ABANDONED_S = 60.0
"""After this time without a request a count is ended."""
_CPU_S = 900
_PROBLEM_LENGTH = 200
_KINDS = ("host_path", "project")


class FolderSize(NamedTuple):
    """The size of all regular files, each counted once, and their number."""

    size_bytes: int
    files: int


class _Count(NamedTuple):
    process: "subprocess.Popen[str]"
    began_s: float
    lock: threading.Lock
    used_s: List[float]


class FolderSizeCounts:
    """The counts that this agent process has started."""

    def __init__(self, volumes: Volumes, agent_command: List[str]) -> None:
        self._volumes = volumes
        self._agent = agent_command
        self._counts: Dict[str, _Count] = {}
        self._lock = threading.Lock()

    def handle(self, fields: Dict[str, Any]) -> Dict[str, Any]:
        """Start the count of a path below ``mount``, or continue to wait for it."""
        request = json.dumps(self._parse(fields), sort_keys=True)
        count = self._find_or_start(request)
        with count.lock:
            try:
                out, err = count.process.communicate(timeout=WAIT_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() - count.began_s < LIMIT_S:
                    return {"done": False}
                count.process.kill()  # not waited for: a process that waits for a file server does not end
                out, err = "", ""
        with self._lock:
            if self._counts.get(request) is count:
                del self._counts[request]
        status = count.process.returncode
        if status == 0 and out:
            return dict(json.loads(out), done=True)
        if status in (None, -signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL):
            return {"done": True, "problem": f"It could not be counted within {LIMIT_S // 60} minutes."}
        raise AgentError(errors.ENGINE_ERROR, f"It could not be counted: {err.strip()[-_PROBLEM_LENGTH:]}")

    def _find_or_start(self, request: str) -> _Count:
        now_s = time.monotonic()
        with self._lock:
            for key, each in list(self._counts.items()):
                if now_s - each.used_s[0] > _ABANDONED_S and key != request:
                    each.process.kill()
                    del self._counts[key]
            count = self._counts.get(request)
            if count is None:
                if len(self._counts) >= MAX_COUNTS:
                    raise AgentError(errors.FORBIDDEN, "This node already counts other directories.")
                count = self._counts[request] = _Count(self._start(request), now_s, threading.Lock(), [now_s])
            count.used_s[0] = now_s
        return count

    def _start(self, request: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*self._agent, "folder-size", request],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def _parse(self, fields: Dict[str, Any]) -> Dict[str, Any]:
        mount, path = parse_mount(fields.get("mount")), fields.get("path")
        if mount.kind not in _KINDS:
            raise invalid_spec(f"kind of mount is not {' or '.join(_KINDS)}.")
        if not isinstance(path, str) or not path.isprintable():
            raise invalid_spec("path is not printable text.")
        try:
            decode_path(path)
        except ValueError as error:
            raise invalid_spec(str(error)) from error
        return {"folder": self._volumes.locate(mount), "path": path, **account_fields(mount, None, fields)}


# -- the separate process --------------------------------------------------------------------------


class UncountableError(Exception):
    """It is not counted; the message says why."""


def main(request: str) -> int:
    """Carry out a JSON request and print the answer as JSON."""
    fields: Dict[str, Any] = json.loads(request)
    become_account(fields, _CPU_S)
    os.nice(19)
    signal.alarm(LIMIT_S)
    answer: Dict[str, Any]
    try:
        answer = count_path(fields["folder"], decode_path(fields["path"]))._asdict()
    except UncountableError as error:
        answer = {"problem": str(error)[:_PROBLEM_LENGTH]}
    except OSError as error:
        answer = {"problem": f"{_problem_path(fields['path'])} cannot be read: {error.strerror}."}
    except MemoryError:
        answer = {"problem": "It has too many directories or hard links to be counted."}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def _problem_path(text: str) -> str:
    return text[: _PROBLEM_LENGTH // 2] or "The volume"


def count_path(folder: str, parts: List[bytes]) -> FolderSize:
    """Count a directory, or one file, below ``folder``; links are not followed. Raise UncountableError or OSError."""
    descriptor = open_beneath(folder, parts)
    top = os.fstat(descriptor)
    if not stat.S_ISDIR(top.st_mode):
        os.close(descriptor)
        if not stat.S_ISREG(top.st_mode):
            raise UncountableError("It is neither a directory nor a file.")
        return FolderSize(top.st_size, 1)
    os.fchdir(descriptor)
    os.close(descriptor)
    return _count_working_directory()


def _count_working_directory() -> FolderSize:
    hard_links = HardLinks()
    size_bytes, files = 0, 0
    for entries, status in enumerate(walk_tree(".", _refuse_folder), 1):
        if entries > MAX_ENTRIES:
            raise UncountableError(f"It has more than {MAX_ENTRIES:,} entries.")
        if stat.S_ISREG(status.st_mode) and not hard_links.is_repeated(status):
            size_bytes += status.st_size
            files += 1
    return FolderSize(size_bytes, files)


def _refuse_folder(folder: str, error: OSError) -> None:
    """Raise, unless the folder was removed meanwhile."""
    if folder == ".":
        raise error
    if not isinstance(error, FileNotFoundError):
        name = _problem_path(encode_path(os.fsencode(folder[2:])))
        raise UncountableError(f"{name} cannot be read: {error.strerror}.") from error
