"""Ends tasks that exceed their disk limit; the only enforcement where the file system has none."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

from agents.node.host.procfs import MIB
from agents.node.ledger.ledger import RUNNING, Record
from agents.node.runtimes import WritablePaths
from agents.node.spec import report_files
from agents.node.storage.disk_usage import DiskUsage
from agents.node.tasks.task_manager import TaskManager

DISK_LIMIT_EXCEEDED = "disk_limit_exceeded"
CHECK_INTERVAL_S = 10.0
_REST_FACTOR = 20.0
"""Pause after a count, as a multiple of its duration: at most 5 % of one CPU."""
_COUNT_TIMEOUT_S = 600.0


class DiskLimitEnforcer:
    """Counts what each running task has written outside its volumes, one task at a time.

    Earlier files in a home of the runtime ``process`` do not count.
    """

    def __init__(self, tasks: TaskManager, agent: List[str]) -> None:
        self._tasks = tasks
        self._agent = agent
        self._due_s: Dict[str, float] = {}
        self._paths: Dict[str, WritablePaths] = {}
        self._initial_home_bytes: Dict[str, int] = {}
        self._count_process: Optional["subprocess.Popen[bytes]"] = None
        self._stopped = threading.Event()

    def is_due(self) -> bool:
        now_s = time.monotonic()
        return any(self._due_s.get(name, 0.0) <= now_s for name in self._limited_tasks())

    def stop(self) -> None:
        """Abort a running count and start no other."""
        self._stopped.set()
        if self._count_process is not None:
            self._count_process.kill()

    def check_due(self) -> None:
        """Count all tasks that are due, and end those above their limit."""
        limited = self._limited_tasks()
        known: Tuple[Dict[str, Any], ...] = (self._due_s, self._paths, self._initial_home_bytes)
        for each in known:
            for name in set(each) - set(limited):
                del each[name]
        for name, record in limited.items():
            began_s = time.monotonic()
            if self._stopped.is_set() or self._due_s.get(name, 0.0) > began_s:
                continue
            try:
                self._check_task(name, record)
            finally:
                ended_s = time.monotonic()
                self._due_s[name] = ended_s + max(CHECK_INTERVAL_S, _REST_FACTOR * (ended_s - began_s))

    def _check_task(self, name: str, record: Record) -> None:
        runtime = self._tasks.runtimes[record["runtime"]]
        if name not in self._paths:
            written = runtime.writable_paths(name)
            if written is None:
                return
            folder = self._tasks.directories.task_dir(name)
            files = [each.path(folder) for each in report_files.REPORT_FILES]
            self._paths[name] = written._replace(task_paths=[*written.task_paths, *files])
        paths = self._paths[name]
        found = self._count(
            [*paths.command_prefix, *self._agent], [*paths.task_paths, *paths.home_paths], record["pid"] or 0
        )
        if found is None:
            return
        own, home = (
            sum(found.used_bytes[: len(paths.task_paths)]),
            sum(found.used_bytes[len(paths.task_paths) :]),
        )
        used_mib = (own + max(0, home - self._initial_home_bytes.setdefault(name, home))) // MIB
        if not found.complete or used_mib > record["disk_mib"]:
            self._tasks.ledger.update_task(
                name, fault=DISK_LIMIT_EXCEEDED, disk_used_mib=used_mib if found.complete else None
            )
            self._tasks.kill(name)

    def _limited_tasks(self) -> Dict[str, Record]:
        records = self._tasks.ledger.tasks()
        return {
            name: record
            for name, record in records.items()
            if record["phase"] == RUNNING and record.get("disk_mib") is not None
        }

    def _count(self, command: List[str], paths: List[str], pid: int) -> Optional[DiskUsage]:
        """Return the usage of paths; None when it cannot be measured now."""
        request = json.dumps({"paths": paths, "pid": pid})
        self._count_process = subprocess.Popen(
            [*command, "disk-usage", request],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            if self._stopped.is_set():
                self._count_process.kill()
            out, err = self._count_process.communicate(timeout=_COUNT_TIMEOUT_S)
            if self._count_process.returncode == 0:
                return DiskUsage(**json.loads(out))
            why = err.decode(errors="replace").strip()[-300:]
        except subprocess.TimeoutExpired as error:
            self._count_process.kill()
            self._count_process.communicate()
            why = str(error)
        finally:
            self._count_process = None
        if not self._stopped.is_set():
            sys.stderr.write(f"the disk usage of a task cannot be measured: {why}\n")
        return None
