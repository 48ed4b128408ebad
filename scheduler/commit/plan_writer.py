"""Writes a plan to the database in batched transactions; each start is committed whole or refused.

A plan is made from a snapshot, so every start is checked again here: it is refused if its job, placement,
limits or reservations changed. A transaction that the database rejects is retried in halves. Nothing in this
module talks to a node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from django.db import DataError, IntegrityError, OperationalError, transaction

from portal.domain.jobs.reasons import EndReason
from portal.domain.nodes.node_breaker import BreakerState
from portal.domain.states import LIVE_ATTEMPT_STATES, DesiredState, JobKind, JobState
from portal.domain.storage.volumes import VolumeKind, VolumeScope
from portal.errors import Conflict
from portal.failpoints import failpoint
from portal.models import Attempt, Gpu, Job, Node, NodePool, Volume
from portal.services.jobs.attempt_secrets import create_attempt_secret
from portal.services.jobs.launching import needs_ssh_keys
from portal.services.lifecycle import elastic, job_control
from portal.services.lifecycle.elastic import ScaleUpSession, TaskEviction
from portal.services.lifecycle.job_control import AttemptStart, NewTasks, RankPlacement, StopRequest
from portal.services.nodes import quarantine
from portal.services.storage.volumes import declared_volumes
from scheduler import leases
from scheduler.commit.start_checks import QuotaCheck, ReservationCheck
from scheduler.core.model.plan import Eviction, JobPlacement
from scheduler.core.model.snapshot import JobId
from scheduler.leases import HeldLease
from scheduler.snapshot.dependencies import blocked_by_dependencies
from scheduler.snapshot.network_isolation import NetworkIsolationCheck

log = logging.getLogger(__name__)

MAX_BATCH = 200
"""Starts or evictions per transaction at most; such a transaction holds its locks for about 0.1 s."""

PlanItem = TypeVar("PlanItem", JobPlacement, Eviction)


@dataclass(frozen=True)
class CommitRefusal:
    """Why a start or an eviction was not committed; the next cycle plans again."""

    job: str
    code: str
    message: str


def commit_starts(leader: HeldLease, starts: Sequence[JobPlacement]) -> list[CommitRefusal]:
    """Commit ``starts`` and return the refused ones. Raise LeaseLostError when another scheduler leads."""
    return _in_batches(leader, starts, _start_jobs)


def commit_evictions(leader: HeldLease, evictions: Sequence[Eviction]) -> list[CommitRefusal]:
    """Request evictions and return the refused ones. Jobs hold their GPUs until nodes report them gone."""
    return _in_batches(leader, evictions, _request_evictions)


def _in_batches(
    leader: HeldLease,
    items: Sequence[PlanItem],
    write: Callable[[HeldLease, Sequence[PlanItem]], list[CommitRefusal]],
) -> list[CommitRefusal]:
    refused: list[CommitRefusal] = []
    for first in range(0, len(items), MAX_BATCH):
        if first:  # a long commit must not lose the leader lease
            leases.renew([leader.name], leader.holder, leases.LEADER_TTL_S)
        refused += _commit_batch(leader, items[first : first + MAX_BATCH], write)
    return refused


def _commit_batch(
    leader: HeldLease,
    items: Sequence[PlanItem],
    write: Callable[[HeldLease, Sequence[PlanItem]], list[CommitRefusal]],
) -> list[CommitRefusal]:
    """Write all ``items`` in one transaction; when the database rejects it, retry each half."""
    try:
        with transaction.atomic():
            leases.check(leader)
            refused = write(leader, items)
    except (Conflict, DataError, IntegrityError, OperationalError) as error:
        if len(items) == 1 or _is_unreachable(error):
            return [_build_refusal(item, error) for item in items]
        halves = items[: len(items) // 2], items[len(items) // 2 :]
        return [refusal for half in halves for refusal in _commit_batch(leader, half, write)]
    failpoint("commit.done")
    return refused


def _is_unreachable(error: Exception) -> bool:
    """Return True when the server did not answer, so that retrying in halves is pointless."""
    return isinstance(error, OperationalError) and getattr(error.__cause__, "sqlstate", None) is None


def _build_refusal(item: JobPlacement | Eviction, error: Exception) -> CommitRefusal:
    match error:
        case Conflict():
            return CommitRefusal(item.job, error.code, error.message)
        case IntegrityError():
            return CommitRefusal(
                item.job, "gpu_taken", f"A GPU of the plan is already allocated: {_first_line(error)}"
            )
    return CommitRefusal(
        item.job, "database", f"The database rejected the write; it is retried: {_first_line(error)}"
    )


# -- starts ----------------------------------------------------------------------------------------


def _start_jobs(leader: HeldLease, starts: Sequence[JobPlacement]) -> list[CommitRefusal]:
    """Start the jobs whose checks pass and refuse the others. Locks rows in the order jobs, quotas, GPUs."""
    rows = Job.objects.select_for_update(of=("self",), no_key=True).select_related("project", "owner")
    jobs = {job.public_id: job for job in rows.filter(public_id__in=_ids(starts)).order_by("pk")}
    rows_by_id = _PlacementRows(starts)
    reservation_check = ReservationCheck({task.node for start in starts for task in start.tasks})
    quota_check = QuotaCheck(
        (jobs[start.job].project_id, rows_by_id.pools[start.pool].pk)
        for start in starts
        if start.job in jobs and start.pool in rows_by_id.pools
    )
    blocked = blocked_by_dependencies(job.pk for job in jobs.values() if job.state == JobState.PENDING)
    growing = ScaleUpSession(jobs.values())
    isolation_check = NetworkIsolationCheck(
        jobs.values(), rows_by_id.pools, {task.node for start in starts for task in start.tasks}
    )
    refused: list[CommitRefusal] = []
    beginnings: list[AttemptStart] = []
    growths: list[NewTasks] = []
    for start in starts:
        try:
            job = _check_unchanged(jobs.get(start.job), start)
            if job.pk in blocked:
                raise Conflict("It depends on a job that has not ended.", code="dependency")
            pool, placements = rows_by_id.resolve(start)
            reservation_check.check(job, start)
            isolation_check.check(job, pool, placements)
            growth = None if job.state == JobState.PENDING else growing.scale_up(job, placements)
            rows_by_id.claim_probation_nodes(start)
            milli = sum(milli for placement in placements for _, milli in placement.gpus)
            quota_check.check_and_add(job, pool, milli)
            isolation_check.add(job, placements)
        except Conflict as error:
            refused.append(_build_refusal(start, error))
            continue
        if growth is not None:
            growths.append(growth)
            continue
        has_secret = job.kind == JobKind.WORKSPACE.value or needs_ssh_keys(job)
        secret = create_attempt_secret(job) if has_secret else ""
        beginnings.append(AttemptStart(job, pool, placements, secret))
    _assign_home_nodes(beginnings)
    failpoint("commit.in_transaction")
    if beginnings and growths:  # each locks GPUs in its own order; together the order would be undefined
        placements = [placement for beginning in beginnings for placement in beginning.placements]
        placements += [placement for growth in growths for placement in growth.placements]
        wanted = {gpu for placement in placements for gpu, _ in placement.gpus}
        list(Gpu.objects.select_for_update(no_key=True).filter(pk__in=wanted).order_by("pk").values("pk"))
    if beginnings:
        attempts = job_control.start_attempts(beginnings, epoch=leader.epoch)
        quarantine.start_probations(
            (attempt, [placement.node for placement in beginning.placements])
            for attempt, beginning in zip(attempts, beginnings, strict=True)
        )
    if growths:
        elastic.scale_up_attempts(growths)
        quarantine.start_probations(
            (growth.attempt, [placement.node for placement in growth.placements]) for growth in growths
        )
    failpoint("commit.before_commit")
    return refused


def _check_unchanged(job: Job | None, start: JobPlacement) -> Job:
    """Return the locked job if unchanged and pending, or running and elastic. Raise Conflict otherwise."""
    if (
        job is None
        or job.version != start.version
        or not (job.state == JobState.PENDING or (job.state == JobState.RUNNING and job.is_elastic))
        or job.desired_state != DesiredState.RUN
        or job.held
    ):
        raise Conflict("The job changed after the plan was computed.", code="job_changed")
    return job


class _PlacementRows:
    """Current rows of the pools, nodes and GPUs that starts name."""

    def __init__(self, starts: Sequence[JobPlacement]) -> None:
        tasks = [task for start in starts for task in start.tasks]
        self.pools = NodePool.objects.in_bulk({start.pool for start in starts}, field_name="public_id")
        self._nodes = Node.objects.in_bulk({task.node for task in tasks}, field_name="public_id")
        uuids = {share.uuid for task in tasks for share in task.gpus}
        self._gpus = {
            uuid: (gpu, node)
            for uuid, gpu, node in Gpu.objects.filter(uuid__in=uuids).values_list("uuid", "pk", "node_id")
        }
        self._probation_jobs: dict[int, JobId] = {}

    def claim_probation_nodes(self, start: JobPlacement) -> None:
        """Reserve probation nodes, one job per node. Raise Conflict when another start has one."""
        nodes = {self._nodes[task.node] for task in start.tasks}
        tried = [node for node in nodes if node.breaker_state == BreakerState.PROBATION.value]
        for node in tried:
            if self._probation_jobs.setdefault(node.pk, start.job) != start.job:
                raise Conflict(f"{node.name} is on probation with another job.", code="node_on_probation")

    def resolve(self, start: JobPlacement) -> tuple[NodePool, list[RankPlacement]]:
        """Return the placements as rows in rank order. Raise Conflict when a node or GPU is unavailable."""
        pool = self.pools.get(start.pool)
        if pool is None:
            raise Conflict("The pool of the plan no longer exists.", code="node_changed")
        found = []
        for task in sorted(start.tasks, key=lambda task: task.rank):
            node = self._nodes.get(task.node)
            if node is None or not node.accepts_work or node.pool_id != pool.pk:
                raise Conflict("A node of the plan no longer accepts jobs.", code="node_changed")
            held = []
            for share in task.gpus:
                gpu, on_node = self._gpus.get(share.uuid, (None, None))
                if gpu is None or on_node != node.pk:
                    raise Conflict(f"{node.name} no longer has GPU {share.uuid}.", code="node_changed")
                held.append((gpu, share.milli))
            found.append(RankPlacement(node, held))
        return pool, found


def _assign_home_nodes(beginnings: Sequence[AttemptStart]) -> None:
    """Assign each user's home volume to the node of their first workspace, unless homes are shared."""
    where: dict[int, int] = {}
    for each in beginnings:
        if each.job.kind == JobKind.WORKSPACE.value:
            where.setdefault(each.job.owner_id, each.placements[0].node.pk)
    if (
        not where
        or declared_volumes().filter(kind=VolumeKind.HOME.value, scope=VolumeScope.SHARED.value).exists()
    ):
        return
    homes = [Volume(owner_id=owner, kind=VolumeKind.HOME.value, name="home") for owner in sorted(where)]
    Volume.objects.bulk_create(homes, ignore_conflicts=True)
    unsettled = Volume.objects.filter(owner__in=where, kind="home", scope="node", node__isnull=True)
    settled = list(unsettled.order_by("pk"))
    for home in settled:
        home.node_id = where[home.owner_id] if home.owner_id else None
    Volume.objects.bulk_update(settled, ["node"])


