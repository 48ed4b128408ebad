"""Reads the input of a decision: one consistent snapshot in a fixed number of queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from django.db import connection, transaction

from portal.models import ClusterSettings
from scheduler.core.model.plan import Verdict
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import (
    GpuRow,
    JobId,
    NodeId,
    NodeRow,
    PendingRow,
    RunningRow,
    Snapshot,
)
from scheduler.core.model.validation import Fault, RowKind
from scheduler.nominations import NominatedPlacement
from scheduler.snapshot.cluster import (
    read_gpus,
    read_nodes,
    read_now_s,
    read_pools,
    read_projects,
    read_quotas,
    read_reservations,
    read_topologies,
    read_usage,
)
from scheduler.snapshot.network_isolation import (
    IsolatedOccupants,
    exclude_isolated_nodes,
    read_isolated_workloads,
)
from scheduler.snapshot.node_eligibility import IneligibleNodes, read_ineligible_nodes
from scheduler.snapshot.pending import ScaleUpSource, read_pending, read_scale_ups
from scheduler.snapshot.rights import RightsCache, denial_verdict, read_denials
from scheduler.snapshot.row_cache import DerivedCache, RowCache
from scheduler.snapshot.running import (
    LiveAttempt,
    read_avoided_nodes,
    read_home_nodes,
    read_live_attempts,
    read_nominations,
    read_running,
)

PREVIEW_JOB = JobId("preview")
"""The id of a job in a preview; shorter than any public id."""


@dataclass(frozen=True)
class DecisionInput:
    """A snapshot, its policy, and what the commit compares with."""

    snapshot: Snapshot
    policy: Policy
    recovery_mode: bool
    pending_row_ids: dict[str, int]
    """Primary keys of pending jobs by job id; without running jobs that are pending for more tasks."""
    ineligible: IneligibleNodes
    isolated_workloads: IsolatedOccupants
    """Occupants of nodes that network isolation restricts."""
    home_nodes: dict[str, NodeId]
    """The node of each user's home, by user id."""
    nominations: dict[str, NominatedPlacement]
    """Nominated placements by job id, of pending and stopping jobs."""
    faults: tuple[Fault, ...] = ()
    """Invalid rows of the snapshot; ``scheduler.snapshot.invalid_rows`` removes them."""
    excluded: tuple[Verdict, ...] = ()
    """Verdicts of pending jobs that are not in the snapshot."""


class SnapshotCache:
    """Caches that let the next snapshot reuse unchanged rows."""

    def __init__(self) -> None:
        self.gpus = RowCache[tuple[GpuRow, ...]]()
        self.attempts = RowCache[LiveAttempt]()
        self.pending_columns = RowCache[dict[str, Any]]()
        self.node_columns = RowCache[Any]()
        self.nodes = DerivedCache[tuple[Any, tuple[GpuRow, ...], int, int], NodeRow]()
        self.running = DerivedCache[LiveAttempt, RunningRow]()
        self.pending = DerivedCache[dict[str, Any], PendingRow]()
        self.scale_ups = DerivedCache[ScaleUpSource, PendingRow]()
        self.rights = RightsCache()
        self.running_isolated = DerivedCache[RunningRow, RunningRow]()
        self.pending_isolated = DerivedCache[PendingRow, PendingRow]()
        self.scale_ups_isolated = DerivedCache[PendingRow, PendingRow]()


