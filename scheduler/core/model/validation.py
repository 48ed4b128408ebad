"""Validation of snapshots before a decision."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from portal.domain.jobs.job_spec import job_fields
from portal.domain.scheduling.policy_settings import CHOICE_SETTINGS
from scheduler.core.model.project_tree import OWN_LEAF_SUFFIX
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    GpuConstraints,
    GpuRow,
    GpuUuid,
    JobId,
    NodeId,
    NodeRow,
    PendingRow,
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
)

Row = TypeVar("Row")


NULLABLE_AMOUNTS = tuple(
    name
    for name, rule in job_fields().items()
    if rule.affects_placement and rule.nullable and rule.is_number and name != "min_tasks"
)
"""Fields of a request that are None for no bound."""
MAX_TASKS = 10_000
MAX_GPUS_PER_TASK = 1_000
"""A decision creates an object per task, so these bound its time and memory."""


class SnapshotError(ValueError):
    """An invalid snapshot; ``field`` is the path of the value, such as ``nodes[n1].cpu_milli``."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class RowKind(StrEnum):
    POOL = "pool"
    NODE = "node"
    TOPOLOGY = "topology"
    PROJECT = "project"
    QUOTA = "quota"
    USAGE = "usage"
    RESERVATION = "reservation"
    ENVIRONMENT = "environment"
    RUNNING = "running"
    PENDING = "pending"


class Fault(NamedTuple):
    """A fault of one row. ``row`` is its id; of a quota ``project,pool``, of usage ``usage_row_id``."""

    kind: RowKind
    row: str
    field: str
    message: str
    jobs: tuple[JobId, ...] = ()
    """Pending jobs that depend on the row, where the snapshot does not contain this dependency."""


def check_snapshot(snapshot: Snapshot, checked: Mapping[int, object] | None = None) -> None:
    """Raise ``SnapshotError`` with the first invalid field.

    ``checked`` holds, by ``id()``, rows that were valid in an earlier snapshot of the same projects, pools
    and hardware.
    """
    _check_finite("now_s", snapshot.now_s)
    for fault in _faults(snapshot, checked or {}):
        raise SnapshotError(fault.field, fault.message)


def find_faults(snapshot: Snapshot) -> list[Fault]:
    """Return the first fault of every invalid row. Raise ``SnapshotError`` for the clock."""
    _check_finite("now_s", snapshot.now_s)
    found: dict[tuple[RowKind, str], Fault] = {}
    for fault in _faults(snapshot, {}):
        found.setdefault((fault.kind, fault.row), fault)
    return list(found.values())


def _faults(snapshot: Snapshot, before: Mapping[int, object]) -> Iterator[Fault]:
    pools = frozenset(pool.id for pool in snapshot.pools)
    nodes = frozenset(node.id for node in snapshot.nodes)
    projects = frozenset(project.id for project in snapshot.projects)
    yield from _repeated(RowKind.POOL, "pools", [pool.id for pool in snapshot.pools])
    yield from _each(RowKind.POOL, snapshot.pools, lambda pool: pool.id, _check_pool)
    yield from _repeated(RowKind.NODE, "nodes", [node.id for node in snapshot.nodes])
    if not before:
        yield from _repeated_gpus(snapshot)
    came = [node for node in snapshot.nodes if before.get(id(node)) is not node]
    yield from _each(RowKind.NODE, came, lambda node: node.id, lambda node: _check_node(node, pools))
    yield from _each(RowKind.TOPOLOGY, snapshot.topologies, lambda row: row.name, _check_topology)
    yield from _repeated(RowKind.TOPOLOGY, "topologies", [row.name for row in snapshot.topologies])
    yield from _repeated(RowKind.PROJECT, "projects", [project.id for project in snapshot.projects])
    yield from _tree_faults(snapshot, projects)
    yield from _repeated(RowKind.QUOTA, "quotas", [f"{row.project},{row.pool}" for row in snapshot.quotas])
    yield from _each(
        RowKind.QUOTA,
        snapshot.quotas,
        lambda row: f"{row.project},{row.pool}",
        lambda row: _check_quota(row, projects, pools),
    )
    for i, usage in enumerate(snapshot.usage):
        if usage.project in projects and usage.pool in pools and 0 <= usage.gpu_seconds < math.inf:
            continue  # fast path: build the names of fields only for invalid rows
        try:
            _check_usage(f"usage[{i}]", usage, projects, pools)
        except SnapshotError as error:
            yield Fault(RowKind.USAGE, usage_row_id(usage), error.field, error.message)
    yield from _repeated(RowKind.RESERVATION, "reservations", [row.id for row in snapshot.reservations])
    yield from _each(
        RowKind.RESERVATION,
        snapshot.reservations,
        lambda row: row.id,
        lambda row: _check_reservation(row, projects, nodes),
    )
    waiting = [row.job for row in snapshot.pending]
    grows = {row.job for row in snapshot.pending if row.ranks}
    runs = [row.job for row in snapshot.running if row.job not in grows]
    yield from _repeated(RowKind.RUNNING, "jobs", runs)
    yield from _repeated(RowKind.PENDING, "jobs", [*dict.fromkeys(runs), *waiting])
    yield from _running_faults(snapshot, projects, pools, nodes, before)
    yield from _each(
        RowKind.PENDING,
        [row for row in snapshot.pending if before.get(id(row)) is not row],
        lambda row: row.job,
        lambda row: _check_pending(row, projects, pools),
    )


