"""Events of one node that its actor has not handled yet.

Repetitions are merged when they arrive, in the thread that reads the connection, and the actor takes a bounded
number of events per second. So the database work that a node causes does not grow with the number of its events.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import replace

from agents.engines.replies import (
    EngineEvent,
    GpuFaultReported,
    GpuHealthChanged,
    InvalidEventsReceived,
    TaskExited,
)
from agents.link import TokenBucket

MAX_PENDING = 400
"""Further events are dropped; the next reconciliation finds ends of tasks, the next hello the health of GPUs."""
EVENTS_PER_S, EVENTS_BURST = 20.0, 100.0
"""Events that the actor handles: each costs up to about ten queries."""


class PendingEvents:
    """One event for each task and each fault of a GPU, and the last of each state of its health. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[Hashable, list[EngineEvent]] = {}
        self._budget = TokenBucket(EVENTS_PER_S, EVENTS_BURST)

    def add(self, event: EngineEvent) -> bool:
        """Keep an event, merged with those of the same thing; return True if there was none before."""
        key = _key(event)
        if key is None:
            return False
        with self._lock:
            was_empty = not self._events
            if key in self._events or len(self._events) < MAX_PENDING:
                self._events[key] = _merge(self._events.get(key, []), event)
            return was_empty and bool(self._events)

    def take(self) -> list[EngineEvent]:
        """Return the oldest events that may be handled now; the others stay."""
        with self._lock:
            keys = list(self._events)[: self._budget.available()]
            taken = [event for key in keys for event in self._events.pop(key)]
            self._budget.take(len(taken))
            return taken


def _key(event: EngineEvent) -> Hashable:
    match event:
        case TaskExited():
            return "exit", event.container.key
        case GpuHealthChanged():
            return "health", event.uuid
        case GpuFaultReported():
            return "fault", event.uuid, event.xid
        case InvalidEventsReceived():
            return "invalid"
    return None


def _merge(known: list[EngineEvent], event: EngineEvent) -> list[EngineEvent]:
    """Return the events of one key. States of a GPU keep their order, and a GPU that was lost and responds again is
    another case than one that was never lost."""
    match known, event:
        case _, GpuHealthChanged():
            others = [each for each in known if _state(each) != _state(event)]
            return [*others, event]
        case [GpuFaultReported(count=count)], GpuFaultReported():
            return [replace(event, count=count + event.count)]
        case [InvalidEventsReceived(count=count)], InvalidEventsReceived():
            return [replace(event, count=count + event.count)]
    return [event]


def _state(event: EngineEvent) -> object:
    return isinstance(event, GpuHealthChanged) and (event.health, event.fatal)
