"""Isolate the invalid rows of a snapshot, so that everything else can be decided, and describe their faults."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from portal.domain.jobs.reasons import VerdictCode
from portal.domain.stored_texts import stored_text
from scheduler.core.model.plan import Verdict
from scheduler.core.model.project_tree import OWN_LEAF_SUFFIX
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    GpuUuid,
    JobId,
    NodeId,
    NodeRow,
    PoolId,
    ProjectId,
    QuotaRow,
    RunningRow,
    Snapshot,
)
from scheduler.core.model.validation import (
    Fault,
    RowKind,
    SnapshotError,
    check_task,
    find_faults,
    usage_row_id,
)

Names = Mapping[tuple[str, str], str]
"""The name of each row of a snapshot, by kind and id."""


def names_of(snapshot: Snapshot) -> Names:
    groups: tuple[tuple[str, str, Iterable[Any]], ...] = (
        ("pool", "id", snapshot.pools),
        ("node", "id", snapshot.nodes),
        ("project", "id", snapshot.projects),
        ("reservation", "id", snapshot.reservations),
        ("job", "job", snapshot.running),
        ("job", "job", snapshot.pending),
    )
    return {(kind, getattr(row, key)): row.name for kind, key, rows in groups for row in rows}


def message_for_admins(fault: Fault, names: Names) -> str:
    """Return a message that names the row and its invalid value."""
    if fault.kind is RowKind.ENVIRONMENT:
        return stored_text(f"The environment {fault.message}.")
    return stored_text(f"{_named(fault, names)} has an invalid value: {_what(fault)}.")


def message_for_job(fault: Fault, names: Names) -> str:
    """Return why a job that was left out because of ``fault`` is pending, and who can correct it."""
    if fault.kind in (RowKind.RUNNING, RowKind.PENDING):
        return stored_text(
            f"The stored data of this job is invalid: {_what(fault)}. An administrator can correct it, or you can "
            "cancel the job and submit it again."
        )
    later = stored_text("This job waits until an administrator corrects it.")
    return f"{message_for_admins(fault, names)} {later}"


def _name(fault: Fault, names: Names) -> str:
    match fault.kind:
        case RowKind.QUOTA | RowKind.USAGE:
            project, pool, *_ = fault.row.split(",")
            return f"{names.get(('project', project), project)} in {names.get(('pool', pool), pool)}"
        case RowKind.RUNNING | RowKind.PENDING:
            return names.get(("job", fault.row)) or fault.row
    return names.get((fault.kind.value, fault.row)) or fault.row


_NAMED = {
    RowKind.POOL: stored_text("The pool {name}"),
    RowKind.NODE: stored_text("The node {name}"),
    RowKind.TOPOLOGY: stored_text("The topology {name}"),
    RowKind.PROJECT: stored_text("The project {name}"),
    RowKind.QUOTA: stored_text("The quota of {name}"),
    RowKind.USAGE: stored_text("The recorded use of {name}"),
    RowKind.RESERVATION: stored_text("The reservation {name}"),
    RowKind.RUNNING: stored_text("The job {name} ({row})"),
    RowKind.PENDING: stored_text("The job {name} ({row})"),
}


def _named(fault: Fault, names: Names) -> str:
    return _NAMED[fault.kind].format(name=_name(fault, names), row=fault.row)


def _what(fault: Fault) -> str:
    where = fault.field.rpartition("].")[2] if "]." in fault.field else ""
    return f"{where} {fault.message}".strip().rstrip(".")


MAX_PASSES = 8
"""Isolating a row can invalidate rows that refer to it; more than four passes have not been seen."""


@dataclass(frozen=True)
class IsolationResult:
    """A valid snapshot, the faults that were found, and a verdict for each job left out."""

    snapshot: Snapshot
    faults: tuple[Fault, ...]
    verdicts: tuple[Verdict, ...]


def isolate_faults(snapshot: Snapshot, known: Iterable[Fault] = ()) -> IsolationResult:
    """Return ``snapshot`` without its faults; ``known`` are faults that its reader found.

    Capacity is never invented: a node with a fault, or with a running job that has one, accepts no jobs, and
    its allocations stay counted. A project or quota with a fault blocks its pending jobs and those of its
    descendants. Raise ``SnapshotError`` if faults are left after ``MAX_PASSES``.
    """
    work = _Isolation(snapshot)
    found: dict[tuple[RowKind, str], Fault] = {}
    new = [*known, *find_faults(snapshot)]
    for _ in range(MAX_PASSES):
        for fault in new:
            found.setdefault((fault.kind, fault.row), fault)
        work.apply(new)
        new = find_faults(work.snapshot)
        if not new:
            return IsolationResult(work.snapshot, tuple(found.values()), work.verdicts(snapshot))
    raise SnapshotError(new[0].field, new[0].message)


@dataclass
class _Isolation:
    snapshot: Snapshot
    closed_nodes: set[NodeId] = field(default_factory=set)
    closed_pools: dict[PoolId, Fault] = field(default_factory=dict)
    blocked: dict[tuple[ProjectId, PoolId | None], Fault] = field(default_factory=dict)
    """Subtrees whose pending jobs do not start, in one pool or (None) in all."""
    topologies: dict[str, Fault] = field(default_factory=dict)
    jobs: dict[str, Fault] = field(default_factory=dict)
    left_out: dict[JobId, Fault] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._parents = {row.id: row.parent for row in self.snapshot.projects}

    def apply(self, faults: Sequence[Fault]) -> None:
        """Remove the rows with these faults, or make them harmless."""
        by_kind: dict[RowKind, dict[str, Fault]] = {}
        for fault in faults:
            by_kind.setdefault(fault.kind, {})[fault.row] = fault
        steps: dict[RowKind, Callable[[dict[str, Fault]], None]] = {
            RowKind.POOL: self._pools,
            RowKind.NODE: self._nodes,
            RowKind.TOPOLOGY: self._topologies,
            RowKind.PROJECT: self._projects,
            RowKind.QUOTA: self._quotas,
            RowKind.USAGE: self._usage,
            RowKind.ENVIRONMENT: self._environments,
            RowKind.RESERVATION: self._reservations,
            RowKind.RUNNING: self._running,
            RowKind.PENDING: self._pending,
        }
        for kind, wrong in by_kind.items():
            steps[kind](wrong)
        self._close_nodes()
        self._leave_out()

    def verdicts(self, before: Snapshot) -> tuple[Verdict, ...]:
        """Return a verdict for each pending job of ``before`` that was left out."""
        names = names_of(before)
        waiting = {row.job for row in before.pending if not row.ranks}
        return tuple(
            Verdict(
                job,
                VerdictCode.INVALID_DATA,
                message_for_job(fault, names),
                {"kind": fault.kind.value, "row": fault.row, "field": fault.field},
            )
            for job, fault in sorted(self.left_out.items())
            if job in waiting
        )

    def _change(self, **rows: Any) -> None:
        self.snapshot = replace(self.snapshot, **rows)

    # -- faults by kind of row ---------------------------------------------------------------------

    def _pools(self, wrong: Mapping[str, Fault]) -> None:
        self.closed_pools |= {PoolId(pool): fault for pool, fault in wrong.items()}
        pools = [
            replace(row, placement=None, settings=()) if row.id in wrong else row
            for row in self.snapshot.pools
        ]
        self._change(pools=_first_of(pools, lambda row: row.id))
        self.closed_nodes.update(node.id for node in self.snapshot.nodes if node.pool in wrong)

    def _nodes(self, wrong: Mapping[str, Fault]) -> None:
        self.closed_nodes.update(map(NodeId, wrong))
        known = {pool.id for pool in self.snapshot.pools}
        nodes = [node for node in self.snapshot.nodes if node.id not in wrong or node.pool in known]
        self._change(nodes=_first_of(nodes, lambda node: node.id))
        uuids = Counter(gpu.uuid for node in self.snapshot.nodes for gpu in node.gpus)
        twice = {uuid for uuid, count in uuids.items() if count > 1}
        if twice:
            self._change(
                nodes=tuple(
                    replace(node, gpus=tuple(gpu for gpu in node.gpus if gpu.uuid not in twice))
                    if node.id in wrong
                    else node
                    for node in self.snapshot.nodes
                )
            )

    def _topologies(self, wrong: dict[str, Fault]) -> None:
        self.topologies |= wrong
        self._change(topologies=tuple(row for row in self.snapshot.topologies if row.name not in wrong))

    def _projects(self, wrong: Mapping[str, Fault]) -> None:
        self.blocked |= {(ProjectId(project), None): fault for project, fault in wrong.items()}
        gone = {project for project in wrong if OWN_LEAF_SUFFIX in project}
        known = {row.id for row in self.snapshot.projects} - gone
        projects = [
            replace(row, parent=None, created_s=0.0)
            if row.id in wrong or (row.parent is not None and row.parent not in known)
            else row
            for row in self.snapshot.projects
            if row.id not in gone
        ]
        self._change(projects=_first_of(projects, lambda row: row.id))

    def _quotas(self, wrong: Mapping[str, Fault]) -> None:
        known = {row.id for row in self.snapshot.projects}, {row.id for row in self.snapshot.pools}
        kept = []
        for row in self.snapshot.quotas:
            if (name := f"{row.project},{row.pool}") in wrong:
                self.blocked[row.project, row.pool] = wrong[name]
                if row.project not in known[0] or row.pool not in known[1]:
                    continue
                row = self._neutralized(row)
            kept.append(row)
        self._change(quotas=_first_of(kept, lambda row: f"{row.project},{row.pool}"))

    def _neutralized(self, quota: QuotaRow) -> QuotaRow:
        """Return a quota that guarantees what its project holds, so that nothing of it is reclaimed."""
        held = sum(
            gpu.milli
            for row in self.snapshot.running
            if row.pool == quota.pool and quota.project in self._ancestors(row.project)
            for task in row.tasks
            for gpu in task.gpus
        )
        return QuotaRow(quota.project, quota.pool, held, None)

    def _usage(self, wrong: Mapping[str, Fault]) -> None:
        self._change(usage=tuple(row for row in self.snapshot.usage if usage_row_id(row) not in wrong))

    def _environments(self, wrong: Mapping[str, Fault]) -> None:
        self.jobs |= {job: fault for fault in wrong.values() for job in fault.jobs}

    def _reservations(self, wrong: Mapping[str, Fault]) -> None:
        for row in self.snapshot.reservations:
            if row.id in wrong:  # its projects and times are unknown, so its nodes accept no jobs
                self.closed_nodes.update(row.nodes)
        self._change(reservations=tuple(row for row in self.snapshot.reservations if row.id not in wrong))

    def _running(self, wrong: Mapping[str, Fault]) -> None:
        projects = {row.id for row in self.snapshot.projects}
        pools = {row.id for row in self.snapshot.pools}
        stands = {gpu.uuid: node.id for node in self.snapshot.nodes for gpu in node.gpus}
        kept = []
        for row in self.snapshot.running:
            if row.job in wrong:
                self.jobs.setdefault(row.job, wrong[row.job])
                self.closed_nodes.update(task.node for task in row.tasks)
                self.closed_nodes.update(
                    stands[gpu.uuid] for task in row.tasks for gpu in task.gpus if gpu.uuid in stands
                )
                row = self._frozen(row)
                if not row.tasks or row.project not in projects or row.pool not in pools:
                    continue
            kept.append(row)
        self._change(running=_first_of(kept, lambda row: row.job))

    def _frozen(self, row: RunningRow) -> RunningRow:
        """Return the row with valid tasks only, protected from migration and eviction."""
        nodes = {node.id for node in self.snapshot.nodes}
        gpus = {gpu.uuid: (node.id, gpu) for node in self.snapshot.nodes for gpu in node.gpus}
        tasks = []
        for task in row.tasks:
            try:
                check_task("", task, nodes, gpus)
            except SnapshotError:
                continue
            tasks.append(task)
        return RunningRow(
            job=row.job,
            project=row.project,
            user=row.user,
            pool=row.pool,
            priority=row.priority,
            preemptible=False,
            started_s=self.snapshot.now_s,
            time_limit_s=None,
            tasks=tuple(tasks),
            stopping=row.stopping,
            name=row.name,
        )

    def _pending(self, wrong: Mapping[str, Fault]) -> None:
        for job, fault in wrong.items():
            self.jobs.setdefault(job, fault)

    # -- consequences ------------------------------------------------------------------------------

    def _close_nodes(self) -> None:
        """Close the nodes with a fault, and clamp what running jobs hold of a GPU to its capacity."""
        self._change(
            nodes=tuple(
                _closed(node) if node.id in self.closed_nodes else node for node in self.snapshot.nodes
            )
        )
        held: Counter[GpuUuid] = Counter()
        for row in self.snapshot.running:
            for task in row.tasks:
                held.update({gpu.uuid: gpu.milli for gpu in task.gpus})
        full = {uuid for uuid, milli in held.items() if milli > WHOLE_MILLI}
        if full:
            self._change(running=_clamp_to_capacity(self.snapshot.running, full))

    def _leave_out(self) -> None:
        """Remove the pending jobs that a fault affects."""
        kept = []
        changed = False
        for row in self.snapshot.pending:
            fault = self.jobs.get(row.job) or (
                self.topologies.get(row.topology_constraint.topology) if row.topology_constraint else None
            )
            if fault is None and (self.blocked or self.closed_pools):
                open_pools = []
                for pool in row.pools:
                    closes = self.closed_pools.get(pool) or self._blocks(row.project, pool)
                    fault = fault or closes
                    if closes is None:
                        open_pools.append(pool)
                if fault is not None and open_pools:
                    kept.append(replace(row, pools=tuple(open_pools)))
                    changed = True
                    continue
            if fault is None:
                kept.append(row)
            else:
                self.left_out.setdefault(row.job, fault)
                changed = True
        if changed:
            self._change(pending=tuple(kept))

    def _blocks(self, project: ProjectId, pool: PoolId) -> Fault | None:
        line = self._ancestors(project)
        faults = (self.blocked.get((each, None)) or self.blocked.get((each, pool)) for each in line)
        return next((fault for fault in faults if fault is not None), None)

    def _ancestors(self, project: ProjectId) -> list[ProjectId]:
        """Return a project and its ancestors as they were read; a cycle is followed once."""
        line: list[ProjectId] = []
        here: ProjectId | None = project
        while here is not None and here not in line:
            line.append(here)
            here = self._parents.get(here)
        return line


def _closed(node: NodeRow) -> NodeRow:
    """Return the node without any free capacity."""
    return replace(
        node,
        schedulable=False,
        cpu_milli=0,
        cpu_used_milli=0,
        memory_mib=0,
        memory_used_mib=0,
        labels=tuple((key, value) for key, value in node.labels if isinstance(value, str)),
        gpus=tuple(
            replace(
                gpu,
                used_milli=WHOLE_MILLI,
                exclusive=True,
                healthy=False,
                memory_mib=max(0, gpu.memory_mib) if math.isfinite(gpu.memory_mib) else 0,
                compute_capability=None,
            )
            for gpu in node.gpus
        ),
    )


def _clamp_to_capacity(running: Iterable[RunningRow], full: Collection[GpuUuid]) -> tuple[RunningRow, ...]:
    """Return the jobs without shares beyond the capacity of GPUs in ``full``; earlier jobs keep theirs."""
    left = dict.fromkeys(full, WHOLE_MILLI)
    found = []
    for row in running:
        if not any(gpu.uuid in left for task in row.tasks for gpu in task.gpus):
            found.append(row)
            continue
        tasks = []
        for task in row.tasks:
            shares = []
            for gpu in task.gpus:
                if gpu.uuid in left:
                    if gpu.milli > left[gpu.uuid]:
                        continue
                    left[gpu.uuid] -= gpu.milli
                shares.append(gpu)
            tasks.append(replace(task, gpus=tuple(shares)))
        found.append(replace(row, tasks=tuple(tasks), preemptible=False))
    return tuple(found)


def _first_of(rows: Iterable[Any], name: Callable[[Any], str]) -> tuple[Any, ...]:
    found: dict[str, Any] = {}
    for row in rows:
        found.setdefault(name(row), row)
    return tuple(found.values())