def usage_row_id(row: UsageRow) -> str:
    return f"{row.project},{row.pool},{row.user or ''}"


def _each(
    kind: RowKind, rows: Iterable[Row], name: Callable[[Row], str], check: Callable[[Row], None]
) -> Iterator[Fault]:
    for row in rows:
        try:
            check(row)
        except SnapshotError as error:
            yield Fault(kind, name(row), error.field, error.message)


def _repeated(kind: RowKind, field: str, keys: Sequence[str]) -> Iterator[Fault]:
    if len(set(keys)) < len(keys):
        for key, count in Counter(keys).items():
            if count > 1:
                yield Fault(kind, key, f"{field}[{key}]", f"is listed {count} times")


def _repeated_gpus(snapshot: Snapshot) -> Iterator[Fault]:
    """Yield a fault for each node with a GPU that appears more than once."""
    uuids = [gpu.uuid for node in snapshot.nodes for gpu in node.gpus]
    if len(set(uuids)) == len(uuids):
        return
    count = Counter(uuids)
    for node in snapshot.nodes:
        for gpu in node.gpus:
            if count[gpu.uuid] > 1:
                yield Fault(RowKind.NODE, node.id, f"gpus[{gpu.uuid}]", f"is listed {count[gpu.uuid]} times")


def _check_pool(pool: PoolRow) -> None:
    if pool.placement is not None and pool.placement not in CHOICE_SETTINGS["placement"].options:
        raise SnapshotError(f"pools[{pool.id}].placement", f"{pool.placement!r} is not a placement strategy")


def _check_node(node: NodeRow, pools: frozenset[str]) -> None:
    at = f"nodes[{node.id}]"
    _check_known(f"{at}.pool", node.pool, pools)
    for name in ("cpu_milli", "cpu_used_milli", "memory_mib", "memory_used_mib"):
        _check_at_least(f"{at}.{name}", getattr(node, name), 0)
    for key, value in node.labels:
        _check_string(f"{at}.labels[{key}]", value)
    for gpu in node.gpus:
        if not 0 <= gpu.used_milli <= WHOLE_MILLI:
            raise SnapshotError(f"{at}.gpus[{gpu.uuid}].used_milli", f"{gpu.used_milli} is outside 0 to 1000")
        if gpu.exclusive and gpu.used_milli != WHOLE_MILLI:
            raise SnapshotError(
                f"{at}.gpus[{gpu.uuid}].exclusive", f"is set, but only {gpu.used_milli} milli are used"
            )
        _check_at_least(f"{at}.gpus[{gpu.uuid}].memory_mib", gpu.memory_mib, 0)
        if gpu.compute_capability is not None:
            _check_at_least(f"{at}.gpus[{gpu.uuid}].compute_capability", gpu.compute_capability, 0)


def _check_topology(row: TopologyRow) -> None:
    for level in row.levels:
        _check_string(f"topologies[{row.name}].levels", level)
    _check_unique(f"topologies[{row.name}].levels", row.levels)


