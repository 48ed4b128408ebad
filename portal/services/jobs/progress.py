"""Writes down how far attempts have come, as their nodes tell it: the only writer of ``Progress``."""

from __future__ import annotations

import datetime as dt
from typing import Any

from portal.domain.states import LIVE_ATTEMPT_STATES
from portal.domain.throughput import GpuPosition, Layout, layout_of
from portal.live_events import publish_all_on_commit
from portal.models import Allocation, Attempt, AttemptProgress, Topology
from portal.selectors.jobs.progress import attempt_progress, job_workload_fingerprint
from portal.services.jobs.checkpoints import MIN_UPDATE_INTERVAL, reported_at
from portal.services.lifecycle.state_events import attempt_topic_event


def record_progress(
    attempt: Attempt, rank: int, completed_units: float, ago_s: float, *, polled_at: dt.datetime
) -> bool:
    """Notes that a task wrote ``done`` units so long before its node answered; True when it was written.

    ``attempt`` comes with its job and progress as they were read before ``asked_at``, when the node was asked.
    Times only move forward, by at least ``STEP``. Where the number went down, as it does when a program goes on from
    a checkpoint, the span begins anew; and where a lower rank speaks up, which from then on is the only one heard.
    """
    if attempt.running_at is None or completed_units < 0:
        return False
    at = reported_at(attempt.running_at, ago_s, polled_at)
    known = attempt_progress(attempt)
    if known is None:
        written = _start_progress(attempt, rank, completed_units, at)
    elif rank > known.rank or at < known.reported_at + MIN_UPDATE_INTERVAL:
        return False
    else:
        anew = (
            {"start_units": completed_units, "start_at": at}
            if rank < known.rank or completed_units < known.completed_units
            else {}
        )
        row = AttemptProgress.objects.filter(
            pk=attempt.pk,
            reported_at=known.reported_at,
            rank=known.rank,
            attempt__state__in=LIVE_ATTEMPT_STATES,
        )
        written = bool(row.update(rank=rank, completed_units=completed_units, reported_at=at, **anew))
    if written:
        publish_all_on_commit([attempt_topic_event(attempt, "progress", "It told how far it has come.")])
    return written


def _start_progress(attempt: Attempt, rank: int, completed_units: float, at: dt.datetime) -> bool:
    """The first word of an attempt: with how its GPUs lie, and with whom it may be compared."""
    if not Attempt.objects.filter(pk=attempt.pk, state__in=LIVE_ATTEMPT_STATES).exists():
        return False
    job, lies = attempt.job, _layout(attempt)
    word: dict[str, Any] = {
        "rank": rank,
        "start_units": completed_units,
        "start_at": at,
        "done": completed_units,
        "at": at,
    }
    # an elastic job changes its layout while it runs: its rate says nothing of any, and is compared with nobody's
    alike = f"attempt {attempt.pk}" if job.is_elastic else job_workload_fingerprint(job)
    work = {"work": alike, "gpus": job.tasks * job.gpus_per_task}
    # another node of the gang may have been first
    _, made = AttemptProgress.objects.get_or_create(attempt=attempt, defaults=word | work | lies._asdict())
    return made


def _layout(attempt: Attempt) -> Layout:
    """How the GPUs lie that an attempt holds, in the first topology by name that knows one of its nodes."""
    held = Allocation.objects.filter(task__attempt=attempt).values_list(
        "gpu__node__name", "gpu__model", "gpu__nvlink_island", "gpu__node__labels"
    )
    rows = list(held)
    labels = {node: told for node, _, _, told in rows}
    topologies = Topology.objects.order_by("name").values_list("levels", flat=True) if len(labels) > 1 else ()
    levels: list[str] = next(
        (levels for levels in topologies if any(levels[0] in told for told in labels.values())), []
    )
    gpus = (GpuPosition(node, model, island) for node, model, island, _ in rows)
    return layout_of(gpus, (_topology_path(levels, told) for told in labels.values()), len(levels))


def _topology_path(levels: list[str], labels: dict[str, str]) -> list[str]:
    """The labels of a node from the outermost level down to the last that it has."""
    path = []
    for level in levels:
        if level not in labels:
            break
        path.append(labels[level])
    return path
