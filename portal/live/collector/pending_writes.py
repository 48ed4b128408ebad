"""Writes down what gathered of nodes: minutes, logs, foreign programs, shares that are exceeded, malformed frames.

Each node has notes of its own. What the database refuses of one node costs the others nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError, transaction

from portal.domain.node_breaker import IncidentKind
from portal.live.collector.gpu_memory_overuse import REPORT_AFTER_S, GpuMemoryOveruse
from portal.models import Node
from portal.services.jobs.gpu_memory_limit import stop_memory_overuse
from portal.services.jobs.logs import record_log_progress
from portal.services.nodes import breaker
from portal.services.nodes.gpus import record_foreign_processes
from portal.services.nodes.metrics_rollup import save_node_metrics

log = logging.getLogger(__name__)

DATABASE_UNAVAILABLE = (OperationalError, InterfaceError)
"""The database does not answer: everything is tried again."""

Minute = tuple[str, int, dict[str, object]]


@dataclass
class PendingWrites:
    """What gathered of one node and is not written down yet."""

    minutes: list[Minute] = field(default_factory=list)
    joules: dict[tuple[str, int], float] = field(default_factory=dict)
    """By job (public id) and attempt, in these minutes."""
    logs: dict[int, int] = field(default_factory=dict)
    """How far the log of each task (row number) is mirrored."""
    foreign_users: dict[str, str] = field(default_factory=dict)
    """By GPU whose program that is no job's works on it."""
    overuse: dict[str, GpuMemoryOveruse] = field(default_factory=dict)
    """By job."""
    malformed: str = ""
    """How many frames could not be read, as a message; blank: none, or it was told a moment ago."""

    def add_minute(self, node: str, start_s: int, columns: dict[str, object]) -> None:
        self.minutes.append((node, start_s, columns))

    def add_joules(self, attempts: Mapping[tuple[str, int], float]) -> None:
        for attempt, joules in attempts.items():
            self.joules[attempt] = self.joules.get(attempt, 0.0) + joules

    def restore(self, failed: PendingWrites, max_minutes: int) -> None:
        """Takes what could not be written; of minutes the newest. Who is over is told again with the next sample."""
        self.minutes = (failed.minutes + self.minutes)[-max_minutes:]
        self.add_joules(failed.joules)
        self.logs = failed.logs | self.logs
        self.foreign_users = failed.foreign_users | self.foreign_users
        self.malformed = self.malformed or failed.malformed


def flush(pending: Mapping[str, PendingWrites]) -> None:
    """Writes what gathered of each node (public id), and takes it out of the notes.

    Raises one of ``AWAY`` when the database does not answer; what was not written is then still in the notes.
    """
    try:
        _write_minutes(pending)
    except DATABASE_UNAVAILABLE:
        raise
    except (DatabaseError, ValueError):  # of whose rows, the database does not say
        for node, each in pending.items():
            with _isolated(node):
                _write_minutes({node: each})
    for node, each in pending.items():
        with _isolated(node):
            _write_rest(node, each)


@contextlib.contextmanager
def _isolated(node: str) -> Iterator[None]:
    try:
        with transaction.atomic():
            yield
    except DATABASE_UNAVAILABLE:
        raise
    except (DatabaseError, ValueError):
        log.exception("what node %s sent could not be written down and is lost", node)


def _write_minutes(pending: Mapping[str, PendingWrites]) -> None:
    """All or none of them, in one transaction: hundreds of nodes end a minute at the same moment."""
    minutes = [minute for each in pending.values() for minute in each.minutes]
    if not minutes:
        return
    joules = PendingWrites()
    for each in pending.values():
        joules.add_joules(each.joules)
    save_node_metrics(minutes, joules.joules)
    for each in pending.values():
        each.minutes, each.joules = [], {}


def _write_rest(node: str, pending: PendingWrites) -> None:
    for task_id, offset in pending.logs.items():
        record_log_progress(task_id, offset, complete=False)
    if pending.foreign_users:
        record_foreign_processes(node, pending.foreign_users)
    for each in pending.overuse.values():
        figures = {"used_mib": each.used_mib, "share_mib": each.share_mib}
        stop_memory_overuse(node, each.job, each.attempt, each.uuid, seconds=REPORT_AFTER_S, **figures)
    if pending.malformed:
        row = Node.objects.filter(public_id=node).first()
        if row is not None:
            breaker.record_incident(row.pk, IncidentKind.MALFORMED, message=pending.malformed)
    pending.logs, pending.foreign_users, pending.overuse, pending.malformed = {}, {}, {}, ""
