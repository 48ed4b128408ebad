"""Monitor: detects task ends within 0.1 s, GPU health changes, and stop deadlines."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Callable, Dict, Set, Tuple

from agents.node.errors import AgentError
from agents.node.gpus import LOST, QUARANTINED, GpuInfo
from agents.node.host import procfs
from agents.node.ledger.ledger import EXITED, RUNNING, Record
from agents.node.tasks import task_rows
from agents.node.tasks.disk_limit import DiskLimitEnforcer
from agents.node.tasks.log_reader import collect_log
from agents.node.tasks.task_manager import TaskManager

POLL_INTERVAL_S = 0.1
"""Polling interval while a task ends, and where the kernel does not support pidfd."""
_SLOW_INTERVAL_S = 1.0
_REPEAT_HEALTH_INTERVAL_S = 30.0
"""Repeats the health of faulty GPUs, in case an administrator returned one to service too early."""
_WORKER_THREADS = 4
_Push = Callable[[Dict[str, Any]], None]


class TaskMonitor:
    """Waits for the first process of each running task to end, and queries an engine only then.

    Reports GPU changes since its creation, which is before hello.
    """

    def __init__(self, tasks: TaskManager, push: _Push, disk_limit: DiskLimitEnforcer) -> None:
        self._tasks = tasks
        self._push = push
        self._disk_limit = disk_limit
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopped = threading.Event()
        self._reported_exits: Set[str] = set()
        self._running: Set[str] = set()
        self._pidfds: Dict[str, int] = {}  # readable once a task's first process ended
        self._executor = ThreadPoolExecutor(max_workers=_WORKER_THREADS, thread_name_prefix="settle")
        self._busy: Set[Tuple[str, bool]] = set()
        self._retry_at_s: Dict[str, float] = {}
        self._reported_gpus = {facts.uuid: facts for facts in tasks.gpus.gpus()}
        tasks.gpus.take_faults()  # discard earlier faults
        self._repeat_health_at_s = time.monotonic() + _REPEAT_HEALTH_INTERVAL_S
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._tasks.wake_monitor = self.wake
        self._tasks.gpus.watch_faults()
        self._reported_exits = {
            name for name, each in self._tasks.ledger.tasks().items() if each["phase"] == EXITED
        }
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._disk_limit.stop()
        self.wake()
        self._thread.join(timeout=5.0)
        self._executor.shutdown(wait=True)

    def wake(self) -> None:
        """Check at once."""
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b".")

    def _run(self) -> None:
        slow_at_s = 0.0
        while not self._stopped.is_set():
            try:
                slow = time.monotonic() >= slow_at_s
                if slow:
                    slow_at_s = time.monotonic() + _SLOW_INTERVAL_S
                    for name in (
                        *self._tasks.tasks_past_deadline(time.time()),
                        *self._tasks.mps_daemons.tasks_without_daemon(),
                    ):
                        self._submit(name, self._tasks.kill)
                    for key in self._tasks.mps_daemons.idle_daemons():
                        self._submit(key, self._tasks.mps_daemons.stop_idle)
                    if self._disk_limit.is_due():
                        self._submit("disk", lambda _: self._disk_limit.check_due())
                    self._check_gpus()
                self._check_tasks(record_peaks=slow)
            except (AgentError, OSError):
                traceback.print_exc(file=sys.stderr)
                self._stopped.wait(_SLOW_INTERVAL_S)
            self._wait()

    def _wait(self) -> None:
        """Wait until a task ends, the monitor is woken, or the polling interval ends.

        With pidfds for all tasks the interval is longer: ten wake-ups per second would cost more than the
        checks.
        """
        reported = self._running <= set(self._pidfds) and not any(
            not beside for _, beside in tuple(self._busy)
        )
        poll = select.poll()
        for descriptor in (self._wake_read, *self._pidfds.values()):
            poll.register(descriptor, select.POLLIN)
        poll.poll((_SLOW_INTERVAL_S if reported else POLL_INTERVAL_S) * 1000.0)
        with contextlib.suppress(OSError):
            while os.read(self._wake_read, 4096):
                pass

    def _check_tasks(self, *, record_peaks: bool) -> None:
        now_s = time.monotonic()
        running = {n: r for n, r in self._tasks.ledger.tasks().items() if r["phase"] == RUNNING}
        self._running = set(running)
        for name in set(self._pidfds) - set(running):
            os.close(self._pidfds.pop(name))
        for name, record in running.items():
            if procfs.is_alive(record["pid"], record["pid_start"]):
                self._watch_process(name, record["pid"])
                if record_peaks:
                    self._tasks.record_peak_memory(name)
                    self._collect_log(name)
            elif now_s >= self._retry_at_s.get(name, 0.0):
                self._tasks.record_peak_memory(name)  # last chance before the engine removes the group
                self._retry_at_s[name] = now_s + _SLOW_INTERVAL_S
                if name in self._pidfds:
                    os.close(self._pidfds.pop(name))
                self._submit(name, self._tasks.finalize)
        for name in set(self._retry_at_s) - set(running):
            del self._retry_at_s[name]
        self._report_exits(self._tasks.ledger.tasks())

    def _collect_log(self, name: str) -> None:
        self._submit(name, partial(collect_log, self._tasks), concurrent=True)

    def _submit(self, name: str, function: Callable[[str], object], *, concurrent: bool = False) -> None:
        """Query the engine in another thread, so that a slow end does not delay others.

        ``concurrent``: may run beside other work on the same task.
        """
        key = (name, concurrent)
        if key in self._busy:
            return
        self._busy.add(key)

        def work() -> None:
            try:
                function(name)
            except (AgentError, OSError):
                traceback.print_exc(file=sys.stderr)
            finally:
                self._busy.discard(key)

        self._executor.submit(work)

    def _watch_process(self, name: str, pid: int) -> None:
        if name not in self._pidfds:
            self._tasks.record_peak_memory(name)
            self._collect_log(name)
            descriptor = procfs.open_pidfd(pid)
            if descriptor is not None:
                self._pidfds[name] = descriptor

    def _report_exits(self, records: Dict[str, Record]) -> None:
        """Report each end once per session; ``list`` reports earlier ones."""
        ended = {name for name, record in records.items() if record["phase"] == EXITED}
        for name in sorted(ended - self._reported_exits):
            self._push(exited_event(name, records[name]) | self._tasks.read_last_reports(name))
        self._reported_exits = ended

    def _check_gpus(self) -> None:
        for fault in self._tasks.gpus.take_faults():
            self._push({"event": "gpu_xid", "uuid": fault.uuid, "xid": fault.xid, "count": fault.occurrences})
        now = {facts.uuid: facts for facts in self._tasks.gpus.gpus()}
        again = time.monotonic() >= self._repeat_health_at_s
        if again:
            self._repeat_health_at_s = time.monotonic() + _REPEAT_HEALTH_INTERVAL_S
        for uuid, before in self._reported_gpus.items():
            facts = now.get(uuid)
            if facts is None:
                gone = "The GPU is no longer on the node."
                facts = now[uuid] = before._replace(health=LOST, health_message=gone, fatal=True)
            if _health_state(facts) != _health_state(before) or (again and facts.health == QUARANTINED):
                self._push(
                    {
                        "event": "gpu_health",
                        "uuid": uuid,
                        "health": facts.health,
                        "message": facts.health_message,
                        "fatal": facts.fatal,
                    }
                )
        self._reported_gpus = now


def _health_state(facts: GpuInfo) -> Tuple[object, ...]:
    return facts.health, facts.health_message, facts.fatal


def exited_event(name: str, record: Record) -> Dict[str, Any]:
    keys = ("job", "attempt", "task", "exit_code", "oom", "peak_memory_mib", "started_s", "ended_s")
    event: Dict[str, Any] = {key: record[key] for key in keys}
    event.update(
        event="exited", container=name, rebooted=bool(record.get("rebooted")), fault=record.get("fault")
    )
    event.update({key: record.get(key) for key in task_rows.DISK_FIELDS})
    return event
