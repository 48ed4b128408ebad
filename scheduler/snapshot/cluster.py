"""Reads pools, nodes, projects, quotas and reservations as snapshot rows."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from django.contrib.postgres.aggregates import ArrayAgg
from django.db import connection
from django.db.models import Exists, OuterRef, Q, Value
from django.db.models.functions import NullIf

from portal.domain.nodes.node_breaker import accepts_another_job
from portal.domain.scheduling.policy_settings import affects_decisions
from portal.domain.states import GpuHealth, NodeState
from portal.models import (
    Allocation,
    Gpu,
    Node,
    NodePool,
    Project,
    Quota,
    Reservation,
    Topology,
)
from portal.selectors.projects.quota_additions import with_effective_quota
from portal.selectors.scheduling.decayed_usage import decayed_usage
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import (
    GpuRow,
    NodeId,
    NodeRow,
    PoolId,
    PoolRow,
    ProjectId,
    ProjectRow,
    QuotaRow,
    ReservationRow,
    TopologyRow,
    UsageRow,
    UserId,
)
from scheduler.core.model.validation import Fault, RowKind
from scheduler.snapshot.node_eligibility import NodeCapabilities
from scheduler.snapshot.row_cache import (
    INVALID_DATA,
    DerivedCache,
    RowCache,
    row_version_blocks,
    row_versions,
)
from scheduler.snapshot.running import EpochSeconds, LiveAttempt


def read_pools(cluster_settings: dict[str, Any], faults: list[Fault]) -> tuple[PoolRow, ...]:
    """Return pools with the policy settings that override those of the cluster (``cluster_settings``).

    A pool with invalid settings is added to ``faults`` and returned without overrides.
    """
    found = []
    rows = NodePool.objects.order_by("name").values_list("public_id", "name", "policy", "allow_host_network")
    for id_, name, pool_settings, host_network in rows:
        try:
            Policy.from_settings({**cluster_settings, **pool_settings})
            placement = pool_settings.get("placement")
            overrides = sorted(
                (setting, value) for setting, value in pool_settings.items() if affects_decisions(setting)
            )
        except INVALID_DATA as error:  # includes PolicyError
            faults.append(Fault(RowKind.POOL, id_, f"pools[{id_}].policy", f"{error}"))
            placement, overrides = None, []
        found.append(PoolRow(PoolId(id_), name, placement, tuple(overrides), host_network))
    return tuple(found)


def read_gpus(cache: RowCache[tuple[GpuRow, ...]]) -> dict[int, tuple[GpuRow, ...]]:
    """Return GPUs by primary key of their node, including absent ones that are still allocated.

    A whole-GPU allocation needs no version of its own: every allocation updates the GPU row.
    """
    return cache.refresh(
        row_versions(
            "SELECT node_id, string_agg(id::text || ':' || xmin::text, ' ')"
            "  FROM portal_gpu WHERE present OR used_milli > 0 GROUP BY node_id"
        ),
        _fetch_gpus,
    )


def _fetch_gpus(nodes: Sequence[int] | None) -> Iterator[tuple[int, tuple[GpuRow, ...]]]:
    rows = Gpu.objects.filter(Q(present=True) | Q(used_milli__gt=0)).order_by("node_id", "index", "id")
    chosen = rows if nodes is None else rows.filter(node__in=nodes)
    columns = chosen.annotate(
        exclusive=Exists(Allocation.objects.filter(gpu=OuterRef("pk"), whole=True, ended_at__isnull=True)),
        healthy=Q(present=True, health=GpuHealth.OK.value, foreign_process_owner=""),
        profile=NullIf("mig_profile", Value("")),
    ).values_list(
        "node_id", "uuid", "index", "model", "memory_mib", "used_milli", "exclusive", "healthy", "nvlink_island",
        "profile", "compute_capability",
    )  # fmt: skip
    for node, gpus in groupby(columns, key=itemgetter(0)):
        yield node, tuple(GpuRow(*gpu) for _, *gpu in gpus)


def read_nodes(
    gpus: dict[int, tuple[GpuRow, ...]],
    attempts: Iterable[LiveAttempt],
    columns_cache: RowCache[Any],
    rows_cache: DerivedCache[tuple[Any, tuple[GpuRow, ...], int, int], NodeRow],
) -> tuple[tuple[NodeRow, ...], dict[str, NodeCapabilities]]:
    """Return node rows, and what each node can run by node id."""
    cpu: dict[int, int] = defaultdict(int)
    memory: dict[int, int] = defaultdict(int)
    for attempt in attempts:
        for node_id, task in zip(attempt.node_ids, attempt.tasks, strict=True):
            cpu[node_id] += task.cpu_milli
            memory[node_id] += task.memory_mib
    inactive_states = {NodeState.RETIRED.value, NodeState.ENROLLING.value}
    nodes = columns_cache.refresh_blocks(row_version_blocks("portal_node", "id"), _fetch_nodes)
    rows = {
        id_: (node, gpus.get(id_, ()), cpu[id_], memory[id_])
        for id_, node in nodes.items()
        if node.state not in inactive_states or id_ in cpu
    }
    capabilities = {
        node.public_id: NodeCapabilities(
            node.runtime,
            node.agent_info__driver if isinstance(node.agent_info__driver, str) else None,
            bool(node.agent_info__gpu_sharing__enforced),
            node.agent_info__max_cuda_version if isinstance(node.agent_info__max_cuda_version, str) else None,
            bool(node.missing_requirements),
            node.pool__public_id,
            bool((node.agent_info__egress or {}).get(node.runtime)),
        )
        for node, *_ in rows.values()
    }
    return rows_cache.map(
        rows, None, lambda _, row: build_node_row(*row), lambda _, row: _build_row_without_json(*row)
    ), capabilities


def _fetch_nodes(nodes: Sequence[int] | None) -> Iterator[tuple[int, Any]]:
    chosen = Node.objects.all() if nodes is None else Node.objects.filter(pk__in=nodes)
    for node in chosen.values_list(
        "id", "public_id", "name", "pool__public_id", "state", "reachable", "cpu_milli", "memory_mib", "runtime",
        "labels", "breaker_state", "probation_attempt", "agent_info__driver", "agent_info__gpu_sharing__enforced",
        "agent_info__max_cuda_version", "missing_requirements", "agent_info__egress", "slow_network", named=True,
    ):  # fmt: skip
        yield node.id, node


def _build_row_without_json(
    node: Any, gpus: tuple[GpuRow, ...], cpu_used_milli: int, memory_used_mib: int
) -> NodeRow:
    """Return the row of a node with invalid JSON; it is not schedulable."""
    plain = node._replace(labels={}, agent_info__driver=None, agent_info__max_cuda_version=None)
    return replace(build_node_row(plain, gpus, cpu_used_milli, memory_used_mib), schedulable=False)


def build_node_row(node: Any, gpus: tuple[GpuRow, ...], cpu_used_milli: int, memory_used_mib: int) -> NodeRow:
    """Return the snapshot row of a node. Raise ValueError for invalid JSON values."""
    if not isinstance(node.labels, dict):
        raise ValueError("labels are not an object")
    for name in ("driver", "max_cuda_version"):
        if not isinstance(getattr(node, f"agent_info__{name}"), str | None):
            raise ValueError(f"agent_info.{name} is not a string")
    return NodeRow(
        id=NodeId(node.public_id),
        name=node.name,
        pool=PoolId(node.pool__public_id),
        schedulable=node.state == NodeState.READY.value
        and accepts_another_job(node.breaker_state, node.probation_attempt),
        reachable=node.reachable,
        cpu_milli=node.cpu_milli,
        cpu_used_milli=cpu_used_milli,
        memory_mib=node.memory_mib,
        memory_used_mib=memory_used_mib,
        gpus=gpus,
        labels=tuple(sorted(node.labels.items())),
        missing_requirements=node.missing_requirements,
        driver_cuda=node.agent_info__max_cuda_version,
        slow_network=node.slow_network,
    )


def read_topologies(faults: list[Fault]) -> tuple[TopologyRow, ...]:
    found = []
    for name, levels in Topology.objects.order_by("name").values_list("name", "levels"):
        if not isinstance(levels, list):
            faults.append(Fault(RowKind.TOPOLOGY, name, f"topologies[{name}].levels", "is no list"))
            levels = []
        found.append(TopologyRow(name, tuple(levels)))
    return tuple(found)


def read_now_s() -> float:
    """Return the database's clock in seconds since the epoch."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
        (now_s,) = cursor.fetchone()
    return float(now_s)


