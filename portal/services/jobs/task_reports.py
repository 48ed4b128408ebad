"""Records what nodes report about attempts: checkpoints, progress, and overuse of a shared GPU's memory.

The only writer of ``checkpoint_at``, ``AttemptProgress`` and ``RankProgress``.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from agents.engines.replies import Container
from agents.launchers import launcher_label
from portal.domain.formatting import format_memory
from portal.domain.jobs.reasons import EndReason, end_message
from portal.domain.scheduling.throughput import GpuPosition, Layout, layout_of
from portal.domain.states import LIVE_ATTEMPT_STATES
from portal.domain.stored_texts import stored_text
from portal.live_events import publish_all_on_commit
from portal.models import Allocation, Attempt, AttemptObservation, AttemptProgress, RankProgress, Topology
from portal.selectors.jobs.progress import attempt_progress, job_scaling_fingerprint, job_workload_fingerprint
from portal.services.lifecycle import job_control
from portal.services.lifecycle.state_events import attempt_topic_event, record_event

MIN_UPDATE_INTERVAL = dt.timedelta(seconds=30)
"""Minimum step of ``checkpoint_at``: at most two writes per minute, and at most this much out of date."""


def reported_at(running_at: dt.datetime, ago_s: float, polled_at: dt.datetime) -> dt.datetime:
    """Return the time of a report that was made ``ago_s`` before the node answered.

    Not later than ``polled_at``, when the node was polled, and not earlier than ``running_at``.
    """
    ran_s = max(0.0, (polled_at - running_at).total_seconds())
    return polled_at - dt.timedelta(seconds=min(max(0.0, ago_s), ran_s))


def record_checkpoint(
    attempt: Attempt, ago_s: float, step: int | None = None, *, polled_at: dt.datetime
) -> bool:
    """Record a checkpoint ``ago_s`` seconds before the node answered; return True if written.

    ``attempt``, with its job, must have been read before ``polled_at``, so that no checkpoint is dated too
    late. The time never decreases. No event is written, because a job may save thousands of checkpoints.
    """
    if attempt.running_at is None:
        return False
    at = reported_at(attempt.running_at, ago_s, polled_at)
    if attempt.checkpoint_at is not None and at < attempt.checkpoint_at + MIN_UPDATE_INTERVAL:
        return False
    older = Q(checkpoint_at__isnull=True) | Q(checkpoint_at__lte=at - MIN_UPDATE_INTERVAL)
    live = Attempt.objects.filter(older, pk=attempt.pk, state__in=LIVE_ATTEMPT_STATES)
    if not live.update(checkpoint_at=at, checkpoint_step=step):
        return False
    attempt.checkpoint_at, attempt.checkpoint_step = at, step
    publish_all_on_commit([attempt_topic_event(attempt, "checkpoint", stored_text("It saved a checkpoint."))])
    return True


def record_output(attempt: Attempt, ago_s: float, *, polled_at: dt.datetime) -> None:
    """Record when a task last wrote output, for jobs whose stalls are detected; times only increase."""
    seen: AttemptObservation | None = getattr(attempt, "observation", None)
    if attempt.running_at is None:
        return
    at = reported_at(attempt.running_at, ago_s, polled_at)
    if seen is None or seen.output_at is None or at >= seen.output_at + MIN_UPDATE_INTERVAL:
        AttemptObservation.objects.update_or_create(attempt=attempt, defaults={"output_at": at})


def record_image_pull(attempt_id: int, node: str, *, ended: bool) -> None:
    """Record that a node begins or has ended to pull the image of an attempt: the first begin and the last end."""
    now = timezone.now()
    with transaction.atomic():
        attempt = Attempt.objects.select_for_update(no_key=True).select_related("job").get(pk=attempt_id)
        if ended:
            attempt.image_pulled_at = now
        else:
            attempt.image_pull_started_at = attempt.image_pull_started_at or now
        attempt.save(update_fields=["image_pull_started_at", "image_pulled_at"])
        message = stored_text(f"{node} has pulled its image." if ended else f"{node} pulls its image.")
        record_event(attempt, "image_pulled" if ended else "image_pull", "image", message)


def stop_memory_overuse(
    node: str, job: str, attempt: int, uuid: str, *, used_mib: int, share_mib: int, seconds: float
) -> None:
    """Stop an attempt (job's public id, number) that still holds a share of this GPU of ``node``. Repeatable.

    The measured amounts go into the message of the end reason.
    """
    held = Allocation.objects.filter(
        task__node__public_id=node,
        gpu__node__public_id=node,
        task__attempt__job__public_id=job,
        task__attempt__number=attempt,
        gpu__uuid=uuid,
        milli__lt=1000,
        ended_at__isnull=True,
    )
    row = held.select_related("gpu__node", "task").first()
    if row is None:
        return  # released in the meantime
    message = end_message(
        EndReason.GPU_MEMORY_LIMIT_EXCEEDED,
        gpu=row.gpu.index,
        node=row.gpu.node.name,
        used=format_memory(used_mib),
        share=format_memory(share_mib),
        seconds=round(seconds),
    )
    job_control.request_stop(row.task.attempt_id, EndReason.GPU_MEMORY_LIMIT_EXCEEDED, message=message)


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
        restarted = rank < known.rank or completed_units < known.completed_units
        anew = {"start_units": completed_units, "start_at": at} if restarted else {}
        row = AttemptProgress.objects.filter(
            pk=attempt.pk,
            reported_at=known.reported_at,
            rank=known.rank,
            attempt__state__in=LIVE_ATTEMPT_STATES,
        )
        written = bool(row.update(rank=rank, completed_units=completed_units, reported_at=at, **anew))
    if written:
        publish_all_on_commit(
            [attempt_topic_event(attempt, "progress", stored_text("It reported its progress."))]
        )
    return written


def record_rank_progress(
    attempt: Attempt, reporting: Mapping[int, Container], *, polled_at: dt.datetime
) -> None:
    """Append the reports of ranks, in steps of at least ``MIN_UPDATE_INTERVAL``; a lower number starts again."""
    if attempt.running_at is None:
        return
    known = {row.rank: row for row in RankProgress.objects.filter(attempt=attempt, rank__in=reporting)}
    changed = []
    for rank, report in reporting.items():
        row = known.get(rank) or RankProgress(attempt=attempt, rank=rank)
        at_s = reported_at(attempt.running_at, report.progress_age_s or 0.0, polled_at).timestamp()
        units, last = report.progress or 0.0, row.reports[-1] if row.reports else None
        if units < 0 or (last and at_s < last[0] + MIN_UPDATE_INTERVAL.total_seconds()):
            continue
        before = row.reports if last and units >= last[1] else []
        row.reports = [*before, [at_s, units, report.progress_busy_s]][-RankProgress.MAX_REPORTS :]
        changed.append(row)
    RankProgress.objects.bulk_create(
        changed, update_conflicts=True, unique_fields=["attempt", "rank"], update_fields=["reports"]
    )


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
    alone = f"attempt {attempt.pk}" if job.is_elastic else ""
    work = {
        "workload_fingerprint": alone or job_workload_fingerprint(job),
        "scaling_fingerprint": alone or job_scaling_fingerprint(job),
        "launcher": launcher_label(job.launcher, job.launcher_options),
        "gpus": job.total_gpus,
    }
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
    return [labels[level] for level in takewhile(labels.__contains__, levels)]
