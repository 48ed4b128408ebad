"""Charts of a job's GPUs, CPUs and memory per minute, from the rollups."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils import timezone

from portal.access import AccessPolicy, visible_nodes
from portal.models import Gpu, Job, Node, User
from portal.selectors.jobs.jobs import attempt_energy_joules, get_job
from portal.selectors.nodes.metric_series import MetricSeries, read_job_series, read_node_series
from portal.stored_texts import translate_stored
from portal.web.jobs.job.overview import job_page_context
from portal.web.views import find_row, page

SPANS = {"1h": 3600, "6h": 6 * 3600, "1d": 86400}


@page(AccessPolicy.SIGNED_IN)
def metrics(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    span = request.GET.get("span", "1h")
    context = job_page_context(user, get_job(user, public_id))
    chosen = span if span in SPANS else "1h"
    used = [joules for each in context["attempts"] if (joules := attempt_energy_joules(each)) is not None]
    shown = {"tab": "metrics", "span": chosen, "spans": SPANS, "joules": sum(used) if used else None}
    return render(request, "jobs/job/metrics.html", context | shown)


@page(AccessPolicy.SIGNED_IN)
def series(request: HttpRequest, user: User, public_id: str) -> JsonResponse:
    """Return the data of the newest attempt's charts: times, and a series for each GPU and rank."""
    found = get_job(user, public_id)
    span_s = SPANS.get(request.GET.get("span", "1h"), 3600)
    until = found.ended_at or timezone.now()
    return JsonResponse(chart_data(found, read_job_series(user, found, until - dt.timedelta(seconds=span_s))))


@page(AccessPolicy.SIGNED_IN)
def node_series(request: HttpRequest, user: User, public_id: str) -> JsonResponse:
    """Return the data of a node's chart: a series for each GPU over the last hour."""
    minutes = read_node_series(user, find_row(visible_nodes(user), public_id=public_id))
    names = {gpu.uuid: f"GPU {gpu.index}" for gpu in minutes.gpus}
    lines = {"gpu": {names[gpu.uuid]: gpu.utilisation_percent for gpu in minutes.gpus}}
    return JsonResponse({"at": minutes.times_s, "gpus": names, "lines": lines})


def chart_data(job: Job, minutes: MetricSeries) -> dict[str, Any]:
    """Return named series for the charts; ``gpus`` names each GPU by UUID for live samples."""
    nodes = dict(
        Node.objects.filter(public_id__in={gpu.node for gpu in minutes.gpus}).values_list("public_id", "name")
    )
    names = {gpu.uuid: f"{nodes.get(gpu.node, gpu.node)} GPU {gpu.index}" for gpu in minutes.gpus}
    memory = Gpu.objects.filter(uuid__in=names).values_list("memory_mib", flat=True)
    return {
        "at": minutes.times_s,
        "gpus": names,
        "labels": {task.rank: translate_stored(job.task_label(task.rank)) for task in minutes.tasks},
        "lines": {
            "gpu": {names[gpu.uuid]: gpu.utilisation_percent for gpu in minutes.gpus},
            "gpu_memory": {names[gpu.uuid]: gpu.memory_used_mib for gpu in minutes.gpus},
            "power": {names[gpu.uuid]: gpu.power_watts for gpu in minutes.gpus},
            "cpu": {translate_stored(job.task_label(task.rank)): task.cpu_percent for task in minutes.tasks},
            "memory": {
                translate_stored(job.task_label(task.rank)): task.memory_mib for task in minutes.tasks
            },
        },
        "limits": {
            "gpu_memory": max(memory, default=0),
            "memory": job.memory_mib,
            "cpu": job.cpu_milli / 10,  # percent of one core
        },
    }