def read_reservations(now_s: float, nodes: Collection[NodeId]) -> tuple[ReservationRow, ...]:
    """Return current and future reservations of ``nodes``."""
    rows = (
        Reservation.objects.annotate(
            from_s=EpochSeconds("period__startswith"), to_s=EpochSeconds("period__endswith")
        )
        .filter(cancelled_at__isnull=True, to_s__gt=now_s)
        .annotate(
            node_ids=ArrayAgg("reservation_nodes__node__public_id", distinct=True),
            project_ids=ArrayAgg(
                "projects__public_id", distinct=True, filter=Q(projects__isnull=False), default=[]
            ),
        )
        .order_by("id")
        .values_list("public_id", "name", "from_s", "to_s", "node_ids", "project_ids")
    )
    found = []
    for id_, name, from_s, to_s, node_ids, project_ids in rows:
        if inside := tuple(NodeId(node) for node in node_ids if node in nodes):
            projects = tuple(map(ProjectId, project_ids))
            found.append(ReservationRow(id_, name, inside, projects, from_s, to_s))
    return tuple(found)


def read_projects() -> tuple[ProjectRow, ...]:
    rows = Project.objects.order_by("id").values_list(
        "public_id", "name", "parent__public_id", EpochSeconds("created_at")
    )
    return tuple(
        ProjectRow(ProjectId(id_), name, ProjectId(parent) if parent else None, created_s)
        for id_, name, parent, created_s in rows
    )


def read_quotas(now_s: float) -> tuple[QuotaRow, ...]:
    """Return the quotas as they are in force at ``now_s``, with temporary additions."""
    at = dt.datetime.fromtimestamp(now_s, dt.UTC)
    rows = with_effective_quota(Quota.objects.order_by("id"), at).values_list(
        "project__public_id",
        "pool__public_id",
        "effective_guaranteed_milli",
        "effective_limit_milli",
        "weight",
        "priority",
        "user_limit_milli",
    )
    return tuple(
        QuotaRow(
            ProjectId(project), PoolId(pool), guaranteed, limit, weight, priority, user_limit_milli=user_limit
        )
        for project, pool, guaranteed, limit, weight, priority, user_limit in rows
    )


def read_usage(now_s: float, usage_half_life_s: float) -> tuple[UsageRow, ...]:
    """Return GPU-seconds by project, pool and user, decayed with the half-life."""
    return tuple(
        UsageRow(ProjectId(row.project), PoolId(row.pool), UserId(row.user), row.gpu_seconds)
        for row in decayed_usage(now_s, usage_half_life_s)
    )
