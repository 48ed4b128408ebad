"""Writes down how far attempts have come, as their nodes tell it: the only writer of ``Progress``."""

from __future__ import annotations

import datetime as dt
from typing import Any

from portal.events import announce_all
from portal.models import Allocation, Attempt, Progress, Topology
from portal.selectors.progress import progress_of, work_of_job
from portal.services.checkpoints import STEP, said_at
from portal.services.moves import news_of_attempt
from portal.words.states import ATTEMPT_LIVE
from portal.words.throughput import Layout, LyingGpu, layout_of


def record_progress(attempt: Attempt, rank: int, done: float, ago_s: float, *, asked_at: dt.datetime) -> bool:
    """Notes that a task wrote ``done`` units so long before its node answered; True when it was written.

    ``attempt`` comes with its job and progress as they were read before ``asked_at``, when the node was asked.
    Times only move forward, by at least ``STEP``. Where the number went down, as it does when a program goes on from
    a checkpoint, the span begins anew; and where a lower rank speaks up, which from then on is the only one heard.
    """
    if attempt.running_at is None or done < 0:
        return False
    at = said_at(attempt.running_at, ago_s, asked_at)
    known = progress_of(attempt)
    if known is None:
        written = _begin(attempt, rank, done, at)
    elif rank > known.rank or at < known.at + STEP:
        return False
    else:
        anew = {"since_done": done, "since_at": at} if rank < known.rank or done < known.done else {}
        row = Progress.objects.filter(
            pk=attempt.pk, at=known.at, rank=known.rank, attempt__state__in=ATTEMPT_LIVE
        )
        written = bool(row.update(rank=rank, done=done, at=at, **anew))
    if written:
        announce_all([news_of_attempt(attempt, "progress", "It told how far it has come.")])
    return written


def _begin(attempt: Attempt, rank: int, done: float, at: dt.datetime) -> bool:
    """The first word of an attempt: with how its GPUs lie, and with whom it may be compared."""
    if not Attempt.objects.filter(pk=attempt.pk, state__in=ATTEMPT_LIVE).exists():
        return False
    job, lies = attempt.job, _layout(attempt)
    word: dict[str, Any] = {"rank": rank, "since_done": done, "since_at": at, "done": done, "at": at}
    # an elastic job changes its layout while it runs: its rate says nothing of any, and is compared with nobody's
    alike = f"attempt {attempt.pk}" if job.elastic else work_of_job(job)
    work = {"work": alike, "gpus": job.tasks * job.gpus_per_task}
    # another node of the gang may have been first
    _, made = Progress.objects.get_or_create(attempt=attempt, defaults=word | work | lies._asdict())
    return made


def _layout(attempt: Attempt) -> Layout:
    """How the GPUs lie that an attempt holds, in the first topology by name that knows one of its nodes."""
    held = Allocation.objects.filter(task__attempt=attempt).values_list(
        "gpu__node__name", "gpu__model", "gpu__island", "gpu__node__labels"
    )
    rows = list(held)
    labels = {node: told for node, _, _, told in rows}
    topologies = Topology.objects.order_by("name").values_list("levels", flat=True) if len(labels) > 1 else ()
    levels: list[str] = next(
        (levels for levels in topologies if any(levels[0] in told for told in labels.values())), []
    )
    gpus = (LyingGpu(node, model, island) for node, model, island, _ in rows)
    return layout_of(gpus, (_path(levels, told) for told in labels.values()), len(levels))


def _path(levels: list[str], labels: dict[str, str]) -> list[str]:
    """The labels of a node from the outermost level down to the last that it has."""
    path = []
    for level in levels:
        if level not in labels:
            break
        path.append(labels[level])
    return path
