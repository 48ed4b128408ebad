"""How long rows are kept: one table, and the one function that deletes what is older, in bounded steps."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from django.db import DatabaseError, connection, transaction
from django.db.models import PROTECT, Exists, Max, Min, OuterRef, Q, QuerySet
from django.utils import timezone

from portal.domain.cluster.retention_settings import (
    AUDIT_RETENTION,
    CYCLE_RETENTION,
    EVENT_RETENTION,
    FORECAST_RETENTION,
    JOB_RETENTION,
    METRICS_RETENTION,
)
from portal.domain.formatting import format_duration
from portal.domain.nodes.node_operations import OperationKind
from portal.domain.scheduling.policy_settings import default_value
from portal.domain.states import LIVE_JOB_STATES, TERMINAL_JOB_STATES
from portal.models import (
    Allocation,
    Attempt,
    AttemptSeconds,
    AttemptWork,
    AuditEntry,
    BrowserSession,
    BulkOperation,
    Checkpoint,
    ClusterSettings,
    Cycle,
    Dependency,
    EngineQuery,
    FileRequest,
    Forecast,
    IdempotencyKey,
    Job,
    JobEvent,
    NodeIncident,
    NodeMetricsMinute,
    NodeOperation,
    OutboxMessage,
    QuotaReplay,
    ScheduleRun,
    Sweep,
    Task,
    Terminal,
    UsageInterval,
)
from portal.selectors.reports.held_time import number_of_day, start_of_day
from portal.selectors.scheduling.settings import cluster_settings
from portal.services.audit import record_action
from portal.services.jobs.logs import delete_logs

log = logging.getLogger(__name__)

MAX_DELETED = 20_000
"""Rows of one kind that one pass deletes; the next pass is ten minutes later."""
BATCH_SIZE = 1_000
MAX_SECONDS = 10.0
"""No batch of a kind begins later in a pass."""


@dataclass(frozen=True)
class RetentionRule:
    """One kind of rows: ``rows`` returns those older than a time. ``setting`` in days is a policy setting of the
    cluster, which replaces ``age``."""

    kind: str
    rows: Callable[[dt.datetime], QuerySet[Any]]
    age: dt.timedelta = dt.timedelta()
    setting: str = ""
    batch_size: int = BATCH_SIZE
    delete: Callable[[QuerySet[Any]], Any] = QuerySet.delete
    """Of the rows of a batch, in one transaction."""

    def current_age(self, settings: dict[str, Any]) -> dt.timedelta:
        """Return the age after which the rows are deleted, with the settings of the cluster."""
        if not self.setting:
            return self.age
        return dt.timedelta(days=float(settings.get(self.setting, default_value(self.setting))))


def _checks(before: dt.datetime) -> QuerySet[Any]:
    kinds = [OperationKind.PREFLIGHT.value, OperationKind.GC.value]
    return NodeOperation.objects.filter(kind__in=kinds, finished_at__lt=before)


def _terminals(before: dt.datetime) -> QuerySet[Any]:
    ended = Q(closed_at__isnull=False) | Q(connected_at__isnull=True)
    return Terminal.objects.filter(ended, requested_at__lt=before)


def _written_before(rows: QuerySet[Any], column: str, before: dt.datetime) -> QuerySet[Any]:
    """Return the rows before a time, for a table in whose order of keys the time of a row increases.

    Such a table needs no index of the time: the search for the first newer row reads only older ones.
    """
    newer = rows.filter(**{f"{column}__gte": before}).order_by("pk").values_list("pk", flat=True).first()
    older = rows.filter(**{f"{column}__lt": before})
    return older if newer is None else older.filter(pk__lt=newer)


def _audit_entries(before: dt.datetime) -> QuerySet[Any]:
    """Of whole days, so that there is one entry about their deletion a day and not one in each pass."""
    day = start_of_day(number_of_day(before.astimezone(dt.UTC).date()))
    return _written_before(AuditEntry.objects.all(), "at", day)


def _delete_audit_entries(rows: QuerySet[Any]) -> None:
    ends = rows.aggregate(first=Min("at"), last=Max("at"))
    number, _ = rows.delete()
    after = {"entries": number} | {name: at.isoformat() for name, at in ends.items()}
    record_action(None, "audit.delete_expired", ClusterSettings.objects.get(), after=after)


def _events(before: dt.datetime) -> QuerySet[Any]:
    return _written_before(JobEvent.objects.all(), "at", before).filter(
        job__ended_at__lt=before, job__state__in=TERMINAL_JOB_STATES
    )


def _sweeps(before: dt.datetime) -> QuerySet[Any]:
    waiting = Q(trials__job__isnull=False) & ~Q(trials__job__state__in=TERMINAL_JOB_STATES)
    return Sweep.objects.filter(ended_at__lt=before).exclude(
        pk__in=Sweep.objects.filter(waiting).values("pk")
    )


def _protected_jobs() -> Iterator[Exists]:
    """Yield a condition for each table whose rows keep a job, except the two ledgers that expire with it."""
    for model, path in (
        (Job, ""),
        (Attempt, "__job"),
        (Task, "__attempt__job"),
        (Allocation, "__task__attempt__job"),
    ):
        for relation in model._meta.related_objects:
            if relation.on_delete is PROTECT and relation.related_model not in (UsageInterval, AttemptWork):
                rows = relation.related_model._default_manager
                yield Exists(rows.filter(**{f"{relation.field.name}{path}": OuterRef("pk")}))


def _jobs(before: dt.datetime) -> QuerySet[Any]:
    """Return ended jobs that no protected row, pinned checkpoint, waiting dependent or later event keeps."""
    kept = [
        *_protected_jobs(),
        Exists(Checkpoint.objects.filter(job=OuterRef("pk"), pinned_at__isnull=False)),
        Exists(Dependency.objects.filter(depends_on=OuterRef("pk"), job__state__in=LIVE_JOB_STATES)),
        Exists(JobEvent.objects.filter(job=OuterRef("pk"), at__gte=before)),
    ]
    return _written_before(Job.objects.all(), "submitted_at", before).filter(
        *(~condition for condition in kept), ended_at__lt=before, state__in=TERMINAL_JOB_STATES
    )


def _delete_jobs(rows: QuerySet[Any]) -> None:
    """Logs first: a job whose logs are gone is found again, logs whose job is gone are not."""
    for job in rows:
        delete_logs(job.public_id)
    UsageInterval.objects.filter(job__in=rows).delete()
    AttemptWork.objects.filter(attempt__job__in=rows).delete()
    rows.delete()


_DAY = dt.timedelta(days=1)
_HOUR = dt.timedelta(hours=1)
RULES = (
    RetentionRule(
        "metrics of nodes per minute",
        lambda before: NodeMetricsMinute.objects.filter(minute__lt=before),
        setting=METRICS_RETENTION,
    ),
    RetentionRule(
        "metrics of short attempts per second, after their end",
        lambda before: AttemptSeconds.objects.filter(attempt__ended_at__lt=before),
        setting=METRICS_RETENTION,
    ),
    RetentionRule(
        "scheduling cycles",
        lambda before: Cycle.objects.filter(started_at__lt=before),
        setting=CYCLE_RETENTION,
    ),
    RetentionRule(
        "replays of quotas",
        lambda before: QuotaReplay.objects.filter(created_at__lt=before),
        setting=CYCLE_RETENTION,
    ),
    RetentionRule(
        "forecasts of starts",
        # the first one of a job that still waits is scored when it starts
        lambda before: Forecast.objects.filter(made_at__lt=before).exclude(
            is_first=True, job__state__in=LIVE_JOB_STATES, started_at__isnull=True
        ),
        setting=FORECAST_RETENTION,
    ),
    RetentionRule("events of ended jobs", _events, setting=EVENT_RETENTION),
    RetentionRule(
        "ended sweeps and their trials; the jobs follow", _sweeps, setting=JOB_RETENTION, batch_size=1
    ),
    RetentionRule(
        "ended jobs with attempts, usage and logs",
        _jobs,
        setting=JOB_RETENTION,
        batch_size=50,
        delete=_delete_jobs,
    ),
    RetentionRule("the audit trail", _audit_entries, setting=AUDIT_RETENTION, delete=_delete_audit_entries),
    RetentionRule(
        "runs of schedules; their jobs stay",
        lambda before: ScheduleRun.objects.filter(due_at__lt=before),
        180 * _DAY,
    ),
    RetentionRule("checks and garbage collections of nodes", _checks, 30 * _DAY),
    RetentionRule("incidents of nodes", lambda before: NodeIncident.objects.filter(at__lt=before), 14 * _DAY),
    RetentionRule("ended terminals; the audit trail stays", _terminals, 7 * _DAY),
    RetentionRule(
        "idempotency keys", lambda before: IdempotencyKey.objects.filter(created_at__lt=before), 7 * _DAY
    ),
    RetentionRule(
        "finished bulk operations on jobs",
        lambda before: BulkOperation.objects.filter(created_at__lt=before, finished_at__isnull=False),
        7 * _DAY,
    ),
    RetentionRule(
        "requests for files of jobs",
        lambda before: FileRequest.objects.filter(requested_at__lt=before),
        _HOUR,
    ),
    RetentionRule("what-if queries", lambda before: EngineQuery.objects.filter(asked_at__lt=before), _HOUR),
    RetentionRule(
        "sent task messages", lambda before: OutboxMessage.objects.filter(sent_at__lt=before), _HOUR
    ),
    RetentionRule(
        "sessions, after their end", lambda before: BrowserSession.objects.filter(expire_date__lt=before)
    ),
)


def delete_expired_rows() -> dict[str, int]:
    """Delete the oldest expired rows of every kind, at most ``MAX_DELETED`` of each; return how many by kind.

    Kinds are independent: one whose rows cannot be deleted is logged and does not keep the others.
    """
    now, settings, deleted = timezone.now(), cluster_settings(), {}
    for rule in RULES:
        deleted[rule.kind] = 0
        try:
            for number in _delete(rule, now - rule.current_age(settings)):
                deleted[rule.kind] += number
        except DatabaseError:
            log.exception("old rows could not be deleted: %s", rule.kind)
            connection.ensure_connection()  # raises without a database
    return deleted


def _delete(rule: RetentionRule, before: dt.datetime) -> Iterator[int]:
    """Yield the size of each deleted batch; each is a short transaction, far below the statement timeout."""
    rows = rule.rows(before)
    deadline_s, left = time.monotonic() + MAX_SECONDS, MAX_DELETED
    while left > 0 and time.monotonic() < deadline_s:
        size = min(left, rule.batch_size)
        with transaction.atomic():
            keys = list(rows.order_by("pk").values_list("pk", flat=True)[:size])
            if keys:
                rule.delete(rows.model._default_manager.filter(pk__in=keys))
        yield len(keys)
        left -= size
        if len(keys) < size:
            return


def table_rows() -> Iterator[str]:
    """Yield the rows of the table in docs/operations.md."""
    for rule in RULES:
        default = (
            format_duration(int(rule.current_age({}).total_seconds())) if rule.current_age({}) else "at once"
        )
        yield f"| {rule.kind} | {default} | {f'`{rule.setting}`' if rule.setting else 'fixed'} |"