def take_snapshot(settings: ClusterSettings, cache: SnapshotCache | None = None) -> DecisionInput:
    """Return the current snapshot and policy; with ``cache``, unchanged rows are the earlier objects.

    Raise PolicyError when a policy setting of the cluster is out of range.
    """
    policy = Policy.from_settings(settings.policy)
    cache = cache or SnapshotCache()
    faults: list[Fault] = []
    with _consistent_read() as now_s:
        pools = read_pools(settings.policy, faults)
        attempts = read_live_attempts(cache.attempts)
        nodes, capabilities = read_nodes(
            read_gpus(cache.gpus), attempts.values(), cache.node_columns, cache.nodes
        )
        topologies = read_topologies(faults)
        reservations = read_reservations(now_s, {node.id for node in nodes})
        projects = read_projects()
        quotas = read_quotas(now_s)
        usage = read_usage(now_s, policy.usage_half_life_s)
        host_network_pools = {pool.id for pool in pools if pool.allow_host_network}
        mps_required_pools = {
            pool.id for pool in pools if policy.for_pool(pool.settings).gpu_sharing_requires_mps == "yes"
        }
        ineligible = read_ineligible_nodes(
            capabilities,
            tuple(sorted(node.id for node in nodes if node.pool not in host_network_pools)),
            [node.id for node in nodes if node.pool in mps_required_pools],
            settings.policy,
        )
        home_nodes = read_home_nodes()
        isolated_workloads = read_isolated_workloads(pools, attempts.values())
        avoided = read_avoided_nodes()
        running = read_running(attempts, ineligible, avoided, home_nodes, cache.running)
        pending, rows = read_pending(
            pools, ineligible, avoided, home_nodes, cache.pending_columns, cache.pending
        )
        scale_ups, growing = read_scale_ups(attempts, ineligible, avoided, cache.scale_ups)
        if isolated_workloads:
            columns = {id_: attempt.row for id_, attempt in attempts.items()}
            running = exclude_isolated_nodes(
                running, columns, "job__", isolated_workloads, cache.running_isolated
            )
            pending = exclude_isolated_nodes(pending, rows, "", isolated_workloads, cache.pending_isolated)
            scale_ups = exclude_isolated_nodes(
                scale_ups, growing, "", isolated_workloads, cache.scale_ups_isolated
            )
        nominations = read_nominations()
        denials = read_denials(rows, [job.job for job in scale_ups], cache.rights)
    waiting = (*pending, *scale_ups)
    if denials:
        waiting = tuple(row for row in waiting if row.job not in denials)
    faults += _invalid_row_faults(RowKind.NODE, "nodes", cache.nodes, nodes, "id")
    faults += _invalid_row_faults(RowKind.RUNNING, "running", cache.running, running, "job")
    faults += _invalid_row_faults(RowKind.PENDING, "pending", cache.pending, pending, "job")
    faults += _invalid_row_faults(RowKind.PENDING, "pending", cache.scale_ups, scale_ups, "job")
    for environment, fault in ineligible.invalid.items():
        jobs = [JobId(row["public_id"]) for row in rows.values() if row["environment_id"] == environment]
        faults.append(fault._replace(jobs=tuple(jobs)))
    return DecisionInput(
        snapshot=Snapshot(
            now_s=now_s,
            pools=pools,
            nodes=nodes,
            projects=projects,
            quotas=quotas,
            usage=usage,
            running=running,
            pending=waiting,
            topologies=topologies,
            reservations=reservations,
        ),
        policy=policy,
        recovery_mode=settings.recovery_mode,
        pending_row_ids={row["public_id"]: id_ for id_, row in rows.items()},
        ineligible=ineligible,
        isolated_workloads=isolated_workloads,
        home_nodes=home_nodes,
        nominations=nominations,
        faults=tuple(faults),
        excluded=tuple(starmap(denial_verdict, denials.items())),
    )


def _invalid_row_faults(
    kind: RowKind, field: str, built: DerivedCache[Any, Any], rows: Sequence[Any], name: str
) -> Iterator[Fault]:
    """Yield the faults of rows that could not be built; ``rows`` are in build order."""
    if built.invalid:
        for id_, row in zip(built.row_ids, rows, strict=True):
            if id_ in built.invalid:
                key = getattr(row, name)
                yield Fault(kind, key, f"{field}[{key}]", built.invalid[id_])


@contextmanager
def _consistent_read() -> Iterator[float]:
    """Open a read-only transaction on one consistent snapshot and yield the database's clock."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        yield read_now_s()
