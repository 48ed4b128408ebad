"""Ended jobs of the last 30 days on the nodes of the demo, with what the reports count."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django.db import transaction
from django.utils import timezone

from portal.domain.jobs.lost_work import LossCause
from portal.domain.jobs.reasons import END_MESSAGES, EndReason
from portal.domain.states import AttemptState, JobState
from portal.models import (
    Allocation,
    Attempt,
    AttemptGpuDay,
    AttemptWork,
    Environment,
    Gpu,
    Job,
    JobEvent,
    NodePool,
    Project,
    Task,
    UsageInterval,
    User,
)
from portal.services.reports.report_days import forget_report_days

DAYS = 30
SHIFTS = ((1, 9), (11, 20))
"""Hours of a day in which a node ran a job, so that no two hold a GPU at once."""
SEED = 20
WATTS = 420.0
PROOF = "gone"
KINDS: tuple[tuple[str, str, str, int], ...] = (
    # name, project, owner, GPUs
    ("vit-h-pretrain", "vision", "m-okafor", 8),
    ("depth-anything-ft", "vision", "t-nakamura", 4),
    ("grasp-rl", "robotics", "s-varga", 4),
    ("moe-7b-sft", "nlp", "a-lindqvist", 8),
    ("llama-eval-suite", "nlp", "p-ortega", 2),
    ("course-lab", "teaching", "k-brandt", 1),
)


@dataclass(frozen=True)
class _PastJob:
    """An ended job before its rows exist; ``wait`` is the time in the queue."""

    row: Job
    gpus: Sequence[Gpu]
    wait: dt.timedelta
    began: dt.datetime
    ended: dt.datetime
    failed: bool

    @property
    def gpu_s(self) -> float:
        return (self.ended - self.began).total_seconds() * len(self.gpus)


def add_past_jobs(
    pool: NodePool, environment: Environment, users: Mapping[str, User], projects: Mapping[str, Project]
) -> int:
    """Add the jobs in one transaction; return their number. The same days have the same jobs on each installation."""
    by_node: dict[int, list[Gpu]] = {}
    for gpu in Gpu.objects.filter(node__pool=pool).order_by("node_id", "index"):
        by_node.setdefault(gpu.node_id, []).append(gpu)
    dice, now = random.Random(SEED), timezone.now()  # noqa: S311 - only variety is wanted
    planned: list[_PastJob] = []
    for day in range(DAYS, 0, -1):
        begin = now - dt.timedelta(days=day)
        for gpus in by_node.values():
            for first, last in SHIFTS:
                name, project, owner, count = dice.choice(KINDS)
                began = begin + dt.timedelta(hours=first + dice.random())
                ended = began + dt.timedelta(hours=(last - first - 1) * dice.uniform(0.3, 1.0))
                wait, failed = dt.timedelta(minutes=dice.expovariate(1 / 25)), dice.random() < 0.08
                row = _job(name, projects[project], users[owner], environment, pool, count, ended, failed)
                row.started_at = began
                planned.append(_PastJob(row, gpus[:count], wait, began, ended, failed))
    with transaction.atomic():
        _save(planned, pool)
        today = now.astimezone(dt.UTC).date()
        forget_report_days(today - dt.timedelta(days=day) for day in range(DAYS + 1))
    return len(planned)


def _job(
    name: str, project: Project, owner: User, environment: Environment, pool: NodePool, gpus: int,
    ended: dt.datetime, failed: bool,
) -> Job:  # fmt: skip
    reason = EndReason.EXIT_CODE if failed else EndReason.COMPLETED
    return Job(
        name=name, project=project, owner=owner, environment=environment, pool=pool, gpus_per_task=gpus,
        cpu_milli=100, memory_mib=128, command=["python3", "train.py"], attempt_count=1, ended_at=ended,
        state=(JobState.FAILED if failed else JobState.COMPLETED).value, reason=reason.value,
        exit_code=int(failed), message=END_MESSAGES[reason].format(exit_code=1),
    )  # fmt: skip


def _save(planned: Sequence[_PastJob], pool: NodePool) -> None:
    rows = Job.objects.bulk_create(each.row for each in planned)
    for row, each in zip(rows, planned, strict=True):  # creating the rows set these columns to now
        row.submitted_at = row.pending_since = each.began - each.wait
    Job.objects.bulk_update(rows, ["submitted_at", "pending_since"])
    JobEvent.objects.bulk_create(
        JobEvent(job=row, kind="submitted", actor=row.owner.username, message="Submitted.") for row in rows
    )
    ends = [AttemptState.FAILED if each.failed else AttemptState.COMPLETED for each in planned]
    attempts = Attempt.objects.bulk_create(
        Attempt(
            job=each.row, number=1, state=end.value, reason=each.row.reason, pool=pool, leader_epoch=1,
            queued_at=each.began - each.wait, running_at=each.began, ended_at=each.ended,
            exit_code=each.row.exit_code, failure_checked_at=each.ended,
        )
        for each, end in zip(planned, ends, strict=True)
    )  # fmt: skip
    for each, attempt in zip(planned, attempts, strict=True):
        attempt.created_at = each.began
    Attempt.objects.bulk_update(attempts, ["created_at"])
    tasks = Task.objects.bulk_create(
        Task(
            attempt=attempt, rank=0, node_id=each.gpus[0].node_id, state=attempt.state, running_at=each.began,
            ended_at=each.ended, exit_code=each.row.exit_code, container_removed=True, log_complete=True,
        )
        for each, attempt in zip(planned, attempts, strict=True)
    )  # fmt: skip
    held = [(each, task, gpu) for each, task in zip(planned, tasks, strict=True) for gpu in each.gpus]
    allocations = Allocation.objects.bulk_create(
        Allocation(
            task=task,
            gpu=gpu,
            milli=1000,
            whole=True,
            started_at=each.began,
            ended_at=each.ended,
            proof=PROOF,
        )
        for each, task, gpu in held
    )
    UsageInterval.objects.bulk_create(
        UsageInterval(
            allocation=allocation, project_id=each.row.project_id, user_id=each.row.owner_id, pool=pool,
            job=each.row, milli=1000, started_at=each.began, ended_at=each.ended,
        )
        for (each, _task, _gpu), allocation in zip(held, allocations, strict=True)
    )  # fmt: skip
    AttemptWork.objects.bulk_create(
        AttemptWork(
            attempt=attempt, project_id=each.row.project_id, user_id=each.row.owner_id, pool=pool,
            ended_at=each.ended, cause=LossCause.FAILURE.value if each.failed else "",
            startup_gpu_s=0.01 * each.gpu_s, useful_gpu_s=(0.7 if each.failed else 0.99) * each.gpu_s,
            lost_gpu_s=0.29 * each.gpu_s if each.failed else 0.0,
        )
        for each, attempt in zip(planned, attempts, strict=True)
    )  # fmt: skip
    AttemptGpuDay.objects.bulk_create(_gpu_days(planned, attempts, pool))


def _gpu_days(
    planned: Sequence[_PastJob], attempts: Sequence[Attempt], pool: NodePool
) -> list[AttemptGpuDay]:
    """Return what the GPUs did, by the days (UTC) of each job."""
    found = []
    for each, attempt in zip(planned, attempts, strict=True):
        begin, is_continued = each.began.astimezone(dt.UTC), False
        while begin < each.ended:
            midnight = dt.datetime.combine(begin.date() + dt.timedelta(days=1), dt.time(), dt.UTC)
            gpu_s = (min(midnight, each.ended) - begin).total_seconds() * len(each.gpus)
            idle = 0.12 if each.row.gpus_per_task == 1 else 0.03
            found.append(
                AttemptGpuDay(
                    attempt=attempt, job=each.row, project_id=each.row.project_id, user_id=each.row.owner_id,
                    pool=pool, day=begin.date(), is_continued=is_continued, joules=gpu_s * WATTS,
                    measured_gpu_s=gpu_s, busy_gpu_s=gpu_s * (0.85 - idle), idle_gpu_s=gpu_s * idle,
                    peak_memory_mib=each.gpus[0].memory_mib * 0.8,
                )
            )  # fmt: skip
            begin, is_continued = midnight, True
    return found
