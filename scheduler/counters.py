"""Adds each cycle to the monotonic counters of ``/metrics``, which all scheduler processes share."""

from __future__ import annotations

from collections import Counter
from typing import Any

from portal.domain.scheduling.cycle_metrics import CYCLE_PHASES, bucket_label
from portal.models import Cycle, SchedulerCounters
from scheduler.core.model.plan import Plan


def count_cycle(row: Cycle, plan: Plan, *, committed: bool) -> None:
    """Add a completed cycle. Call in the transaction that saves it."""
    totals, counts = _locked()
    _add(counts, "cycles")
    _add(counts, "truncated", int(row.truncated))
    _add(counts, "started", row.started_jobs)
    _add(counts, "refused", row.refused_commits)
    evicted = Counter(eviction.reason.value for eviction in plan.evictions) if committed else Counter[str]()
    for reason, number in evicted.items():
        _add(counts.setdefault("evicted", {}), reason, number)
    for phase in CYCLE_PHASES:
        _observe(counts, phase, getattr(row, f"{phase}_ms") / 1000)
    totals.save(update_fields=["counts"])


def count_failed_cycle() -> None:
    """Add a failed cycle. Call in a transaction."""
    totals, counts = _locked()
    _add(counts, "failed")
    totals.save(update_fields=["counts"])


def _locked() -> tuple[SchedulerCounters, dict[str, Any]]:
    SchedulerCounters.objects.get_or_create(id=1)
    totals = SchedulerCounters.objects.select_for_update(no_key=True).get(id=1)
    return totals, totals.counts


def _add(counts: dict[str, Any], name: str, number: int = 1) -> None:
    counts[name] = counts.get(name, 0) + number


def _observe(counts: dict[str, Any], phase: str, seconds: float) -> None:
    seen = counts.setdefault("seconds", {}).setdefault(phase, {"sum": 0.0, "buckets": {}})
    seen["sum"] += seconds
    _add(seen["buckets"], bucket_label(seconds))
