"""The watch: sees a task end within a tenth of a second, a GPU fall ill, a stop whose patience is over."""

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

from agents.node import machine, task_rows
from agents.node.disk_limit import DiskLimit
from agents.node.gpus import LOST, QUARANTINED, GpuFacts
from agents.node.ledger import EXITED, RUNNING, Record
from agents.node.logs import gather_log
from agents.node.refusals import Refusal
from agents.node.tasks import Tasks

LOOK_EVERY_S = 0.1
"""While something ends, and where the kernel does not tell by itself that a process has ended."""
_SLOW_EVERY_S = 1.0
_ILL_AGAIN_AFTER_S = 30.0
"""One that an administrator gave back too early is told of again, before many tasks are refused on it."""
_HANDS = 4
_Push = Callable[[Dict[str, Any]], None]


class Watch:
    """Waits for the first process of each running task to end; an engine is asked only then.

    Tells of GPUs what changes after it was made, which is before hello.
    """

    def __init__(self, tasks: Tasks, push: _Push, disk: DiskLimit) -> None:
        self._tasks = tasks
        self._push = push
        self._disk = disk
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopped = threading.Event()
        self._told: Set[str] = set()
        self._running: Set[str] = set()
        self._ends: Dict[str, int] = {}  # descriptors that are readable once a task's first process ended
        self._hands = ThreadPoolExecutor(max_workers=_HANDS, thread_name_prefix="settle")
        self._busy: Set[Tuple[str, bool]] = set()
        self._retry_at_s: Dict[str, float] = {}
        self._gpus = {facts.uuid: facts for facts in tasks.gpus.gpus()}
        tasks.gpus.new_faults()  # what befell them before is past
        self._ill_again_s = time.monotonic() + _ILL_AGAIN_AFTER_S
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._tasks.poke = self.wake
        self._tasks.gpus.follow_faults()
        self._told = {name for name, each in self._tasks.ledger.tasks().items() if each["phase"] == EXITED}
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._disk.stop()
        self.wake()
        self._thread.join(timeout=5.0)
        self._hands.shutdown(wait=True)

    def wake(self) -> None:
        """Makes the watch look at once."""
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b".")

    def _run(self) -> None:
        slow_at_s = 0.0
        while not self._stopped.is_set():
            try:
                slow = time.monotonic() >= slow_at_s
                if slow:
                    slow_at_s = time.monotonic() + _SLOW_EVERY_S
                    for name in (*self._tasks.past_deadline(time.time()), *self._tasks.mps.lost()):
                        self._hand_on(name, self._tasks.end_now)
                    for key in self._tasks.mps.idle():
                        self._hand_on(key, self._tasks.mps.end_idle)
                    if self._disk.is_due():
                        self._hand_on("disk", lambda _: self._disk.look())
                    self._look_at_gpus()
                self._look(peaks=slow)
            except (Refusal, OSError):
                traceback.print_exc(file=sys.stderr)
                self._stopped.wait(_SLOW_EVERY_S)
            self._sleep()

    def _sleep(self) -> None:
        """Until a task ends, somebody wakes us, or it is time to look anyway.

        Waking up ten times a second for nothing would cost more than all that is done in it.
        """
        told = self._running <= set(self._ends) and not any(not beside for _, beside in tuple(self._busy))
        poll = select.poll()
        for descriptor in (self._wake_read, *self._ends.values()):
            poll.register(descriptor, select.POLLIN)
        poll.poll((_SLOW_EVERY_S if told else LOOK_EVERY_S) * 1000.0)
        with contextlib.suppress(OSError):
            while os.read(self._wake_read, 4096):
                pass

    def _look(self, *, peaks: bool) -> None:
        now_s = time.monotonic()
        running = {n: r for n, r in self._tasks.ledger.tasks().items() if r["phase"] == RUNNING}
        self._running = set(running)
        for name in set(self._ends) - set(running):
            os.close(self._ends.pop(name))
        for name, record in running.items():
            if machine.is_alive(record["pid"], record["pid_start"]):
                self._follow(name, record["pid"])
                if peaks:
                    self._tasks.look_at_peak(name)
                    self._gather(name)
            elif now_s >= self._retry_at_s.get(name, 0.0):
                self._tasks.look_at_peak(name)  # the last chance: the engine is about to remove the group
                self._retry_at_s[name] = now_s + _SLOW_EVERY_S
                if name in self._ends:
                    os.close(self._ends.pop(name))
                self._hand_on(name, self._tasks.settle)
        for name in set(self._retry_at_s) - set(running):
            del self._retry_at_s[name]
        self._tell_ends(self._tasks.ledger.tasks())

    def _gather(self, name: str) -> None:
        self._hand_on(name, partial(gather_log, self._tasks), beside=True)

    def _hand_on(self, name: str, what: Callable[[str], object], *, beside: bool = False) -> None:
        """Lets another thread ask the engine, so that one slow end does not delay the news of others.

        ``beside``: while something else of the same task may be under way.
        """
        key = (name, beside)
        if key in self._busy:
            return
        self._busy.add(key)

        def work() -> None:
            try:
                what(name)
            except (Refusal, OSError):
                traceback.print_exc(file=sys.stderr)
            finally:
                self._busy.discard(key)

        self._hands.submit(work)

    def _follow(self, name: str, pid: int) -> None:
        if name not in self._ends:
            self._tasks.look_at_peak(name)
            self._gather(name)
            descriptor = machine.open_pid(pid)
            if descriptor is not None:
                self._ends[name] = descriptor

    def _tell_ends(self, records: Dict[str, Record]) -> None:
        """Tells each end once in a session; ends before it are told by ``list``."""
        ended = {name for name, record in records.items() if record["phase"] == EXITED}
        for name in sorted(ended - self._told):
            self._push(exited_event(name, records[name]))
        self._told = ended

    def _look_at_gpus(self) -> None:
        for fault in self._tasks.gpus.new_faults():
            self._push({"event": "gpu_xid", **fault._asdict()})
        now = {facts.uuid: facts for facts in self._tasks.gpus.gpus()}
        again = time.monotonic() >= self._ill_again_s
        if again:
            self._ill_again_s = time.monotonic() + _ILL_AGAIN_AFTER_S
        for uuid, before in self._gpus.items():
            facts = now.get(uuid)
            if facts is None:
                gone = "The GPU is no longer on the node."
                facts = now[uuid] = before._replace(health=LOST, health_sentence=gone, fatal=True)
            if _condition(facts) != _condition(before) or (again and facts.health == QUARANTINED):
                self._push(
                    {
                        "event": "gpu_health",
                        "uuid": uuid,
                        "health": facts.health,
                        "message": facts.health_sentence,
                        "fatal": facts.fatal,
                    }
                )
        self._gpus = now


def _condition(facts: GpuFacts) -> Tuple[object, ...]:
    return facts.health, facts.health_sentence, facts.fatal


def exited_event(name: str, record: Record) -> Dict[str, Any]:
    """The event that tells the end of a task."""
    keys = ("job", "attempt", "task", "exit_code", "oom", "peak_memory_mib", "started_s", "ended_s")
    event: Dict[str, Any] = {key: record[key] for key in keys}
    event.update(
        event="exited", container=name, rebooted=bool(record.get("rebooted")), fault=record.get("fault")
    )
    event.update({key: record.get(key) for key in task_rows.TOLD_OF_DISK})
    return event
