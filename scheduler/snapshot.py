"""Photographs the record for a decision: one consistent moment, in a fixed number of queries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.db import connection, transaction
from django.db.models import Case, F, Q, When

from portal.models import (
    Allocation,
    Attempt,
    ClusterSettings,
    Gpu,
    Job,
    Node,
    NodePool,
    Project,
    Quota,
    Standing,
    Task,
    Volume,
)
from portal.selectors.past_use import past_use
from portal.words.reasons import EndReason
from portal.words.states import ATTEMPT_LIVE, Desired, GpuHealth, JobKind, JobState, NodeState, RuntimeKind
from scheduler.core.cluster import (
    GpuRow,
    GpuShare,
    GpuUuid,
    JobId,
    NodeId,
    NodeRow,
    PendingRow,
    PoolId,
    PoolRow,
    ProjectId,
    ProjectRow,
    QuotaRow,
    RunningRow,
    RunningTask,
    Snapshot,
    UsageRow,
    UserId,
)
from scheduler.core.policy import Policy, PolicyError
from scheduler.keeps import Kept, kept_tasks

ASKED = JobId("asked")
"""The id of a job that nobody has submitted; it is shorter than a public id."""
_PROMISE_STANDS = Q(
    stop_for__state=JobState.PENDING.value,
    stop_for__desired=Desired.RUN.value,
    stop_for__attempts_made=F("stop_for_after"),
)
_MAY_KEEP = (JobState.PENDING.value, JobState.RUNNING.value)
FIRST_PAUSE_S, LAST_PAUSE_S = 10.0, 300.0
_PAUSED_AFTER = frozenset({EndReason.START_REFUSED, EndReason.IMAGE_MISSING, EndReason.DISK_FULL})


@dataclass(frozen=True)
class Photo:
    """A snapshot, the policy that held then, and what commit compares with."""

    snapshot: Snapshot
    policy: Policy
    adopt_only: bool
    standings: dict[str, dict[str, Any]]
    """The newest verdict of each pending job, by job id."""
    pending_rows: dict[str, int]
    """Row numbers of the pending jobs, by job id."""
    unfit: dict[str, tuple[NodeId, ...]]
    """By kind of environment, the nodes that cannot run it."""
    homes: dict[str, NodeId]
    """By person, the node where their home is."""
    kept: dict[str, Kept]
    """The places that are kept for waiting and leaving jobs, by job id."""


def take_photo(settings: ClusterSettings) -> Photo:
    """The record as it is now. Raises PolicyError when a knob of the cluster or a pool is out of range."""
    policy = Policy.of(settings.policy)
    with _one_moment() as now_s:
        pools = _pools(settings.policy)
        tasks = _held_tasks()
        shares, whole = _live_allocations()
        gpus = _gpus(whole)
        nodes, runtimes = _nodes(gpus, tasks)
        projects = _projects()
        quotas = _quotas()
        usage = _usage(now_s, policy.half_life_s)
        unfit = {kind.value: _unfit(kind, runtimes) for kind in RuntimeKind}
        homes = _homes()
        running = _running(tasks, shares, unfit, homes)
        pending, rows = _pending(pools, unfit, homes)
        kept = _kept()
        standings = _standings()
    return Photo(
        snapshot=Snapshot(
            now_s=now_s,
            pools=pools,
            nodes=nodes,
            projects=projects,
            quotas=quotas,
            usage=usage,
            running=running,
            pending=pending,
        ),
        policy=policy,
        adopt_only=settings.adopt_only,
        standings=standings,
        pending_rows=rows,
        unfit=unfit,
        homes=homes,
        kept=kept,
    )


@contextmanager
def _one_moment() -> Iterator[float]:
    """A transaction that sees one moment of the record, and writes nothing; gives the database's clock."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cursor.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
            (now_s,) = cursor.fetchone()
        yield now_s