# -- evictions -------------------------------------------------------------------------------------


def _request_evictions(leader: HeldLease, evictions: Sequence[Eviction]) -> list[CommitRefusal]:
    """Request the eviction of jobs that have a live attempt without a stop request."""
    rows = Job.objects.select_for_update(of=("self",), no_key=True)
    jobs = {job.pk: job.public_id for job in rows.filter(public_id__in=_ids(evictions)).order_by("pk")}
    live = Attempt.objects.filter(
        job__in=jobs, state__in=[state.value for state in LIVE_ATTEMPT_STATES], stop_requested_at__isnull=True
    )
    attempts = {jobs[job]: attempt for job, attempt in live.values_list("job_id", "pk")}
    winners = Job.objects.in_bulk({each.for_job for each in evictions}, field_name="public_id")
    shrink = [each for each in evictions if each.ranks and each.job in attempts]
    kept = elastic.request_task_evictions(
        [
            TaskEviction(
                attempts[each.job],
                frozenset(each.ranks),
                EndReason(each.reason.value),
                for_job=winners.get(each.for_job),
            )
            for each in shrink
        ],
        actor="the scheduler",
    )
    changed = {each.job for each in shrink if attempts[each.job] in kept}
    going = [each for each in evictions if not each.ranks and each.job in attempts]
    job_control.request_stops(
        [
            StopRequest(attempts[each.job], EndReason(each.reason.value), for_job=winners.get(each.for_job))
            for each in going
        ],
        actor="the scheduler",
    )
    return [
        CommitRefusal(each.job, "job_changed", "It no longer holds resources.")
        for each in evictions
        if each.job not in attempts
    ] + [
        CommitRefusal(each.job, "job_changed", "Its tasks changed after the plan was computed.")
        for each in shrink
        if each.job in changed
    ]


def _ids(items: Sequence[JobPlacement] | Sequence[Eviction]) -> list[str]:
    return [str(item.job) for item in items]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
