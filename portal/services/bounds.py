"""Plain bounds: what this cluster could never run, and the nearest request that it could.

They need no engine: the largest node by pool and model, and the limits of every ancestor. The scheduler's own
answer (``portal.ask``) goes further; these hold when it does not answer within its second.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from portal.models import Gpu, Node, NodePool, Project, Quota
from portal.words.amounts import memories
from portal.words.states import NodeState, RuntimeKind


@dataclass(frozen=True)
class Ask:
    """The part of a request that decides whether it can ever fit."""

    project: Project
    pool: NodePool | None
    runtime: str
    tasks: int
    gpus_per_task: int
    milli_per_gpu: int
    gpu_model: str
    min_gpu_memory_mib: int | None
    cpu_milli: int
    memory_mib: int
    preemptible: bool = True

    @property
    def total_milli(self) -> int:
        """GPU milli of the whole gang."""
        return self.tasks * self.gpus_per_task * self.milli_per_gpu


@dataclass
class Room:
    """What one node could hold if it were empty."""

    node: Node
    gpus: list[Gpu] = field(default_factory=list)


def never(ask: Ask) -> tuple[str, dict[str, object]] | None:
    """Why the cluster could never run this, as a sentence with facts and ``nearest``; None when it could.

    Nodes that are cordoned or unreachable count: they come back. Retired nodes do not.
    """
    rooms = _rooms(ask)
    if not rooms:
        return _nothing_there(ask)
    fits = sum(_tasks_in(room, ask) for room in rooms)
    if fits < ask.tasks:
        return _too_large(ask, rooms, fits)
    return _over_limit(ask)


def _rooms(ask: Ask) -> list[Room]:
    nodes = Node.objects.exclude(state__in=[NodeState.RETIRED.value, NodeState.ENROLLING.value])
    nodes = nodes.filter(runtime__in=_runtimes(ask.runtime))
    if ask.pool is not None:
        nodes = nodes.filter(pool=ask.pool)
    rooms = {node.pk: Room(node) for node in nodes.order_by("name")}
    for gpu in Gpu.objects.filter(node_id__in=rooms, present=True).order_by("index"):
        if ask.gpu_model and gpu.model != ask.gpu_model:
            continue
        if ask.min_gpu_memory_mib and gpu.memory_mib < ask.min_gpu_memory_mib:
            continue
        rooms[gpu.node_id].gpus.append(gpu)
    return list(rooms.values())


def _runtimes(runtime: str) -> list[str]:
    containers = [RuntimeKind.PODMAN.value, RuntimeKind.DOCKER.value]
    return containers if runtime in containers else [runtime]


def _tasks_in(room: Room, ask: Ask) -> int:
    by_gpu = 10**6
    if ask.gpus_per_task:
        if ask.milli_per_gpu == 1000:
            by_gpu = len(room.gpus) // ask.gpus_per_task
        else:
            by_gpu = len(room.gpus) * (1000 // ask.milli_per_gpu) // ask.gpus_per_task
            by_gpu = by_gpu if len(room.gpus) >= ask.gpus_per_task else 0
    by_cpu = room.node.cpu_milli // ask.cpu_milli if ask.cpu_milli else 10**6
    by_memory = room.node.memory_mib // ask.memory_mib if ask.memory_mib else 10**6
    return min(by_gpu, by_cpu, by_memory)


def _nothing_there(ask: Ask) -> tuple[str, dict[str, object]]:
    where = f" in the pool {ask.pool.name}" if ask.pool else ""
    return f"There is no node{where} that runs {ask.runtime} environments.", {"nearest": None}


def _too_large(ask: Ask, rooms: list[Room], fits: int) -> tuple[str, dict[str, object]]:
    total = sum(len(room.gpus) for room in rooms)
    largest = max(len(room.gpus) for room in rooms)
    model = f" {ask.gpu_model}" if ask.gpu_model else ""
    facts: dict[str, object] = {
        "asked_gpus": ask.tasks * ask.gpus_per_task,
        "cluster_gpus": total,
        "largest_node_gpus": largest,
    }
    if ask.gpus_per_task and total == 0:
        models = sorted(set(Gpu.objects.filter(present=True).values_list("model", flat=True)))
        known = f" Models here: {', '.join(models)}." if models else ""
        facts["nearest"] = None
        return f"No node has such a{model} GPU.{known}", facts
    if ask.gpus_per_task > largest:
        facts["nearest"] = {"tasks": ask.tasks, "gpus_per_task": largest}
        return (
            f"Needs {ask.gpus_per_task}{model} GPUs on one node; the largest node has {largest}, "
            f"and all nodes together {total}. Ask for at most {largest} on a node"
            + (
                f", or for {-(-ask.gpus_per_task // largest)} tasks on several nodes."
                if total > largest
                else "."
            ),
            facts,
        )
    biggest = max(rooms, key=lambda room: (room.node.cpu_milli, room.node.memory_mib)).node
    if all(room.node.cpu_milli < ask.cpu_milli for room in rooms):
        facts["nearest"] = {"cpu_milli": biggest.cpu_milli}
        cores = biggest.cpu_milli / 1000
        return f"Needs {ask.cpu_milli / 1000:g} CPU cores; the largest node has {cores:g}.", facts
    most_memory = max(room.node.memory_mib for room in rooms)
    if most_memory < ask.memory_mib:
        facts["nearest"] = {"memory_mib": most_memory}
        needed, largest = memories(ask.memory_mib, most_memory)
        return f"Needs {needed} of memory; the largest node has {largest}.", facts
    facts["nearest"] = {"tasks": fits, "gpus_per_task": ask.gpus_per_task} if fits else None
    return (
        f"Needs {ask.tasks * ask.gpus_per_task}{model} GPUs as {ask.tasks} tasks of {ask.gpus_per_task}; "
        f"this cluster has {total} and seats {fits} such tasks. Ask for at most {fits} tasks.",
        facts,
    )


def _over_limit(ask: Ask) -> tuple[str, dict[str, object]] | None:
    """A limit of the project or an ancestor that is below the request in every pool it could use."""
    line: list[Project] = []
    project: Project | None = ask.project
    while project is not None:
        line.append(project)
        project = project.parent
    quotas: dict[int, list[Quota]] = defaultdict(list)
    for quota in Quota.objects.filter(project__in=line).select_related("project", "pool"):
        quotas[quota.pool_id].append(quota)
    pools = [ask.pool.pk] if ask.pool else sorted({room.node.pool_id for room in _rooms(ask)})
    worst: tuple[int, Quota, str] | None = None
    for pool in pools:
        bound = _bound(quotas[pool], ask, line)
        if bound is None or bound[0] >= ask.total_milli:
            return None
        if worst is None or bound[0] > worst[0]:
            worst = bound
    if worst is None:
        return None
    milli, quota, kind = worst
    each = max(1, ask.gpus_per_task * ask.milli_per_gpu)
    words = "limit" if kind == "limit" else "guarantee (and the job may not be preempted)"
    return (
        f"Needs {ask.total_milli / 1000:g} GPUs; the {words} of {quota.project.name} in {quota.pool.name} "
        f"is {milli / 1000:g}.",
        {
            "asked_gpus": ask.total_milli / 1000,
            "bound_gpus": milli / 1000,
            "bound": kind,
            "project": quota.project.name,
            "nearest": {"tasks": milli // each, "gpus_per_task": ask.gpus_per_task}
            if milli >= each
            else None,
        },
    )


def _bound(quotas: list[Quota], ask: Ask, line: list[Project]) -> tuple[int, Quota, str] | None:
    bounds = [(quota.limit_milli, quota, "limit") for quota in quotas if quota.limit_milli is not None]
    if not ask.preemptible:
        bounds += [
            (quota.guaranteed_milli, quota, "guaranteed") for quota in quotas if quota.project in line[:1]
        ]
    return min(bounds, key=lambda bound: bound[0], default=None)