def _tree_faults(snapshot: Snapshot, projects: frozenset[str]) -> Iterator[Fault]:
    wrong = list(
        _each(
            RowKind.PROJECT,
            snapshot.projects,
            lambda project: project.id,
            lambda project: _check_project(project, projects),
        )
    )
    yield from wrong
    parents = {project.id: project.parent for project in snapshot.projects}
    sound: set[ProjectId] = set()
    for project in snapshot.projects:
        walk: list[ProjectId] = []
        here: ProjectId | None = project.id
        while here is not None and here not in sound and here in parents:
            if here in walk:
                for each in walk[walk.index(here) :]:
                    yield Fault(RowKind.PROJECT, each, f"projects[{each}].parent", "is part of a cycle")
                break
            walk.append(here)
            here = parents[here]
        sound.update(walk)


def _check_project(project: ProjectRow, projects: frozenset[str]) -> None:
    at = f"projects[{project.id}]"
    _check_finite(f"{at}.created_s", project.created_s)
    if OWN_LEAF_SUFFIX in project.id:
        raise SnapshotError(f"{at}.id", "contains a slash, which is reserved")
    if project.parent is not None:
        _check_known(f"{at}.parent", project.parent, projects)


def _check_quota(quota: QuotaRow, projects: frozenset[str], pools: frozenset[str]) -> None:
    at = f"quotas[{quota.project},{quota.pool}]"
    _check_known(f"{at}.project", quota.project, projects)
    _check_known(f"{at}.pool", quota.pool, pools)
    _check_at_least(f"{at}.guaranteed_milli", quota.guaranteed_milli, 0)
    _check_at_least(f"{at}.weight", quota.weight, 0)
    for name in ("limit_milli", "user_limit_milli"):
        if (value := getattr(quota, name)) is not None:
            _check_at_least(f"{at}.{name}", value, 0)


def _check_usage(at: str, usage: UsageRow, projects: frozenset[str], pools: frozenset[str]) -> None:
    _check_known(f"{at}.project", usage.project, projects)
    _check_known(f"{at}.pool", usage.pool, pools)
    _check_at_least(f"{at}.gpu_seconds", usage.gpu_seconds, 0)


def _check_reservation(row: ReservationRow, projects: frozenset[str], nodes: frozenset[str]) -> None:
    at = f"reservations[{row.id}]"
    for node in _check_unique(f"{at}.nodes", row.nodes):
        _check_known(f"{at}.nodes", node, nodes)
    for project in _check_unique(f"{at}.projects", row.projects):
        _check_known(f"{at}.projects", project, projects)
    _check_finite(f"{at}.start_s", row.start_s)
    _check_finite(f"{at}.end_s", row.end_s)
    if row.start_s >= row.end_s:
        raise SnapshotError(f"{at}.end_s", "is not after start_s")


def _running_faults(
    snapshot: Snapshot,
    projects: frozenset[str],
    pools: frozenset[str],
    nodes: frozenset[str],
    before: Mapping[int, object],
) -> Iterator[Fault]:
    came = [row for row in snapshot.running if before.get(id(row)) is not row]
    touched = {node.id for node in snapshot.nodes if before.get(id(node)) is not node}
    touched.update(task.node for row in came for task in row.tasks)
    gpus = {gpu.uuid: (node.id, gpu) for node in snapshot.nodes if node.id in touched for gpu in node.gpus}
    for row in came:
        at = f"running[{row.job}]"
        try:
            _check_known(f"{at}.project", row.project, projects)
            _check_known(f"{at}.pool", row.pool, pools)
            _check_finite(f"{at}.started_s", row.started_s)
            for name in ("submitted_s", "checkpoint_s", *NULLABLE_AMOUNTS):
                if (value := _value(row, row.constraints, name)) is not None:
                    _check_finite(f"{at}.{name}", value)
            for rank, task in enumerate(row.tasks):
                check_task(f"{at}.tasks[{rank}]", task, nodes, gpus)
        except SnapshotError as error:
            yield Fault(RowKind.RUNNING, row.job, error.field, error.message)
    held: Counter[GpuUuid] = Counter()
    for row in snapshot.running:
        for task in row.tasks:
            if task.node in touched:
                for gpu in task.gpus:
                    held[gpu.uuid] += gpu.milli
    for uuid, milli in held.items():
        if uuid not in gpus:
            continue  # found above
        node, used = gpus[uuid][0], gpus[uuid][1].used_milli
        if milli > used:
            yield Fault(
                RowKind.NODE,
                node,
                f"nodes[{node}].gpus[{uuid}].used_milli",
                f"is {used}, but running jobs hold {milli}",
            )


