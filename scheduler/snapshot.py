"""Photographs the record for a decision: one consistent moment, in a fixed number of queries."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from django.contrib.postgres.aggregates import ArrayAgg
from django.db import connection, transaction
from django.db.models import Case, Exists, F, OuterRef, Q, When

from portal.models import (
    Allocation,
    Attempt,
    ClusterSettings,
    Environment,
    Gpu,
    Job,
    Node,
    NodePool,
    Project,
    Quota,
    Reservation,
    Task,
    Topology,
    Volume,
)
from portal.selectors.past_use import past_use
from portal.words.reasons import EndReason
from portal.words.states import ATTEMPT_LIVE, Desired, GpuHealth, JobKind, JobState, NodeState, RuntimeKind
from scheduler.album import Built, Known, marks_of
from scheduler.awaited import waits_of
from scheduler.core.cluster import (
    GpuRow,
    GpuShare,
    GpuUuid,
    JobId,
    Near,
    NodeId,
    NodeRow,
    PendingRow,
    PoolId,
    PoolRow,
    ProjectId,
    ProjectRow,
    QuotaRow,
    ReservationRow,
    RunningRow,
    RunningTask,
    Snapshot,
    TopologyRow,
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
_LIVE = tuple(state.value for state in ATTEMPT_LIVE)
_WAITING = Job.objects.filter(state=JobState.PENDING.value, desired=Desired.RUN.value)
_MAY_KEEP = (JobState.PENDING.value, JobState.RUNNING.value)
FIRST_PAUSE_S, LAST_PAUSE_S = 10.0, 300.0
_PAUSED_AFTER = frozenset({EndReason.START_REFUSED, EndReason.IMAGE_MISSING, EndReason.DISK_FULL})


@dataclass(frozen=True)
class Photo:
    """A snapshot, the policy that held then, and what commit compares with."""

    snapshot: Snapshot
    policy: Policy
    adopt_only: bool
    pending_rows: dict[str, int]
    """Row numbers of the pending jobs, by job id."""
    unfit: dict[str, tuple[NodeId, ...]]
    """By kind of environment, the nodes that cannot run it."""
    homes: dict[str, NodeId]
    """By person, the node where their home is."""
    kept: dict[str, Kept]
    """The places that are kept for waiting and leaving jobs, by job id."""


class Album:
    """What the next photograph of a process need not read or make again: rows that say the same."""

    def __init__(self) -> None:
        self.gpus = Known[tuple[GpuRow, ...]]()
        self.held = Known["_Held"]()
        self.waiting = Known[dict[str, Any]]()
        self.nodes = Built[tuple[Any, tuple[GpuRow, ...], int, int], NodeRow]()
        self.running = Built["_Held", RunningRow]()
        self.pending = Built[dict[str, Any], PendingRow]()


def take_photo(settings: ClusterSettings, album: Album | None = None) -> Photo:
    """The record as it is now; with ``album`` rows that say the same are the objects of before.

    Raises PolicyError when a knob of the cluster or a pool is out of range.
    """
    policy = Policy.of(settings.policy)
    album = album or Album()
    with _one_moment() as now_s:
        pools = _pools(settings.policy)
        held = _held(album.held)
        nodes, runtimes = _nodes(_gpus(album.gpus), held.values(), album.nodes)
        topologies = _topologies()
        reservations = _reservations(now_s, nodes)
        projects = _projects()
        quotas = _quotas()
        usage = _usage(now_s, policy.half_life_s)
        runs = dict(Environment.objects.values_list("id", "runtime"))
        unfit = {kind.value: _unfit(kind, runtimes) for kind in RuntimeKind}
        homes = _homes()
        running = _running(held, runs, unfit, homes, album.running)
        pending, rows = _pending(pools, runs, unfit, homes, album.waiting, album.pending)
        kept = _kept()
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
            topologies=topologies,
            reservations=reservations,
        ),
        policy=policy,
        adopt_only=settings.adopt_only,
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


def _gpus(known: Known[tuple[GpuRow, ...]]) -> dict[int, tuple[GpuRow, ...]]:
    """GPUs by their node's row number; one that its node no longer names stays while it is held.

    Who holds a GPU alone is known with its row, which moves with each allocation (law 4).
    """
    return known.read(
        marks_of(
            "SELECT node_id, string_agg(id::text || ':' || xmin::text, ' ' ORDER BY index, id)"
            "  FROM portal_gpu WHERE present OR used_milli > 0 GROUP BY node_id"
        ),
        _gpus_of,
    )


def _gpus_of(nodes: Sequence[int] | None) -> Iterator[tuple[int, tuple[GpuRow, ...]]]:
    rows = Gpu.objects.filter(Q(present=True) | Q(used_milli__gt=0)).order_by("node_id", "index", "id")
    alone = Exists(Allocation.objects.filter(gpu=OuterRef("pk"), whole=True, ended_at__isnull=True))
    chosen = rows if nodes is None else rows.filter(node__in=nodes)
    for node, gpus in groupby(chosen.annotate(alone=alone), key=lambda gpu: gpu.node_id):
        yield (
            node,
            tuple(
                GpuRow(
                    uuid=GpuUuid(gpu.uuid),
                    index=gpu.index,
                    model=gpu.model,
                    memory_mib=gpu.memory_mib,
                    used_milli=gpu.used_milli,
                    whole=gpu.alone,
                    healthy=gpu.present and gpu.health == GpuHealth.OK.value,
                    island=gpu.island,
                    mig_profile=gpu.mig_profile or None,
                    compute_capability=gpu.compute_capability,
                )
                for gpu in gpus
            ),
        )


def _nodes(
    gpus: dict[int, tuple[GpuRow, ...]],
    held: Iterable[_Held],
    built: Built[tuple[Any, tuple[GpuRow, ...], int, int], NodeRow],
) -> tuple[tuple[NodeRow, ...], dict[str, str]]:
    """Node rows, and the runtime of each node by its id."""
    cpu: dict[int, int] = defaultdict(int)
    memory: dict[int, int] = defaultdict(int)
    for attempt in held:
        for node_id in attempt.nodes:
            cpu[node_id] += attempt.row["job__cpu_milli"]
            memory[node_id] += attempt.row["job__memory_mib"]
    away = {NodeState.RETIRED.value, NodeState.ENROLLING.value}
    rows = {
        node.id: (node, gpus.get(node.id, ()), cpu[node.id], memory[node.id])
        for node in Node.objects.order_by("name").values_list(
            "id",
            "public_id",
            "name",
            "pool__public_id",
            "state",
            "reachable",
            "cpu_milli",
            "memory_mib",
            "runtime",
            "labels",
            named=True,
        )
        if node.state not in away or node.id in cpu
    }
    runtimes = {node.public_id: node.runtime for node, *_ in rows.values()}
    return built.of(rows, None, lambda _, row: node_row(*row)), runtimes


def node_row(node: Any, gpus: tuple[GpuRow, ...], cpu_used_milli: int, memory_used_mib: int) -> NodeRow:
    """One node as the decision sees it."""
    return NodeRow(
        id=NodeId(node.public_id),
        name=node.name,
        pool=PoolId(node.pool__public_id),
        schedulable=node.state == NodeState.READY.value,
        reachable=node.reachable,
        cpu_milli=node.cpu_milli,
        cpu_used_milli=cpu_used_milli,
        memory_mib=node.memory_mib,
        memory_used_mib=memory_used_mib,
        gpus=gpus,
        labels=tuple(sorted(node.labels.items())),
    )


def _topologies() -> tuple[TopologyRow, ...]:
    rows = Topology.objects.order_by("name").values_list("name", "levels")
    return tuple(TopologyRow(name, tuple(levels)) for name, levels in rows)


def _reservations(now_s: float, nodes: tuple[NodeRow, ...]) -> tuple[ReservationRow, ...]:
    """What is reserved now or later, of the nodes that the photograph shows."""
    shown = {node.id for node in nodes}
    rows = (
        Reservation.objects.filter(
            cancelled_at__isnull=True, during__endswith__gt=dt.datetime.fromtimestamp(now_s, dt.UTC)
        )
        .annotate(
            node_ids=ArrayAgg("reserved__node__public_id", distinct=True),
            project_ids=ArrayAgg(
                "projects__public_id", distinct=True, filter=Q(projects__isnull=False), default=[]
            ),
        )
        .order_by("id")
        .values_list("public_id", "name", "during", "node_ids", "project_ids")
    )
    found = []
    for id_, name, during, node_ids, project_ids in rows:
        if inside := tuple(NodeId(node) for node in node_ids if node in shown):
            projects = tuple(map(ProjectId, project_ids))
            begin_s, end_s = during.lower.timestamp(), during.upper.timestamp()
            found.append(ReservationRow(id_, name, inside, projects, begin_s, end_s))
    return tuple(found)


def near_of(asked: dict[str, Any] | None) -> Near | None:
    """How near to each other tasks stand, as the decision reads it."""
    return Near(asked["topology"], asked.get("required"), asked.get("preferred")) if asked else None


def _projects() -> tuple[ProjectRow, ...]:
    rows = Project.objects.order_by("id").values_list("public_id", "name", "parent__public_id", "created_at")
    return tuple(
        ProjectRow(ProjectId(id_), name, ProjectId(parent) if parent else None, created.timestamp())
        for id_, name, parent, created in rows
    )


def _quotas() -> tuple[QuotaRow, ...]:
    rows = Quota.objects.order_by("id").values_list(
        "project__public_id",
        "pool__public_id",
        "guaranteed_milli",
        "limit_milli",
        "weight",
        "priority",
        "user_limit_milli",
    )
    return tuple(
        QuotaRow(ProjectId(row[0]), PoolId(row[1]), *row[2:6], user_limit_milli=row[6]) for row in rows
    )


def _usage(now_s: float, half_life_s: float) -> tuple[UsageRow, ...]:
    """GPU-seconds by project, pool and person, each second halved once for every half-life since it passed."""
    return tuple(
        UsageRow(ProjectId(row.project), PoolId(row.pool), UserId(row.user), row.gpu_seconds)
        for row in past_use(now_s, half_life_s)
    )


@dataclass(frozen=True, eq=False)
class _Held:
    """An attempt that may hold places: its columns with its job's, and its tasks whose container may live."""

    row: dict[str, Any]
    tasks: tuple[RunningTask, ...]
    nodes: tuple[int, ...]
    """Row numbers of the nodes of ``tasks``."""


