"""Photographs the record for a decision: one consistent moment, in a fixed number of queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.db import connection, transaction

from portal.models import ClusterSettings
from scheduler.album import Built, Known
from scheduler.company import apart, guests_of, sides_of
from scheduler.core.check import Fault, RowKind
from scheduler.core.cluster import (
    GpuRow,
    JobId,
    NodeId,
    NodeRow,
    PendingRow,
    RunningRow,
    Snapshot,
)
from scheduler.core.company import Guests
from scheduler.core.plan import Verdict
from scheduler.core.policy import Policy
from scheduler.keeps import Kept
from scheduler.read_cluster import (
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
from scheduler.read_growing import Source, read_growing
from scheduler.read_rights import RightsCache, permitted, read_denied, verdict_of
from scheduler.read_running import Holding, read_holdings, read_homes, read_kept, read_running
from scheduler.read_waiting import read_waiting
from scheduler.unfit import Unfit, read_unfit

ASKED = JobId("asked")
"""The id of a job that nobody has submitted; it is shorter than a public id."""


@dataclass(frozen=True)
class Photo:
    """A snapshot, the policy that held then, and what commit compares with."""

    snapshot: Snapshot
    policy: Policy
    adopt_only: bool
    pending_rows: dict[str, int]
    """Row numbers of the jobs that wait, by job id; not of those that run and wait for more tasks."""
    unfit: Unfit
    """The nodes that cannot run an environment."""
    guests: Guests
    """Who stands on the others of those that share no node with everybody."""
    homes: dict[str, NodeId]
    """By person, the node where their home is."""
    kept: dict[str, Kept]
    """The places that are kept for waiting and leaving jobs, by job id."""
    faults: tuple[Fault, ...] = ()
    """Rows of the database that cannot be what they say; ``scheduler.isolation`` takes them out."""
    left_out: tuple[Verdict, ...] = ()
    """The verdicts of waiting jobs that are not in the snapshot."""


class Album:
    """What the next photograph of a process need not read or make again: rows that say the same."""

    def __init__(self) -> None:
        self.gpus = Known[tuple[GpuRow, ...]]()
        self.held = Known[Holding]()
        self.waiting = Known[dict[str, Any]]()
        self.machines = Known[Any]()
        self.nodes = Built[tuple[Any, tuple[GpuRow, ...], int, int], NodeRow]()
        self.running = Built[Holding, RunningRow]()
        self.pending = Built[dict[str, Any], PendingRow]()
        self.growing = Built[Source, PendingRow]()
        self.rights = RightsCache()
        self.running_apart = Built[RunningRow, RunningRow]()
        self.pending_apart = Built[PendingRow, PendingRow]()


def take_photo(settings: ClusterSettings, album: Album | None = None) -> Photo:
    """The record as it is now; with ``album`` rows that say the same are the objects of before.

    Raises PolicyError when a knob of the cluster is out of range.
    """
    policy = Policy.of(settings.policy)
    album = album or Album()
    faults: list[Fault] = []
    with _one_moment() as now_s:
        pools = read_pools(settings.policy, faults)
        held = read_holdings(album.held)
        nodes, machines = read_nodes(read_gpus(album.gpus), held.values(), album.machines, album.nodes)
        topologies = read_topologies(faults)
        reservations = read_reservations(now_s, {node.id for node in nodes})
        projects = read_projects()
        quotas = read_quotas()
        usage = read_usage(now_s, policy.half_life_s)
        lending = {pool.id for pool in pools if pool.node_network}
        strict = {pool.id for pool in pools if policy.in_pool(pool.knobs).share_needs_mps == "yes"}
        unfit = read_unfit(
            machines,
            tuple(sorted(node.id for node in nodes if node.pool not in lending)),
            [node.id for node in nodes if node.pool in strict],
            settings.policy,
        )
        homes = read_homes()
        guests = guests_of(pools, held.values())
        running = read_running(held, unfit, homes, album.running)
        pending, rows = read_waiting(pools, unfit, homes, album.waiting, album.pending)
        if guests:
            sides = sides_of({id_: attempt.row for id_, attempt in held.items()}, "job__")
            running = apart(running, sides, list(held), guests, album.running_apart)
            pending = apart(pending, sides_of(rows), list(rows), guests, album.pending_apart)
        growing = read_growing(held, unfit, album.growing)
        kept = read_kept()
        denied = read_denied(rows, [job.job for job in growing], album.rights)
    faults += _unreadable(RowKind.NODE, "nodes", album.nodes, nodes, "id")
    faults += _unreadable(RowKind.RUNNING, "running", album.running, running, "job")
    faults += _unreadable(RowKind.PENDING, "pending", album.pending, pending, "job")
    faults += _unreadable(RowKind.PENDING, "pending", album.growing, growing, "job")
    for environment, fault in unfit.invalid.items():
        jobs = [JobId(row["public_id"]) for row in rows.values() if row["environment_id"] == environment]
        faults.append(fault._replace(jobs=tuple(jobs)))
    return Photo(
        snapshot=Snapshot(
            now_s=now_s,
            pools=pools,
            nodes=nodes,
            projects=projects,
            quotas=quotas,
            usage=usage,
            running=running,
            pending=permitted(pending, growing, denied),
            topologies=topologies,
            reservations=reservations,
        ),
        policy=policy,
        adopt_only=settings.adopt_only,
        pending_rows={row["public_id"]: id_ for id_, row in rows.items()},
        unfit=unfit,
        guests=guests,
        homes=homes,
        kept=kept,
        faults=tuple(faults),
        left_out=tuple(map(verdict_of, denied.items())),
    )


def _unreadable(
    kind: RowKind, field: str, built: Built[Any, Any], rows: Sequence[Any], name: str
) -> Iterator[Fault]:
    """The faults of rows that could not be read; ``rows`` stand in the order in which they were built."""
    if built.invalid:
        for id_, row in zip(built.numbers, rows, strict=True):
            if id_ in built.invalid:
                key = getattr(row, name)
                yield Fault(kind, key, f"{field}[{key}]", built.invalid[id_])


@contextmanager
def _one_moment() -> Iterator[float]:
    """A transaction that sees one moment of the record, and writes nothing; gives the database's clock."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        yield read_now_s()
