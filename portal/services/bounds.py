"""Plain bounds: what this cluster could never run, and the nearest request that it could.

They need no engine: the largest node by pool and model, and the limits of every ancestor. The scheduler's own
answer (``portal.ask``) goes further; these hold when it does not answer within its second.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from dataclasses import dataclass, field, replace

from portal.lineage import lineage
from portal.models import Gpu, Node, NodePool, Project, Quota
from portal.words.amounts import memories, memory
from portal.words.states import CONTAINERS, NodeState, runtimes_for


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
    mig_profile: str = ""
    min_compute_capability: float | None = None

    @property
    def total_milli(self) -> int:
        """GPU milli of the whole gang."""
        return self.tasks * self.gpus_per_task * self.milli_per_gpu


@dataclass
class Room:
    """What one node could hold if it were empty."""

    node: Node
    gpus: list[Gpu] = field(default_factory=list)

    def seats(self, ask: Ask) -> int:
        """How many tasks of the request it holds."""
        by_cpu = self.node.cpu_milli // ask.cpu_milli if ask.cpu_milli else MANY
        by_memory = self.node.memory_mib // ask.memory_mib if ask.memory_mib else MANY
        return min(self.gpu_seats(ask), by_cpu, by_memory)

    def gpu_seats(self, ask: Ask) -> int:
        """How many tasks it holds by its GPUs alone."""
        if not ask.gpus_per_task:
            return MANY
        if ask.milli_per_gpu == 1000:
            return len(self.gpus) // ask.gpus_per_task
        if len(self.gpus) < ask.gpus_per_task:
            return 0
        return len(self.gpus) * (1000 // ask.milli_per_gpu) // ask.gpus_per_task


MANY = 10**6
Refused = tuple[str, dict[str, object]]


def never(ask: Ask) -> Refused | None:
    """Why the cluster could never run this, as a sentence with facts and ``nearest``; None when it could.

    A gang stands in one pool. Nodes that are cordoned or unreachable count: they come back. Retired do not.
    """
    rooms = _rooms(ask)
    if not rooms:
        return _nothing_there(ask)
    pools: dict[int, list[Room]] = defaultdict(list)
    for room in rooms:
        pools[room.node.pool_id].append(room)
    seats = {pool: sum(room.seats(ask) for room in held) for pool, held in pools.items()}
    possible = [pool for pool, count in seats.items() if count >= ask.tasks]
    if not possible:
        return _too_large(ask, rooms, pools, seats)
    return _over_limit(ask, possible)


def _rooms(ask: Ask) -> list[Room]:
    nodes = Node.objects.exclude(state__in=[NodeState.RETIRED.value, NodeState.ENROLLING.value])
    nodes = nodes.filter(runtime__in=runtimes_for(ask.runtime))
    if ask.pool is not None:
        nodes = nodes.filter(pool=ask.pool)
    rooms = {node.pk: Room(node) for node in nodes.select_related("pool").order_by("name")}
    for gpu in Gpu.objects.filter(node_id__in=rooms, present=True).order_by("index"):
        if ask.gpu_model and gpu.model != ask.gpu_model:
            continue
        if ask.min_gpu_memory_mib and gpu.memory_mib < ask.min_gpu_memory_mib:
            continue
        if gpu.mig_profile != ask.mig_profile:
            continue
        if (gpu.compute_capability or 0.0) < (ask.min_compute_capability or 0.0):
            continue
        rooms[gpu.node_id].gpus.append(gpu)
    return list(rooms.values())


def _nothing_there(ask: Ask) -> Refused:
    elsewhere = None
    if ask.pool is not None:
        elsewhere = next(iter(_rooms(replace(ask, pool=None))), None)
    if not Node.objects.exclude(state=NodeState.RETIRED.value).exists():
        return "There is no node yet; an administrator adds the first one.", {"nearest": None}
    kind = "containers" if ask.runtime in CONTAINERS else "environments without a container"
    sentence = f"No node of {_where(ask)} runs {kind}."
    if elsewhere is None:
        return sentence, {"nearest": None}
    pool = elsewhere.node.pool
    return f"{sentence} The pool {pool.name} has some that do.", {"nearest": {"pool": pool.public_id}}


def _too_large(ask: Ask, rooms: list[Room], pools: dict[int, list[Room]], seats: dict[int, int]) -> Refused:
    largest = max(len(room.gpus) for room in rooms)
    facts: dict[str, object] = {
        "asked_gpus": ask.tasks * ask.gpus_per_task,
        "cluster_gpus": sum(len(room.gpus) for room in rooms),
        "largest_node_gpus": largest,
        "nearest": None,
    }
    if ask.gpus_per_task and largest == 0:
        sentence, facts["nearest"] = _no_such_gpu(ask)
    elif ask.gpus_per_task > largest:
        sentence, facts["nearest"] = _too_many_on_one_node(ask, rooms, pools, largest)
    elif not any(seats.values()):
        sentence, facts["nearest"] = _node_too_small(ask, rooms)
    else:
        most = max(seats.values())
        if ask.gpus_per_task:
            what = f"{ask.tasks * ask.gpus_per_task} {_gpus(ask)} as {ask.tasks} tasks of {ask.gpus_per_task}"
        else:
            what = f"{ask.tasks} tasks"
        where = "the pool with most room" if len(pools) > 1 else _where(ask)
        sentence = (
            f"Needs {what}, each with {_cores(ask.cpu_milli)} and {memory(ask.memory_mib)}, at once in one pool; "
            f"{where} seats {most}. Ask for at most {most} {'task' if most == 1 else 'tasks'}."
        )
        facts["nearest"] = {"tasks": most, "gpus_per_task": ask.gpus_per_task}
    return sentence, facts


def _no_such_gpu(ask: Ask) -> tuple[str, dict[str, object] | None]:
    """No GPU is of the model, or has the memory, that is asked for."""
    unpicky = replace(ask, gpu_model="", min_gpu_memory_mib=None, min_compute_capability=None)
    of_any_age = [gpu for room in _rooms(unpicky) for gpu in room.gpus]
    here = [g for g in of_any_age if (g.compute_capability or 0.0) >= (ask.min_compute_capability or 0.0)]
    if ask.mig_profile and not of_any_age:
        return _no_such_slice(ask)
    if of_any_age and not here:
        newest = max(gpu.compute_capability or 0.0 for gpu in of_any_age)
        told = (
            f"the newest in {_where(ask)} has {newest:.1f}"
            if newest
            else f"no node of {_where(ask)} tells any"
        )
        return (
            f"Needs a GPU of compute capability {ask.min_compute_capability:.1f} or more; {told}.",
            {"min_compute_capability": newest or None},
        )
    if not here:
        return f"There is no GPU in {_where(ask)}.", {"gpus_per_task": 0, "milli_per_gpu": 1000}
    models = sorted({gpu.model for gpu in here})
    known = f"{'Models' if len(models) > 1 else 'The model'} there: {', '.join(models)}."
    if ask.gpu_model and ask.gpu_model not in models:
        elsewhere = next((r for r in _rooms(replace(ask, pool=None)) if r.gpus), None) if ask.pool else None
        if elsewhere is not None:
            pool = elsewhere.node.pool
            sentence = (
                f"There is no {ask.gpu_model} GPU in {_where(ask)}; the pool {pool.name} has some. {known}"
            )
            return sentence, {"pool": pool.public_id}
        alike = difflib.get_close_matches(ask.gpu_model, models, n=1, cutoff=0.0)
        return f"There is no {ask.gpu_model} GPU in {_where(ask)}. {known}", {"gpu_model": alike[0]}
    most = max(gpu.memory_mib for gpu in here if gpu.model == ask.gpu_model or not ask.gpu_model)
    needed, largest = memories(ask.min_gpu_memory_mib or 0, most)
    return (
        f"Needs a {_gpus(ask, 1)} with {needed} of memory; the largest in {_where(ask)} has {largest}.",
        {"min_gpu_memory_mib": most},
    )


def _no_such_slice(ask: Ask) -> tuple[str, dict[str, object] | None]:
    """No GPU is cut into slices of that profile."""
    cut = (
        Gpu.objects.filter(present=True).exclude(mig_profile="").exclude(node__state=NodeState.RETIRED.value)
    )
    profiles = sorted(set(cut.values_list("mig_profile", flat=True)))
    sentence = f"There is no MIG slice {ask.mig_profile} in {_where(ask)}."
    if not profiles:
        return f"{sentence} No GPU is cut into slices.", None
    alike = difflib.get_close_matches(ask.mig_profile, profiles, n=1, cutoff=0.0)
    return f"{sentence} The cluster has {', '.join(profiles)}.", {"mig_profile": alike[0]}


def _too_many_on_one_node(
    ask: Ask, rooms: list[Room], pools: dict[int, list[Room]], largest: int
) -> tuple[str, dict[str, object] | None]:
    smaller = replace(ask, gpus_per_task=largest)
    most = max(sum(room.seats(smaller) for room in held) for held in pools.values())
    parts = -(-ask.gpus_per_task // largest) * ask.tasks
    sentence = (
        f"Needs {ask.gpus_per_task} {_gpus(ask)} on one node; the largest node has {largest}, "
        f"and all nodes together {sum(len(room.gpus) for room in rooms)}. Ask for at most {largest} on a node"
    )
    sentence += f", or for {parts} tasks on several nodes." if 1 < parts <= most else "."
    return sentence, {"tasks": min(ask.tasks, most), "gpus_per_task": largest} if most else None


def _node_too_small(ask: Ask, rooms: list[Room]) -> tuple[str, dict[str, object]]:
    """Not even one task fits: CPU, memory, or both together with the GPUs."""
    cpu, most_memory = max(r.node.cpu_milli for r in rooms), max(r.node.memory_mib for r in rooms)
    if cpu < ask.cpu_milli:
        return f"Needs {_cores(ask.cpu_milli)}; the largest node has {_cores(cpu)}.", {"cpu_milli": cpu}
    if most_memory < ask.memory_mib:
        needed, largest = memories(ask.memory_mib, most_memory)
        return f"Needs {needed} of memory; the largest node has {largest}.", {"memory_mib": most_memory}
    best = max(
        (room for room in rooms if room.gpu_seats(ask)),
        key=lambda room: min(
            room.node.cpu_milli / max(ask.cpu_milli, 1), room.node.memory_mib / max(ask.memory_mib, 1)
        ),
    ).node
    gpus = f"{ask.gpus_per_task} {_gpus(ask, ask.gpus_per_task)}, " if ask.gpus_per_task else ""
    return (
        f"No node has {gpus}{_cores(ask.cpu_milli)} and {memory(ask.memory_mib)} together; "
        f"{best.name} has {_cores(best.cpu_milli)} and {memory(best.memory_mib)}"
        f"{' beside so many GPUs' if ask.gpus_per_task else ''}.",
        {
            "cpu_milli": min(ask.cpu_milli, best.cpu_milli),
            "memory_mib": min(ask.memory_mib, best.memory_mib),
        },
    )


def _where(ask: Ask) -> str:
    return f"the pool {ask.pool.name}" if ask.pool else "this cluster"


def _gpus(ask: Ask, count: int = 2) -> str:
    noun = f"{ask.mig_profile} slice" if ask.mig_profile else "GPU"
    noun += "" if count == 1 else "s"
    return f"{ask.gpu_model} {noun}" if ask.gpu_model else noun


def _cores(milli: int) -> str:
    return f"{milli / 1000:g} CPU {'core' if milli == 1000 else 'cores'}"


def _over_limit(ask: Ask, pools: list[int]) -> tuple[str, dict[str, object]] | None:
    """A limit of the project or an ancestor that is below the request in every pool that could hold it."""
    line = lineage(ask.project, lambda below: below.parent)
    quotas: dict[int, list[Quota]] = defaultdict(list)
    for quota in Quota.objects.filter(project__in=line).select_related("project", "pool"):
        quotas[quota.pool_id].append(quota)
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
    words = {
        "limit": "limit",
        "user_limit": "limit for one person",
        "guaranteed": "guarantee (and the job may not be preempted)",
    }[kind]
    return (
        f"Needs {ask.total_milli / 1000:g} GPUs; the {words} of {quota.project.name} in {quota.pool.name} "
        f"is {milli / 1000:g}.",
        {
            "asked_gpus": ask.total_milli / 1000,
            "bound_gpus": milli / 1000,
            "bound": kind,
            "project": quota.project.name,
            "nearest": _within(ask, milli, each),
        },
    )


def _within(ask: Ask, milli: int, each: int) -> dict[str, object] | None:
    """The nearest request inside a bound: fewer tasks, else fewer GPUs for one."""
    if milli >= each:
        return {"tasks": milli // each, "gpus_per_task": ask.gpus_per_task}
    if milli >= ask.milli_per_gpu:
        return {"tasks": 1, "gpus_per_task": milli // ask.milli_per_gpu}
    return None


def _bound(quotas: list[Quota], ask: Ask, line: list[Project]) -> tuple[int, Quota, str] | None:
    bounds = [(quota.limit_milli, quota, "limit") for quota in quotas if quota.limit_milli is not None]
    bounds += [
        (quota.user_limit_milli, quota, "user_limit")
        for quota in quotas
        if quota.user_limit_milli is not None
    ]
    if not ask.preemptible:
        bounds += [
            (quota.guaranteed_milli, quota, "guaranteed") for quota in quotas if quota.project in line[:1]
        ]
    return min(bounds, key=lambda bound: bound[0], default=None)