def _pools(knobs: dict[str, Any]) -> tuple[PoolRow, ...]:
    """Pools with the knobs that they turn otherwise than the cluster, whose own are ``knobs``."""
    found = []
    for id_, name, own in NodePool.objects.order_by("name").values_list("public_id", "name", "policy"):
        try:
            Policy.of({**knobs, **own})
        except PolicyError as wrong:
            raise PolicyError(wrong.field, f"in pool {name}: {wrong.message}") from wrong
        placement = own.get("placement")
        found.append(PoolRow(PoolId(id_), name, placement, tuple(sorted(own.items()))))
    return tuple(found)


def _held_tasks() -> dict[int, dict[str, Any]]:
    """Tasks whose container may live, by row number."""
    rows = Task.objects.filter(gone=False, attempt__state__in=ATTEMPT_LIVE).values(
        "id",
        "attempt_id",
        "rank",
        "node_id",
        node_public=F("node__public_id"),
        cpu=F("attempt__job__cpu_milli"),
        memory=F("attempt__job__memory_mib"),
    )
    return {row["id"]: dict(row) for row in rows.order_by("attempt_id", "rank")}


def _live_allocations() -> tuple[dict[int, list[GpuShare]], set[int]]:
    """What each task holds, by row number, and the row numbers of GPUs that are held alone."""
    shares: dict[int, list[GpuShare]] = defaultdict(list)
    whole: set[int] = set()
    rows = Allocation.objects.filter(ended_at__isnull=True).order_by("gpu__index")
    for task, gpu, uuid, milli, alone in rows.values_list("task_id", "gpu_id", "gpu__uuid", "milli", "whole"):
        shares[task].append(GpuShare(GpuUuid(uuid), milli))
        if alone:
            whole.add(gpu)
    return shares, whole


def _gpus(whole: set[int]) -> dict[int, list[GpuRow]]:
    """GPUs by their node's row number; one that its node no longer names stays while it is held."""
    found: dict[int, list[GpuRow]] = defaultdict(list)
    for gpu in Gpu.objects.order_by("node_id", "index", "id"):
        if gpu.present or gpu.used_milli:
            found[gpu.node_id].append(
                GpuRow(
                    uuid=GpuUuid(gpu.uuid),
                    index=gpu.index,
                    model=gpu.model,
                    memory_mib=gpu.memory_mib,
                    used_milli=gpu.used_milli,
                    whole=gpu.id in whole,
                    healthy=gpu.present and gpu.health == GpuHealth.OK.value,
                )
            )
    return found


def _nodes(
    gpus: dict[int, list[GpuRow]], tasks: dict[int, dict[str, Any]]
) -> tuple[tuple[NodeRow, ...], dict[str, str]]:
    """Node rows, and the runtime of each node by its id."""
    cpu: dict[int, int] = defaultdict(int)
    memory: dict[int, int] = defaultdict(int)
    for task in tasks.values():
        cpu[task["node_id"]] += task["cpu"]
        memory[task["node_id"]] += task["memory"]
    found, runtimes = [], {}
    away = {NodeState.RETIRED.value, NodeState.ENROLLING.value}
    for node in Node.objects.select_related("pool").defer("hello", "settings", "host_key").order_by("name"):
        if node.state in away and node.id not in cpu:
            continue
        runtimes[node.public_id] = node.runtime
        found.append(
            NodeRow(
                id=NodeId(node.public_id),
                name=node.name,
                pool=PoolId(node.pool.public_id),
                schedulable=node.state == NodeState.READY.value,
                reachable=node.reachable,
                cpu_milli=node.cpu_milli,
                cpu_used_milli=cpu[node.id],
                memory_mib=node.memory_mib,
                memory_used_mib=memory[node.id],
                gpus=tuple(gpus.get(node.id, ())),
            )
        )
    return tuple(found), runtimes


def _projects() -> tuple[ProjectRow, ...]:
    rows = Project.objects.order_by("id").values_list("public_id", "name", "parent__public_id", "created_at")
    return tuple(
        ProjectRow(ProjectId(id_), name, ProjectId(parent) if parent else None, created.timestamp())
        for id_, name, parent, created in rows
    )


