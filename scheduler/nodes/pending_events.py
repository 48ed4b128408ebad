"""Events of one node that its actor has not handled yet.

Repetitions are merged when they arrive, in the thread that reads the connection, and the actor takes a bounded
number of events per second. So the database work that a node causes does not grow with the number of its events.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

from agents.engines.interface import (
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
    """One event for each task, each fault of a GPU and each state of its health. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[Hashable, EngineEvent] = {}
        self._budget = TokenBucket(EVENTS_PER_S, EVENTS_BURST)

    def add(self, event: EngineEvent) -> bool:
        """Keep an event, merged with an equal one; return True if there was none before."""
        key = _key(event)
        if key is None:
            return False
        with self._lock:
            was_empty = not self._events
            known = self._events.get(key)
            if known is not None or len(self._events) < MAX_PENDING:
                self._events[key] = event if known is None else _merge(known, event)
            return was_empty and bool(self._events)

    def take(self) -> list[EngineEvent]:
        """Return the oldest events that may be handled now; the others stay."""
        with self._lock:
            keys = list(self._events)[: self._budget.available()]
            self._budget.take(len(keys))
            return [self._events.pop(key) for key in keys]


def _key(event: EngineEvent) -> Hashable:
    match event:
        case TaskExited():
            return "exit", event.container.key
        case GpuHealthChanged():
            # a GPU that was lost and responds again is another case than one that was never lost
            return "health", event.uuid, event.health, event.fatal
        case GpuFaultReported():
            return "fault", event.uuid, event.xid
        case InvalidEventsReceived():
            return "invalid"
    return None


def _merge(known: EngineEvent, event: EngineEvent) -> EngineEvent:
    if isinstance(known, GpuFaultReported) and isinstance(event, GpuFaultReported):
        return GpuFaultReported(event.uuid, event.xid, known.count + event.count)
    if isinstance(known, InvalidEventsReceived) and isinstance(event, InvalidEventsReceived):
        return InvalidEventsReceived(known.count + event.count, event.error)
    return event
