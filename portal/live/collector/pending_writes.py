"""Writes buffered data of nodes: minutes, logs, foreign processes, exceeded shares, malformed frames.

Each node has its own buffer, so that rows of one node that the database refuses do not affect others.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError, transaction

from portal.domain.nodes.node_breaker import IncidentKind
from portal.live.collector.gpu_memory_overuse import REPORT_AFTER_S, GpuMemoryOveruse
from portal.live.collector.rollup import AttemptGpuUse
from portal.models import Node
from portal.services.jobs.logs import record_log_progress
from portal.services.jobs.task_reports import stop_memory_overuse
from portal.services.nodes import quarantine
from portal.services.nodes.gpus import record_foreign_processes
from portal.services.nodes.metrics_rollup import save_node_metrics

log = logging.getLogger(__name__)

DATABASE_UNAVAILABLE = (OperationalError, InterfaceError)
"""The database does not answer: everything is retried."""

Minute = tuple[str, int, dict[str, object]]
AttemptDay = tuple[str, int, dt.date]
"""A job (public id), the number of an attempt, and a day (UTC)."""


@dataclass
class PendingWrites:
    """Buffered data of one node."""

    minutes: list[Minute] = field(default_factory=list)
    gpu_use: dict[AttemptDay, AttemptGpuUse] = field(default_factory=dict)
    """Within these minutes."""
    logs: dict[int, int] = field(default_factory=dict)
    """Mirrored bytes of each task's log, by primary key."""
    foreign_users: dict[str, str] = field(default_factory=dict)
    """Description of the foreign process, by GPU."""
    overuse: dict[str, GpuMemoryOveruse] = field(default_factory=dict)
    """By job."""
    malformed: str = ""
    """A message on frames that could not be parsed; blank: none, or reported recently."""

    def add_minute(self, node: str, start_s: int, columns: dict[str, object]) -> None:
        self.minutes.append((node, start_s, columns))

    def add_gpu_use(self, attempts: Mapping[AttemptDay, AttemptGpuUse]) -> None:
        for attempt, use in attempts.items():
            self.gpu_use.setdefault(attempt, AttemptGpuUse()).add(use)

    def restore(self, failed: PendingWrites, max_minutes: int) -> None:
        """Take back failed writes, of minutes the newest. The next sample reports overuse again."""
        self.minutes = (failed.minutes + self.minutes)[-max_minutes:]
        self.add_gpu_use(failed.gpu_use)
        self.logs = failed.logs | self.logs
        self.foreign_users = failed.foreign_users | self.foreign_users
        self.malformed = self.malformed or failed.malformed


def flush(pending: Mapping[str, PendingWrites]) -> None:
    """Write the buffers of all nodes (by public id) and empty them.

    Raise one of ``DATABASE_UNAVAILABLE`` when the database does not answer; the unwritten rest stays
    buffered.
    """
    try:
        _write_minutes(pending)
    except DATABASE_UNAVAILABLE:
        raise
    except (DatabaseError, ValueError):  # the error does not name the node
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
        log.exception("data of node %s could not be stored and are lost", node)


def _write_minutes(pending: Mapping[str, PendingWrites]) -> None:
    """Write all or none, in one transaction: hundreds of nodes end a minute at the same time."""
    minutes = [minute for each in pending.values() for minute in each.minutes]
    if not minutes:
        return
    use = PendingWrites()
    for each in pending.values():
        use.add_gpu_use(each.gpu_use)
    columns = {
        key: (row.joules, row.measured_s, row.busy_s, row.idle_s, row.peak_memory_mib)
        for key, row in use.gpu_use.items()
    }
    save_node_metrics(minutes, columns)
    for each in pending.values():
        each.minutes, each.gpu_use = [], {}


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
            quarantine.record_incident(row.pk, IncidentKind.MALFORMED, message=pending.malformed)
    pending.logs, pending.foreign_users, pending.overuse, pending.malformed = {}, {}, {}, ""