def _quotas() -> tuple[QuotaRow, ...]:
    rows = Quota.objects.order_by("id").values_list(
        "project__public_id", "pool__public_id", "guaranteed_milli", "limit_milli", "weight", "priority"
    )
    return tuple(QuotaRow(ProjectId(row[0]), PoolId(row[1]), *row[2:]) for row in rows)


def _usage(now_s: float, half_life_s: float) -> tuple[UsageRow, ...]:
    """GPU-seconds by project, pool and person, each second halved once for every half-life since it passed."""
    return tuple(
        UsageRow(ProjectId(row.project), PoolId(row.pool), UserId(row.user), row.gpu_seconds)
        for row in past_use(now_s, half_life_s)
    )


def _running(
    tasks: dict[int, dict[str, Any]],
    shares: dict[int, list[GpuShare]],
    unfit: dict[str, tuple[NodeId, ...]],
    homes: dict[str, NodeId],
) -> tuple[RunningRow, ...]:
    """Jobs that hold places, with what a new place must offer if one is moved."""
    places: dict[int, list[RunningTask]] = defaultdict(list)
    for id_, task in tasks.items():
        places[task["attempt_id"]].append(
            RunningTask(NodeId(task["node_public"]), tuple(shares.get(id_, ())), task["cpu"], task["memory"])
        )
    rows = (
        Attempt.objects.filter(state__in=ATTEMPT_LIVE)
        .annotate(promised_to=Case(When(_PROMISE_STANDS, then=F("stop_for__public_id")), default=None))
        .order_by("id")
    )
    return tuple(
        RunningRow(
            job=JobId(row["job__public_id"]),
            project=ProjectId(row["job__project__public_id"]),
            user=UserId(row["job__owner__public_id"]),
            pool=PoolId(row["pool__public_id"]),
            priority=row["job__priority"],
            preemptible=row["job__preemptible"],
            started_s=row["created_at"].timestamp(),
            time_limit_s=row["job__time_limit_s"],
            tasks=tuple(places[row["id"]]),
            stopping=row["stop_wanted_at"] is not None,
            stopping_for=JobId(row["promised_to"]) if row["promised_to"] else None,
            name=row["job__name"],
            gpu_model=row["job__gpu_model"] or None,
            min_gpu_memory_mib=row["job__min_gpu_memory_mib"],
            submitted_s=row["job__submitted_at"].timestamp(),
            avoid_nodes=unfit[row["job__environment__runtime"]],
            node_affinity=_home(row["job__kind"], row["job__owner__public_id"], homes),
            kept=kept_tasks(row["job__kept"], row["job__cpu_milli"], row["job__memory_mib"]),
        )
        for row in rows.values(
            "id",
            "created_at",
            "stop_wanted_at",
            "promised_to",
            "pool__public_id",
            "job__public_id",
            "job__name",
            "job__project__public_id",
            "job__owner__public_id",
            "job__priority",
            "job__preemptible",
            "job__time_limit_s",
            "job__gpu_model",
            "job__min_gpu_memory_mib",
            "job__submitted_at",
            "job__kind",
            "job__environment__runtime",
            "job__kept",
            "job__cpu_milli",
            "job__memory_mib",
        )
    )


def _kept() -> dict[str, Kept]:
    rows = Job.objects.filter(kept__isnull=False, state__in=_MAY_KEEP)
    return {job: kept for job, kept in rows.values_list("public_id", "kept") if kept}


def _homes() -> dict[str, NodeId]:
    rows = Volume.objects.filter(kind="home", reach="node", node__isnull=False, owner__isnull=False)
    return {
        str(owner): NodeId(node) for owner, node in rows.values_list("owner__public_id", "node__public_id")
    }


