"""Stores metrics per node and minute; ``scheduler.retention`` deletes old ones."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any

from django.db import connection, transaction

from portal.models import Attempt, AttemptSeconds, Node, NodeMetricsMinute
from portal.services.reports.report_days import forget_report_days
from portal.valkey.sample_cache import attempt_seconds

_PER_GPU = ("utilisation_percent", "memory_used_mib", "power_watts", "temperature_c")
_PER_NODE = ("cpu_percent", "node_memory_used_mib")

GpuUseColumns = tuple[float | None, float, float, float, float | None]


def save_node_metrics(
    rows: Iterable[tuple[str, int, Mapping[str, Any]]],
    gpu_use: Mapping[tuple[str, int, dt.date], GpuUseColumns] | None = None,
) -> int:
    """Save (node's public id, start of the minute in Unix seconds, columns); return how many were saved.

    A minute that exists already (the collector was restarted) is merged, weighted by samples. ``gpu_use``
    of attempts (job's public id, number, day) in these minutes is added to their rows of AttemptGpuDay: joules,
    GPU-seconds measured, busy and idle, and peak memory in MiB.
    """
    wanted = list(rows)
    nodes = dict(
        Node.objects.filter(public_id__in={node for node, _, _ in wanted}).values_list("public_id", "pk")
    )
    fresh = [
        NodeMetricsMinute(node_id=nodes[node], minute=dt.datetime.fromtimestamp(start_s, dt.UTC), **values)
        for node, start_s, values in wanted
        if node in nodes
    ]
    with transaction.atomic():
        there = {
            (row.node_id, row.minute): row
            for row in NodeMetricsMinute.objects.select_for_update().filter(
                node_id__in={row.node_id for row in fresh}, minute__in={row.minute for row in fresh}
            )
        }
        for row in fresh:
            earlier = there.get((row.node_id, row.minute))
            if earlier is not None:
                _merge_minute(earlier, row)
                earlier.save()
        NodeMetricsMinute.objects.bulk_create(
            [row for row in fresh if (row.node_id, row.minute) not in there], ignore_conflicts=True
        )
        _add_gpu_use(gpu_use or {})
    return len(fresh)


def _add_gpu_use(gpu_use: Mapping[tuple[str, int, dt.date], GpuUseColumns]) -> None:
    if not gpu_use:
        return
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO portal_attemptgpuday AS known
                (attempt_id, job_id, project_id, user_id, pool_id, day, is_continued,
                 joules, measured_gpu_s, busy_gpu_s, idle_gpu_s, peak_memory_mib)
            SELECT attempt.id, job.id, job.project_id, job.owner_id, attempt.pool_id, used.day,
                   row_number() OVER (PARTITION BY job.id ORDER BY used.day, attempt.id) > 1 OR EXISTS (
                       SELECT FROM portal_attemptgpuday first WHERE first.job_id = job.id AND NOT first.is_continued),
                   used.joules, used.measured, used.busy, used.idle, used.peak
              FROM unnest(%s::text[], %s::int[], %s::date[], %s::float8[], %s::float8[], %s::float8[], %s::float8[],
                          %s::float8[]) AS used(job, number, day, joules, measured, busy, idle, peak)
              JOIN portal_job job ON job.public_id = used.job
              JOIN portal_attempt attempt ON attempt.job_id = job.id AND attempt.number = used.number
             ORDER BY 1, 2
            ON CONFLICT (attempt_id, day) DO UPDATE SET
                joules = coalesce(known.joules + excluded.joules, known.joules, excluded.joules),
                measured_gpu_s = known.measured_gpu_s + excluded.measured_gpu_s,
                busy_gpu_s = known.busy_gpu_s + excluded.busy_gpu_s,
                idle_gpu_s = known.idle_gpu_s + excluded.idle_gpu_s,
                peak_memory_mib = greatest(known.peak_memory_mib, excluded.peak_memory_mib)
            """,
            [list(column) for column in zip(*((*key, *use) for key, use in gpu_use.items()), strict=True)],
        )
    forget_report_days(day for _job, _attempt, day in gpu_use)


def save_attempt_seconds(job: str, number: int) -> None:
    """Store the samples of each second of an attempt (job's public id) that has just ended."""
    attempt = Attempt.objects.filter(job__public_id=job, number=number).first()
    rows = attempt_seconds(job, number)
    if attempt is not None and len(rows) > 1:
        AttemptSeconds.objects.update_or_create(attempt=attempt, defaults={"rows": rows})


def _merge_minute(earlier: NodeMetricsMinute, later: NodeMetricsMinute) -> None:
    """Merge a later part of the same minute into the earlier one, by GPU."""
    old, new = earlier.samples, later.samples
    order = list(dict.fromkeys([*earlier.gpu_uuids, *later.gpu_uuids]))

    def pairs(name: str) -> list[tuple[Any, Any]]:
        """Return the earlier and the later value of each GPU, None if there is none."""
        before, after = (
            dict(zip(row.gpu_uuids, getattr(row, name), strict=False)) for row in (earlier, later)
        )
        return [(before.get(uuid), after.get(uuid)) for uuid in order]

    for name in _PER_GPU:
        setattr(earlier, name, [_weighted_mean(one, old, other, new) for one, other in pairs(name)])
    earlier.energy_joules = [_add_optional(*values) for values in pairs("energy_joules")]
    earlier.holders = [sorted({*(one or []), *(other or [])}) for one, other in pairs("holders")]
    for name in _PER_NODE:
        setattr(earlier, name, _weighted_mean(getattr(earlier, name), old, getattr(later, name), new))
    earlier.tasks = list(
        {(task["job"], task["rank"]): task for task in [*earlier.tasks, *later.tasks]}.values()
    )
    earlier.gpu_uuids = order
    earlier.samples = old + new


def _weighted_mean(before: float | None, old: int, after: float | None, new: int) -> float | None:
    if before is None or after is None:
        return after if before is None else before
    return (before * old + after * new) / max(1, old + new)


def _add_optional(before: float | None, after: float | None) -> float | None:
    if before is None or after is None:
        return after if before is None else before
    return before + after
