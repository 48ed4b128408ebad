"""Charts of a job: what its GPUs, CPUs and memory did, minute by minute, from the rollups."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from portal.access import Policy, policy, signed_in
from portal.models import Attempt, Job, UsageMinute
from portal.selectors.jobs import attempts_of, job_for
from portal.web.job import heading

SPANS = {"1h": 3600, "6h": 6 * 3600, "1d": 86400}
MOST_MINUTES = 1440


@policy(Policy.SIGNED_IN)
@require_safe
def metrics(request: HttpRequest, public_id: str) -> HttpResponse:
    """The page."""
    user = signed_in(request.user)
    span = request.GET.get("span", "1h")
    context = heading(user, job_for(user, public_id))
    chosen = span if span in SPANS else "1h"
    return render(request, "job/metrics.html", context | {"tab": "metrics", "span": chosen, "spans": SPANS})


@policy(Policy.SIGNED_IN)
@require_safe
def series(request: HttpRequest, public_id: str) -> JsonResponse:
    """The numbers behind the charts of the newest attempt: times, and a line for each GPU and rank."""
    user = signed_in(request.user)
    found = job_for(user, public_id)
    span_s = SPANS.get(request.GET.get("span", "1h"), 3600)
    attempts = attempts_of(found)
    return JsonResponse(
        series_of(found, attempts[0], span_s) if attempts else {"at": [], "lines": {}, "gpus": {}}
    )


def series_of(job: Job, attempt: Attempt, span_s: int) -> dict[str, Any]:
    """One query: the minutes of the attempt's nodes, cut to its own GPUs and ranks."""
    end = attempt.ended_at or timezone.now()
    start = max(attempt.created_at - dt.timedelta(minutes=1), end - dt.timedelta(seconds=span_s))
    gpus: dict[str, str] = {}
    limits: dict[str, float] = {}
    nodes = set()
    for task in attempt.task_rows.all():
        nodes.add(task.node_id)
        for allocation in task.allocations.all():
            gpus[allocation.gpu.uuid] = f"{task.node.name} GPU {allocation.gpu.index}"
            limits["gpu_memory"] = max(limits.get("gpu_memory", 0), allocation.gpu.memory_mib)
    rows = UsageMinute.objects.filter(node__in=nodes, minute__gte=start, minute__lte=end).order_by("minute")
    kept = list(rows[: MOST_MINUTES * max(1, len(nodes))])
    at = sorted({row.minute for row in kept})
    place = {minute: index for index, minute in enumerate(at)}
    lines: dict[str, dict[str, list[float | None]]] = {
        name: {} for name in ("gpu", "gpu_memory", "power", "cpu", "memory")
    }

    def put(kind: str, name: str, minute: dt.datetime, value: float | None) -> None:
        lines[kind].setdefault(name, [None] * len(at))[place[minute]] = value

    for row in kept:
        for index, uuid in enumerate(row.gpu_uuids):
            if uuid in gpus:
                put("gpu", gpus[uuid], row.minute, row.utilisation_percent[index])
                put("gpu_memory", gpus[uuid], row.minute, row.memory_used_mib[index])
                put("power", gpus[uuid], row.minute, row.power_watts[index])
        for entry in row.tasks:
            if entry.get("job") == job.public_id:
                name = f"rank {entry.get('rank', 0)}"
                put("cpu", name, row.minute, entry.get("cpu_percent"))
                put("memory", name, row.minute, entry.get("memory_mib"))
    limits["memory"] = job.memory_mib
    return {"at": [minute.timestamp() for minute in at], "lines": lines, "gpus": gpus, "limits": limits}
