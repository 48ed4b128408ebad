"""How long rows are kept: one table, and the one function that deletes what is older, in bounded steps."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from django.db import DatabaseError, connection, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from portal.domain.formatting import format_duration
from portal.domain.node_operations import OperationKind
from portal.domain.policy_settings import (
    CYCLE_RETENTION,
    FORECAST_RETENTION,
    METRICS_RETENTION,
    default_value,
)
from portal.models import (
    AttemptSeconds,
    BrowserSession,
    BulkOperation,
    Cycle,
    EngineQuery,
    FileRequest,
    Forecast,
    IdempotencyKey,
    NodeIncident,
    NodeMetricsMinute,
    NodeOperation,
    OutboxMessage,
    QuotaReplay,
    ScheduleRun,
    Terminal,
)
from portal.selectors.scheduling.settings import cluster_settings

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
        lambda before: Forecast.objects.filter(made_at__lt=before),
        setting=FORECAST_RETENTION,
    ),
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
            for number in _delete(rule.rows(now - rule.current_age(settings))):
                deleted[rule.kind] += number
        except DatabaseError:
            log.exception("old rows could not be deleted: %s", rule.kind)
            connection.ensure_connection()  # raises without a database
    return deleted


def _delete(rows: QuerySet[Any]) -> Iterator[int]:
    """Yield the size of each deleted batch; each is a short transaction, far below the statement timeout."""
    deadline_s, left = time.monotonic() + MAX_SECONDS, MAX_DELETED
    while left > 0 and time.monotonic() < deadline_s:
        size = min(left, BATCH_SIZE)
        with transaction.atomic():
            keys = list(rows.order_by("pk").values_list("pk", flat=True)[:size])
            rows.model._default_manager.filter(pk__in=keys).delete()
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