def _held(known: Known[_Held]) -> dict[int, _Held]:
    """Attempts that may hold places, by row number.

    What a task holds begins with it and ends when it is gone, so it is known with the tasks that are not.
    """
    return known.read(
        marks_of(
            "SELECT attempt.id, concat_ws(' ', attempt.xmin, job.xmin, winner.xmin, (SELECT"
            "       string_agg(id::text || ':' || node_id::text, ' ' ORDER BY rank)"
            "       FROM portal_task WHERE attempt_id = attempt.id AND NOT gone))"
            "  FROM portal_attempt attempt JOIN portal_job job ON job.id = attempt.job_id"
            "  LEFT JOIN portal_job winner ON winner.id = attempt.stop_for_id"
            " WHERE attempt.state = ANY(%s) ORDER BY attempt.id",
            [list(_LIVE)],
        ),
        _held_by,
    )


def _held_by(attempts: Sequence[int] | None) -> Iterator[tuple[int, _Held]]:
    live = Attempt.objects.filter(state__in=_LIVE)
    chosen = live if attempts is None else live.filter(pk__in=attempts)
    shares: dict[int, list[GpuShare]] = defaultdict(list)
    for task, uuid, milli in (
        Allocation.objects.filter(ended_at__isnull=True, task__attempt__in=chosen)
        .order_by("gpu__index")
        .values_list("task_id", "gpu__uuid", "milli")
    ):
        shares[task].append(GpuShare(GpuUuid(uuid), milli))
    tasks: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for id_, attempt, node, node_id in (
        Task.objects.filter(gone=False, attempt__in=chosen)
        .order_by("attempt_id", "rank")
        .values_list("id", "attempt_id", "node_id", "node__public_id")
    ):
        tasks[attempt].append((id_, node, node_id))
    promised_to = Case(When(_PROMISE_STANDS, then=F("stop_for__public_id")), default=None)
    for row in chosen.annotate(promised_to=promised_to).values(
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
        "job__near",
        "job__mig_profile",
        "job__min_compute_capability",
        "job__submitted_at",
        "job__kind",
        "job__environment_id",
        "job__kept",
        "job__cpu_milli",
        "job__memory_mib",
    ):
        mine = tasks[row["id"]]
        each = row["job__cpu_milli"], row["job__memory_mib"]
        places = (RunningTask(NodeId(node), tuple(shares.get(id_, ())), *each) for id_, _, node in mine)
        yield row["id"], _Held(dict(row), tuple(places), tuple(node for _, node, _ in mine))