def check_task(
    at: str,
    task: RunningTask,
    nodes: Collection[str],
    gpus: Mapping[GpuUuid, tuple[NodeId, GpuRow]],
) -> None:
    """Raise ``SnapshotError`` unless everything that a running task holds is on its node."""
    _check_known(f"{at}.node", task.node, nodes)
    _check_at_least(f"{at}.cpu_milli", task.cpu_milli, 0)
    _check_at_least(f"{at}.memory_mib", task.memory_mib, 0)
    for gpu in task.gpus:
        if gpu.uuid not in gpus or gpus[gpu.uuid][0] != task.node:
            raise SnapshotError(f"{at}.gpus", f"{gpu.uuid} is not on {task.node}")
        if not 1 <= gpu.milli <= WHOLE_MILLI:
            raise SnapshotError(f"{at}.gpus", f"{gpu.milli} is outside 1 to 1000")


def _check_pending(row: PendingRow, projects: frozenset[str], pools: frozenset[str]) -> None:
    at = f"pending[{row.job}]"
    _check_known(f"{at}.project", row.project, projects)
    _check_finite(f"{at}.submitted_s", row.submitted_s)
    for pool in _check_unique(f"{at}.pools", row.pools):
        _check_known(f"{at}.pools", pool, pools)
    _check_at_least(f"{at}.tasks", row.tasks, 1)
    if row.tasks > MAX_TASKS:
        raise SnapshotError(f"{at}.tasks", f"{row.tasks} is above {MAX_TASKS}")
    if row.min_tasks is not None and not row.ranks and not 1 <= row.min_tasks <= row.tasks:
        raise SnapshotError(f"{at}.min_tasks", f"{row.min_tasks} is outside 1 to {row.tasks}")
    request = row.request
    _check_at_least(f"{at}.gpus_per_task", request.gpus, 0)
    if request.gpus > MAX_GPUS_PER_TASK:
        raise SnapshotError(f"{at}.gpus_per_task", f"{request.gpus} is above {MAX_GPUS_PER_TASK}")
    _check_at_least(f"{at}.cpu_milli", request.cpu_milli, 0)
    _check_at_least(f"{at}.memory_mib", request.memory_mib, 0)
    if not 1 <= request.milli <= WHOLE_MILLI:
        raise SnapshotError(f"{at}.milli_per_gpu", f"{request.milli} is outside 1 to 1000")
    for name in NULLABLE_AMOUNTS:
        if (value := _value(row, request.constraints, name)) is not None:
            _check_at_least(f"{at}.{name}", value, 0)
    if row.task_requests and len(row.task_requests) != row.tasks:
        raise SnapshotError(f"{at}.task_requests", f"are {len(row.task_requests)} for {row.tasks} tasks")
    for node in row.preferred_nodes:
        _check_string(f"{at}.preferred_nodes", node)
    if row.not_before_s is not None:
        _check_finite(f"{at}.not_before_s", row.not_before_s)
    for speed in row.layout_speeds:
        if not 1 <= speed.percent <= 100:
            raise SnapshotError(f"{at}.layout_speeds", f"{speed.percent} % is outside 1 to 100")
    if row.job in _check_unique(f"{at}.dependencies", (each.job for each in row.dependencies)):
        raise SnapshotError(f"{at}.dependencies", "contain the job itself")


def _value(row: PendingRow | RunningRow, constraints: GpuConstraints, name: str) -> Any:
    """Return the value of a field of a job; None if a row has no such field."""
    return getattr(constraints if name in GpuConstraints._fields else row, name, None)


def _check_string(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise SnapshotError(field, f"{value!r} is not a string")


def _check_unique(field: str, keys: Iterable[str]) -> frozenset[str]:
    all_keys = tuple(keys)
    different = frozenset(all_keys)
    if len(different) < len(all_keys):
        key, count = next(each for each in Counter(all_keys).items() if each[1] > 1)
        raise SnapshotError(f"{field}[{key}]", f"is listed {count} times")
    return different


def _check_known(field: str, key: str, keys: Collection[str]) -> None:
    if key not in keys:
        raise SnapshotError(field, f"{key!r} is not in the snapshot")


def _check_finite(field: str, value: float) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise SnapshotError(field, f"{value!r} is not a finite number")


def _check_at_least(field: str, value: Any, low: int) -> None:
    _check_finite(field, value)
    if value < low:
        raise SnapshotError(field, f"{value} is below {low}")