def _pending(
    pools: tuple[PoolRow, ...],
    unfit: dict[str, tuple[NodeId, ...]],
    homes: dict[str, NodeId],
) -> tuple[tuple[PendingRow, ...], dict[str, int]]:
    """Waiting jobs. Nodes that run another kind of environment are among those a job avoids."""
    every_pool = tuple(pool.id for pool in pools)
    avoided: dict[int, list[str]] = defaultdict(list)
    waiting = Job.objects.filter(state=JobState.PENDING.value, desired=Desired.RUN.value)
    for job, node in Job.avoid_nodes.through.objects.filter(job__in=waiting).values_list(
        "job_id", "node__public_id"
    ):
        avoided[job].append(node)
    found, rows = [], {}
    for row in waiting.order_by("id").values(
        "id",
        "public_id",
        "name",
        "kind",
        "held",
        "version",
        "submitted_at",
        "queued_at",
        "reason",
        "attempts_made",
        "kept",
        "priority",
        "preemptible",
        "tasks",
        "gpus_per_task",
        "milli_per_gpu",
        "gpu_model",
        "min_gpu_memory_mib",
        "cpu_milli",
        "memory_mib",
        "time_limit_s",
        "project__public_id",
        "owner__public_id",
        "pool__public_id",
        "environment__runtime",
    ):
        rows[row["public_id"]] = row["id"]
        found.append(pending_row(dict(row), every_pool, unfit, avoided.get(row["id"], []), homes))
    return tuple(found), rows


def pending_row(
    row: dict[str, Any],
    every_pool: tuple[PoolId, ...],
    unfit: dict[str, tuple[NodeId, ...]],
    avoided: list[str],
    homes: dict[str, NodeId],
) -> PendingRow:
    """One waiting job as the decision sees it. A workspace goes where its owner's home is."""
    avoid = unfit[row["environment__runtime"]]
    home = _home(row["kind"], row["owner__public_id"], homes)
    return PendingRow(
        job=JobId(row["public_id"]),
        name=row["name"],
        project=ProjectId(row["project__public_id"]),
        user=UserId(row["owner__public_id"]),
        pools=(PoolId(row["pool__public_id"]),) if row["pool__public_id"] else every_pool,
        submitted_s=row["submitted_at"].timestamp(),
        priority=row["priority"],
        preemptible=row["preemptible"],
        tasks=row["tasks"],
        gpus_per_task=row["gpus_per_task"],
        milli_per_gpu=row["milli_per_gpu"],
        gpu_model=row["gpu_model"] or None,
        min_gpu_memory_mib=row["min_gpu_memory_mib"],
        cpu_milli=row["cpu_milli"],
        memory_mib=row["memory_mib"],
        time_limit_s=row["time_limit_s"],
        held=row["held"],
        not_before_s=_not_before_s(row),
        avoid_nodes=(*avoid, *map(NodeId, avoided)) if avoided else avoid,
        unfit_nodes=avoid,
        node_affinity=home,
        version=row["version"],
        kept=kept_tasks(row["kept"], row["cpu_milli"], row["memory_mib"]),
    )


def _home(kind: str, owner: str, homes: dict[str, NodeId]) -> NodeId | None:
    """A workspace goes where its owner's home is."""
    return homes.get(owner) if kind == JobKind.WORKSPACE.value else None


def _not_before_s(row: dict[str, Any]) -> float | None:
    """When a job whose last start failed may be tried again: after 10, 20, 40 ... s, at most 5 minutes."""
    if row["reason"] not in _PAUSED_AFTER:
        return None
    pause_s = min(FIRST_PAUSE_S * 2 ** max(0, row["attempts_made"] - 1), LAST_PAUSE_S)
    return float(row["queued_at"].timestamp() + pause_s)


def _unfit(kind: RuntimeKind, runtimes: dict[str, str]) -> tuple[NodeId, ...]:
    """Nodes that cannot run environments of a kind; podman and docker run each other's images."""
    containers = {RuntimeKind.PODMAN.value, RuntimeKind.DOCKER.value}
    fit = containers if kind.value in containers else {kind.value}
    return tuple(NodeId(node) for node, runtime in sorted(runtimes.items()) if runtime not in fit)


def _standings() -> dict[str, dict[str, Any]]:
    rows = Standing.objects.values(
        "job__public_id", "code", "sentence", "numbers", "ahead", "cheapest", "since", "decided_at"
    )
    return {row["job__public_id"]: dict(row) for row in rows}