def _running(
    held: dict[int, _Held],
    runs: dict[int, str],
    unfit: dict[str, tuple[NodeId, ...]],
    homes: dict[str, NodeId],
    built: Built[_Held, RunningRow],
) -> tuple[RunningRow, ...]:
    """Jobs that hold places, with what a new place must offer if one is moved."""

    def make(_: int, attempt: _Held) -> RunningRow:
        row = attempt.row
        home = _home(row["job__kind"], row["job__owner__public_id"], homes)
        return running_row(attempt, unfit[runs[row["job__environment_id"]]], home)

    return built.of(held, (runs, unfit, homes), make)


def running_row(attempt: _Held, avoid: tuple[NodeId, ...], home: NodeId | None) -> RunningRow:
    """One job that holds places as the decision sees it."""
    row = attempt.row
    return RunningRow(
        job=JobId(row["job__public_id"]),
        project=ProjectId(row["job__project__public_id"]),
        user=UserId(row["job__owner__public_id"]),
        pool=PoolId(row["pool__public_id"]),
        priority=row["job__priority"],
        preemptible=row["job__preemptible"],
        started_s=row["created_at"].timestamp(),
        time_limit_s=row["job__time_limit_s"],
        tasks=attempt.tasks,
        stopping=row["stop_wanted_at"] is not None,
        stopping_for=JobId(row["promised_to"]) if row["promised_to"] else None,
        name=row["job__name"],
        gpu_model=row["job__gpu_model"] or None,
        min_gpu_memory_mib=row["job__min_gpu_memory_mib"],
        near=near_of(row["job__near"]),
        mig_profile=row["job__mig_profile"] or None,
        min_compute_capability=row["job__min_compute_capability"],
        submitted_s=row["job__submitted_at"].timestamp(),
        avoid_nodes=avoid,
        node_affinity=home,
        kept=kept_tasks(row["job__kept"], row["job__cpu_milli"], row["job__memory_mib"]),
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
    runs: dict[int, str],
    unfit: dict[str, tuple[NodeId, ...]],
    homes: dict[str, NodeId],
    known: Known[dict[str, Any]],
    built: Built[dict[str, Any], PendingRow],
) -> tuple[tuple[PendingRow, ...], dict[str, int]]:
    """Waiting jobs. Nodes that run another kind of environment are among those a job avoids."""
    every_pool = tuple(pool.id for pool in pools)
    avoided: dict[int, list[str]] = defaultdict(list)
    for job, node in Job.avoid_nodes.through.objects.filter(job__in=_WAITING).values_list(
        "job_id", "node__public_id"
    ):
        avoided[job].append(node)
    waiting = known.read(
        marks_of(
            "SELECT id, xmin::text FROM portal_job WHERE state = %s AND desired = %s ORDER BY id",
            [JobState.PENDING.value, Desired.RUN.value],
        ),
        _waiting,
    )

    def make(id_: int, row: dict[str, Any]) -> PendingRow:
        home = _home(row["kind"], row["owner__public_id"], homes)
        return pending_row(row, every_pool, unfit[runs[row["environment_id"]]], avoided.get(id_, []), home)

    pending = built.of(waiting, (every_pool, runs, unfit, homes, dict(avoided)), make)
    if waits := waits_of(_WAITING):
        told = zip(waiting, pending, strict=True)
        pending = tuple(waits[id_].told(row) if id_ in waits else row for id_, row in told)
    return pending, {row["public_id"]: id_ for id_, row in waiting.items()}


def _waiting(jobs: Sequence[int] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    chosen = _WAITING if jobs is None else Job.objects.filter(pk__in=jobs)
    for row in chosen.values(
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
        "near",
        "mig_profile",
        "min_compute_capability",
        "cpu_milli",
        "memory_mib",
        "time_limit_s",
        "project__public_id",
        "owner__public_id",
        "pool__public_id",
        "environment_id",
    ):
        yield row["id"], dict(row)


def pending_row(
    row: dict[str, Any],
    every_pool: tuple[PoolId, ...],
    avoid: tuple[NodeId, ...],
    avoided: list[str],
    home: NodeId | None,
) -> PendingRow:
    """One waiting job as the decision sees it; ``avoid`` are the nodes that cannot run its environment."""
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
        near=near_of(row["near"]),
        mig_profile=row["mig_profile"] or None,
        min_compute_capability=row["min_compute_capability"],
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
