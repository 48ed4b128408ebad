"""Records the progress of attempts, as reported by nodes: the only writer of ``AttemptProgress``."""

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
    """Record ``completed_units`` written ``ago_s`` before the node answered; return True if written.

    ``attempt``, with its job and progress, must have been read before ``polled_at``. Times only increase, by
    at least ``MIN_UPDATE_INTERVAL``. The measured span restarts when the number decreases, as after a restore
    from a checkpoint, and when a lower rank reports; from then on only that rank is used.
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
        publish_all_on_commit([attempt_topic_event(attempt, "progress", "It reported its progress.")])
    return written


def _start_progress(attempt: Attempt, rank: int, completed_units: float, at: dt.datetime) -> bool:
    """Create the row of an attempt, with the layout of its GPUs and the fingerprint of its workload."""
    if not Attempt.objects.filter(pk=attempt.pk, state__in=LIVE_ATTEMPT_STATES).exists():
        return False
    job, lies = attempt.job, _layout(attempt)
    word: dict[str, Any] = {
        "rank": rank,
        "start_units": completed_units,
        "start_at": at,
        "completed_units": completed_units,
        "reported_at": at,
    }
    # an elastic job changes its layout while it runs, so its rate is comparable with no other job
    alike = f"attempt {attempt.pk}" if job.is_elastic else job_workload_fingerprint(job)
    work = {"workload_fingerprint": alike, "gpus": job.tasks * job.gpus_per_task}
    # another node of the gang may have created the row first
    _, made = AttemptProgress.objects.get_or_create(attempt=attempt, defaults=word | work | lies._asdict())
    return made


def _layout(attempt: Attempt) -> Layout:
    """Return the layout of an attempt's GPUs, in the first topology by name that covers one of its nodes."""
    held = Allocation.objects.filter(task__attempt=attempt).values_list(
        "gpu__node__name", "gpu__model", "gpu__nvlink_island", "gpu__node__labels"
    )
    rows = list(held)
    labels = {node: reported for node, _, _, reported in rows}
    topologies = Topology.objects.order_by("name").values_list("levels", flat=True) if len(labels) > 1 else ()
    levels: list[str] = next(
        (levels for levels in topologies if any(levels[0] in reported for reported in labels.values())), []
    )
    gpus = (GpuPosition(node, model, island) for node, model, island, _ in rows)
    return layout_of(gpus, (_topology_path(levels, reported) for reported in labels.values()), len(levels))


def _topology_path(levels: list[str], labels: dict[str, str]) -> list[str]:
    """Return the node's labels from the outermost level to the last one that it has."""
    path = []
    for level in levels:
        if level not in labels:
            break
        path.append(labels[level])
    return path
