"""The watch: sees a task end within a tenth of a second, a GPU fall ill, a stop whose patience is over."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from typing import Any, Callable, Dict, Optional, Set

from agents.node import machine
from agents.node.gpus import LOST, GpuFacts
from agents.node.ledger import EXITED, RUNNING, Record
from agents.node.refusals import Refusal
from agents.node.tasks import Tasks

LOOK_EVERY_S = 0.1
_SLOW_EVERY_S = 1.0
_Push = Callable[[Dict[str, Any]], None]


class Watch:
    """Looks at the first process of each running task; an engine is asked only when one is gone."""

    def __init__(self, tasks: Tasks, push: _Push) -> None:
        self._tasks = tasks
        self._push = push
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._told: Set[str] = set()
        self._retry_at_s: Dict[str, float] = {}
        self._gpus: Optional[Dict[str, GpuFacts]] = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._tasks.poke = self._wake.set
        self._told = {name for name, each in self._tasks.ledger.tasks().items() if each["phase"] == EXITED}
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._wake.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        slow_at_s = 0.0
        while not self._stopped.is_set():
            try:
                self._look()
                if time.monotonic() >= slow_at_s:
                    slow_at_s = time.monotonic() + _SLOW_EVERY_S
                    self._tasks.enforce_deadlines(time.time())
                    self._look_at_gpus()
            except (Refusal, OSError):
                traceback.print_exc(file=sys.stderr)
                self._stopped.wait(_SLOW_EVERY_S)
            self._wake.wait(LOOK_EVERY_S)
            self._wake.clear()

    def _look(self) -> None:
        records = self._tasks.ledger.tasks()
        now_s = time.monotonic()
        for name, record in list(records.items()):
            if record["phase"] != RUNNING:
                continue
            if machine.is_alive(record["pid"], record["pid_start"]):
                self._tasks.look_at_peak(name)
            elif now_s >= self._retry_at_s.get(name, 0.0):
                self._retry_at_s[name] = now_s + _SLOW_EVERY_S
                if self._tasks.settle(name):
                    self._retry_at_s.pop(name, None)
        self._tell_ends(self._tasks.ledger.tasks())

    def _tell_ends(self, records: Dict[str, Record]) -> None:
        """Tells each end once in a session; ends before it are told by ``list``."""
        ended = {name for name, record in records.items() if record["phase"] == EXITED}
        for name in sorted(ended - self._told):
            self._push(exited_event(name, records[name]))
        self._told = ended

    def _look_at_gpus(self) -> None:
        now = {facts.uuid: facts for facts in self._tasks.gpus.gpus()}
        for uuid, before in (self._gpus or {}).items():
            facts = now.get(uuid)
            health = LOST if facts is None else facts.health
            if health != before.health:
                sentence = facts.health_sentence if facts else "The GPU is no longer on the node."
                self._push({"event": "gpu_health", "uuid": uuid, "health": health, "message": sentence})
            if facts is None:
                now[uuid] = before._replace(health=LOST)
        self._gpus = now


def exited_event(name: str, record: Record) -> Dict[str, Any]:
    """The event that tells the end of a task."""
    keys = ("job", "attempt", "task", "exit_code", "oom", "peak_memory_mib", "started_s", "ended_s")
    event: Dict[str, Any] = {key: record[key] for key in keys}
    event.update(event="exited", container=name, rebooted=bool(record.get("rebooted")))
    return event
