"""Upper bounds: requests that this cluster can never satisfy, and the nearest one that it can.

The bounds are the largest node by pool and model, and the limits of all ancestor projects. The scheduler's
preview (``portal.engine_client``) is more precise; the bounds also apply when it does not answer.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, starmap
from typing import Any, NamedTuple

from django.db.models import Count, QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from portal.domain.formatting import format_distinct_memories, format_gpu_models, format_memory
from portal.domain.jobs.feasibility import (
    WHOLE_MILLI,
    GpuKind,
    accepts_gpu_model,
    gpu_constraints,
    matching_gpu_models,
    tasks_on_node,
)
from portal.domain.jobs.job_spec import JobRole, JobSpec
from portal.domain.projects.project_tree import path_to_root
from portal.domain.states import CONTAINER_RUNTIMES, NodeState, compatible_runtimes
from portal.models import Gpu, Node, NodePool, Project, Quota
from portal.selectors.nodes.gpu_states import COUNTED_GPU
from portal.selectors.projects.quota_additions import with_effective_quota


@dataclass(frozen=True, kw_only=True)
class ResourceRequest(JobSpec):
    """A request with the rows that decide whether it can ever be placed; ``tasks`` must fit at once."""

    project: Project
    pool: NodePool | None
    runtime: str
    gang_milli: int | None = None
    """GPU milli of all roles, in the request of one role."""

    @property
    def required_milli(self) -> int:
        return self.total_milli if self.gang_milli is None else self.gang_milli


class NodeSize(NamedTuple):
    """The columns that decide: thousands of nodes are read at each preview."""

    pk: int
    name: str
    pool_id: int
    cpu_milli: int
    memory_mib: int


@dataclass
class EmptyNodeCapacity:
    node: NodeSize
    gpus: list[GpuKind] = field(default_factory=list)

    def task_count(self, request: ResourceRequest) -> int:
        return tasks_on_node(
            [WHOLE_MILLI] * len(self.gpus),
            request.gpus_per_task,
            request.milli_per_gpu,
            cpu_milli=(self.node.cpu_milli, request.cpu_milli),
            memory_mib=(self.node.memory_mib, request.memory_mib),
        )


InfeasibleReason = tuple[str, dict[str, object]]


def unsatisfiable_reason(request: ResourceRequest) -> InfeasibleReason | None:
    """Return why the cluster can never run this, with details and the nearest request, or None if it can.

    A gang is placed in one pool. Cordoned and unreachable nodes count, because they can return; retired nodes
    do not.
    """
    if request.roles:
        return _roles_reason(request)
    capacities = _empty_nodes(request)
    if not capacities:
        return _no_nodes_reason(request)
    pools = _by_pool(capacities)
    possible = _pools_with_space(request, pools)
    if possible:
        return _over_limit_reason(request, possible)
    placements = {
        pool: max(
            sum(capacity.task_count(request) for capacity in part) for part in _gang_nodes(request, held)
        )
        for pool, held in pools.items()
    }
    return _too_large_reason(request, capacities, pools, placements)


def possible_pools(request: ResourceRequest) -> set[int]:
    """Return the ids of the pools whose empty nodes hold the request, each role of it alone."""
    if not request.roles:
        return set(_pools_with_space(request, _by_pool(_empty_nodes(request))))
    alone = [_role_alone(request, role) for role in request.roles]
    return set.intersection(*map(possible_pools, alone))


def _by_pool(capacities: Sequence[EmptyNodeCapacity]) -> dict[int, list[EmptyNodeCapacity]]:
    pools: dict[int, list[EmptyNodeCapacity]] = defaultdict(list)
    for capacity in capacities:
        pools[capacity.node.pool_id].append(capacity)
    return pools


def _pools_with_space(request: ResourceRequest, pools: dict[int, list[EmptyNodeCapacity]]) -> list[int]:
    return [
        pool
        for pool, held in pools.items()
        if any(_holds_all_tasks(request, part) for part in _gang_nodes(request, held))
    ]


def _role_alone(request: ResourceRequest, role: JobRole) -> ResourceRequest:
    amounts = {name: getattr(role, name) for name in ("tasks", "gpus_per_task", "cpu_milli", "memory_mib")}
    return replace(request, roles=(), gang_milli=request.total_milli, **amounts)


def _holds_all_tasks(request: ResourceRequest, nodes: Sequence[EmptyNodeCapacity]) -> bool:
    """Return True once enough nodes are counted."""
    counts = accumulate(node.task_count(request) for node in nodes)
    return any(count >= request.tasks for count in counts)


def known_gpu_models(requested: str) -> str:
    """Return the models of the cluster that a request names, as "A|B", or the text itself if it names none."""
    present = Gpu.objects.filter(COUNTED_GPU).order_by().values_list("model", flat=True).distinct()
    return "|".join(matching_gpu_models(requested, present)) or requested


def _roles_reason(request: ResourceRequest) -> InfeasibleReason | None:
    """Return why no pool fits each role alone, or the GPUs, CPUs and memory of all together."""
    for role in request.roles:
        if found := unsatisfiable_reason(_role_alone(request, role)):
            message, details = found
            return _("Role {name}: {message}").format(name=role.name, message=message), {
                **details,
                "role": role.name,
                "nearest": None,
            }
    pools = _by_pool(_empty_nodes(request))
    parts = [part for held in pools.values() for part in _gang_nodes(request, held)]
    cpu_milli, memory_mib = (
        sum(role.tasks * (getattr(role, name) or 0) for role in request.roles)
        for name in ("cpu_milli", "memory_mib")
    )
    gpus = -(-request.total_milli // WHOLE_MILLI)
    if any(
        sum(len(each.gpus) for each in part) >= gpus
        and sum(each.node.cpu_milli for each in part) >= cpu_milli
        and sum(each.node.memory_mib for each in part) >= memory_mib
        for part in parts
    ):
        return None
    message = _(
        "Its roles need {gpus} {gpus_text}, {cores_text} and {memory} at once in one "
        "pool; {pool_text} does not have them."
    ).format(
        gpus=gpus,
        gpus_text=_gpus_text(request, gpus),
        cores_text=_cores_text(cpu_milli),
        memory=format_memory(memory_mib),
        pool_text=_pool_text(request),
    )
    return message, {"asked_gpus": request.total_milli / 1000, "nearest": None}


def largest_node_gpus(runtime: str, pool: NodePool | None) -> int:
    """Return the most whole GPUs of a node that runs environments with this runtime."""
    gpus = Gpu.objects.filter(node__in=_nodes(runtime, pool), present=True, mig_profile="")
    counts = gpus.order_by().values("node_id").annotate(count=Count("pk")).values_list("count", flat=True)
    return max(counts, default=0)


def _nodes(runtime: str, pool: NodePool | None) -> QuerySet[Node]:
    nodes = Node.objects.exclude(state__in=[NodeState.RETIRED.value, NodeState.ENROLLING.value])
    nodes = nodes.filter(runtime__in=compatible_runtimes(runtime))
    return nodes if pool is None else nodes.filter(pool=pool)


def _empty_nodes(request: ResourceRequest) -> list[EmptyNodeCapacity]:
    nodes = _nodes(request.runtime, request.pool)
    sizes = starmap(NodeSize, nodes.order_by("name").values_list(*NodeSize._fields))
    capacities = {node.pk: EmptyNodeCapacity(node) for node in sizes}
    constraints = gpu_constraints(request)
    gpus = Gpu.objects.filter(node__in=nodes, present=True).order_by("node_id", "model")
    kinds = gpus.values_list("node_id", "model", "memory_mib", "mig_profile", "compute_capability")
    accepted: dict[tuple[Any, ...], GpuKind | None] = {}  # most nodes are alike
    for node, *columns, count in kinds.annotate(Count("pk")):
        if (key := tuple(columns)) not in accepted:
            model, memory_mib, mig_profile, capability = columns
            kind = GpuKind(model, memory_mib, mig_profile, capability or 0.0)
            accepted[key] = kind if constraints.accepts(kind) else None
        if node in capacities and (gpu := accepted[key]) is not None:
            capacities[node].gpus += [gpu] * count
    return list(capacities.values())


def _gang_nodes(request: ResourceRequest, held: list[EmptyNodeCapacity]) -> list[list[EmptyNodeCapacity]]:
    """Return the capacity of a pool for each GPU model, one of which a gang uses; all if it may use several."""
    models = sorted({gpu.model for capacity in held for gpu in capacity.gpus})
    if len(models) < 2 or request.tasks == 1 or request.allow_mixed_gpus or request.min_tasks:
        return [held]
    return [
        [EmptyNodeCapacity(each.node, [gpu for gpu in each.gpus if gpu.model == model]) for each in held]
        for model in models
    ]


def _nodes_elsewhere(request: ResourceRequest) -> list[EmptyNodeCapacity]:
    """Return the nodes of all pools, if the request names one."""
    return _empty_nodes(replace(request, pool=None)) if request.pool else []


def _pool_of(nodes: list[EmptyNodeCapacity]) -> NodePool | None:
    return NodePool.objects.get(pk=nodes[0].node.pool_id) if nodes else None


def _no_nodes_reason(request: ResourceRequest) -> InfeasibleReason:
    if not Node.objects.exclude(state=NodeState.RETIRED.value).exists():
        return _("There is no node yet; an administrator must add one."), {"nearest": None}
    kind = _("containers") if request.runtime in CONTAINER_RUNTIMES else _("environments without a container")
    message = _("No node of {pool_text} runs {kind}.").format(pool_text=_pool_text(request), kind=kind)
    pool = _pool_of(_nodes_elsewhere(request))
    if pool is None:
        return message, {"nearest": None}
    return _("{message} The pool {name} has nodes that do.").format(message=message, name=pool.name), {
        "nearest": {"pool": pool.public_id}
    }


def _too_large_reason(
    request: ResourceRequest,
    nodes: list[EmptyNodeCapacity],
    pools: dict[int, list[EmptyNodeCapacity]],
    task_counts: dict[int, int],
) -> InfeasibleReason:
    largest = max(len(capacity.gpus) for capacity in nodes)
    facts: dict[str, object] = {
        "asked_gpus": request.tasks * request.gpus_per_task,
        "cluster_gpus": sum(len(capacity.gpus) for capacity in nodes),
        "largest_node_gpus": largest,
        "nearest": None,
    }
    if request.gpus_per_task and largest == 0:
        message, facts["nearest"] = _gpu_mismatch_reason(request)
    elif request.gpus_per_task > largest:
        message, facts["nearest"] = _gpus_per_node_reason(request, nodes, pools, largest)
    elif not any(task_counts.values()):
        message, facts["nearest"] = _node_too_small_reason(request, nodes)
    else:
        most = max(task_counts.values())
        what = _("{tasks} tasks").format(tasks=request.tasks)
        if request.gpus_per_task:
            what = _("{asked_gpus} {gpus_text} as {what} of {gpus_per_task}").format(
                asked_gpus=facts["asked_gpus"],
                gpus_text=_gpus_text(request),
                what=what,
                gpus_per_task=request.gpus_per_task,
            )
        apart = any(len(_gang_nodes(request, each)) > 1 for each in pools.values())
        together = _("on GPUs of one model") if apart else _("in one pool")
        where = _("the largest pool") if len(pools) > 1 else _pool_text(request)
        message = ngettext(
            "Needs {what}, each with {cores} and {memory}, at once {together}; {where} fits {most}. "
            "Request at most {most} task.",
            "Needs {what}, each with {cores} and {memory}, at once {together}; {where} fits {most}. "
            "Request at most {most} tasks.",
            most,
        ).format(
            what=what,
            cores=_cores_text(request.cpu_milli),
            memory=format_memory(request.memory_mib),
            together=together,
            where=where,
            most=most,
        )
        facts["nearest"] = {"tasks": most, "gpus_per_task": request.gpus_per_task}
    return message, facts


def _gpu_mismatch_reason(request: ResourceRequest) -> tuple[str, dict[str, object] | None]:
    """No GPU has the requested model, memory or compute capability."""
    where = _pool_text(request)
    unpicky = replace(request, gpu_model="", min_gpu_memory_mib=None, min_compute_capability=None)
    of_any_age = [gpu for capacity in _empty_nodes(unpicky) for gpu in capacity.gpus]
    here = [g for g in of_any_age if g.compute_capability >= (request.min_compute_capability or 0.0)]
    if request.mig_profile and not of_any_age:
        return _mig_profile_mismatch_reason(request)
    if of_any_age and not here:
        newest = max(gpu.compute_capability for gpu in of_any_age)
        reported = (
            _("the newest in {where} has {newest:.1f}").format(where=where, newest=newest)
            if newest
            else _("no node of {where} reports one").format(where=where)
        )
        message = _(
            "Needs a GPU of compute capability {min_compute_capability:.1f} or more; {reported}."
        ).format(min_compute_capability=request.min_compute_capability, reported=reported)
        return message, {"min_compute_capability": newest or None}
    if not here:
        return _("There is no GPU in {where}.").format(where=where), {
            "gpus_per_task": 0,
            "milli_per_gpu": 1000,
        }
    models = sorted({gpu.model for gpu in here})
    known = ngettext("The model there: {models}.", "Models there: {models}.", len(models))
    known = known.format(models=", ".join(models))
    accepted = [gpu for gpu in here if accepts_gpu_model(request.gpu_model, gpu.model)]
    if not accepted:
        pool = _pool_of([each for each in _nodes_elsewhere(request) if each.gpus])
        missing = _("There is no {gpus_text} in {where}").format(
            gpus_text=_gpus_text(request, 1), where=where
        )
        if pool is not None:
            return _("{missing}; the pool {name} has some. {known}").format(
                missing=missing, name=pool.name, known=known
            ), {"pool": pool.public_id}
        alike = difflib.get_close_matches(request.gpu_model, models, n=1, cutoff=0.0)
        return f"{missing}. {known}", {"gpu_model": alike[0]}
    most = max(gpu.memory_mib for gpu in accepted)
    needed, largest = format_distinct_memories(request.min_gpu_memory_mib or 0, most)
    message = _("Needs a {gpus_text} with {needed} of memory; the largest in {where} has {largest}.").format(
        gpus_text=_gpus_text(request, 1), needed=needed, where=where, largest=largest
    )
    return message, {"min_gpu_memory_mib": most}


def _mig_profile_mismatch_reason(request: ResourceRequest) -> tuple[str, dict[str, object] | None]:
    """No GPU is partitioned into the requested MIG profile."""
    gpus = Gpu.objects.filter(COUNTED_GPU)
    profiles = sorted(set(gpus.exclude(mig_profile="").values_list("mig_profile", flat=True)))
    message = _("There is no MIG slice {mig_profile} in {pool_text}.").format(
        mig_profile=request.mig_profile, pool_text=_pool_text(request)
    )
    if not profiles:
        return _("{message} No GPU is divided into MIG slices.").format(message=message), None
    alike = difflib.get_close_matches(request.mig_profile, profiles, n=1, cutoff=0.0)
    return _("{message} The cluster has {profiles}.").format(message=message, profiles=", ".join(profiles)), {
        "mig_profile": alike[0]
    }


def _gpus_per_node_reason(
    request: ResourceRequest,
    nodes: list[EmptyNodeCapacity],
    pools: dict[int, list[EmptyNodeCapacity]],
    largest: int,
) -> tuple[str, dict[str, object] | None]:
    smaller, scaled = replace(request, gpus_per_task=largest), {}
    most = _most_tasks(smaller, pools)
    if not most:  # CPU and memory were those of more GPUs
        scaled = {
            name: getattr(request, name) * largest // request.gpus_per_task
            for name in ("cpu_milli", "memory_mib")
        }
        most = _most_tasks(replace(smaller, **scaled), pools)
    parts = -(-request.gpus_per_task // largest) * request.tasks
    message = _(
        "Needs {gpus_per_task} {gpus_text} on one node; the largest node has {largest}, and "
        "all nodes together have {sum}. Request at most {largest} on a node"
    ).format(
        gpus_per_task=request.gpus_per_task,
        gpus_text=_gpus_text(request),
        largest=largest,
        sum=sum(len(capacity.gpus) for capacity in nodes),
    )
    message += _(", or for {parts} tasks on several nodes.").format(parts=parts) if 1 < parts <= most else "."
    return message, {"tasks": min(request.tasks, most), "gpus_per_task": largest, **scaled} if most else None


def _most_tasks(request: ResourceRequest, pools: dict[int, list[EmptyNodeCapacity]]) -> int:
    """Return the most tasks that the empty nodes of one pool hold."""
    return max(sum(capacity.task_count(request) for capacity in held) for held in pools.values())


def _node_too_small_reason(
    request: ResourceRequest, nodes: list[EmptyNodeCapacity]
) -> tuple[str, dict[str, object]]:
    """No node fits a single task by CPU, memory, or both together with its GPUs."""
    cpu, most_memory = max(r.node.cpu_milli for r in nodes), max(r.node.memory_mib for r in nodes)
    if cpu < request.cpu_milli:
        message = _("Needs {cores_text}; the largest node has {available}.").format(
            cores_text=_cores_text(request.cpu_milli), available=_cores_text(cpu)
        )
        return message, {"cpu_milli": cpu}
    if most_memory < request.memory_mib:
        needed, largest = format_distinct_memories(request.memory_mib, most_memory)
        return _("Needs {needed} of memory; the largest node has {largest}.").format(
            needed=needed, largest=largest
        ), {"memory_mib": most_memory}
    best = max(
        (each for each in nodes if each.task_count(replace(request, cpu_milli=0, memory_mib=0))),
        key=lambda each: min(
            each.node.cpu_milli / max(request.cpu_milli, 1), each.node.memory_mib / max(request.memory_mib, 1)
        ),
    ).node
    count = request.gpus_per_task
    wanted = f"{count} {_gpus_text(request, count)}, " if count else ""
    wanted += _("{cores_text} and {memory}").format(
        cores_text=_cores_text(request.cpu_milli), memory=format_memory(request.memory_mib)
    )
    found = _("{cores_text} and {memory}").format(
        cores_text=_cores_text(best.cpu_milli), memory=format_memory(best.memory_mib)
    )
    found += _(" with as many GPUs") if count else ""
    nearest = {name: min(getattr(request, name), getattr(best, name)) for name in ("cpu_milli", "memory_mib")}
    return _("No node has {wanted} together; {name} has {found}.").format(
        wanted=wanted, name=best.name, found=found
    ), {**nearest}


def _pool_text(request: ResourceRequest) -> str:
    return _("the pool {name}").format(name=request.pool.name) if request.pool else _("this cluster")


def _gpus_text(request: ResourceRequest, count: int = 2) -> str:
    noun = "GPU" if count == 1 else "GPUs"
    if request.mig_profile:
        noun = ngettext("{profile} slice", "{profile} slices", count).format(profile=request.mig_profile)
    return f"{format_gpu_models(request.gpu_model)}{noun}"


def _cores_text(milli: int) -> str:
    text = ngettext("{count} CPU core", "{count} CPU cores", 1 if milli == 1000 else 2)
    return text.format(count=f"{milli / 1000:g}")


def _over_limit_reason(request: ResourceRequest, pools: list[int]) -> tuple[str, dict[str, object]] | None:
    """A limit of the project or an ancestor is below the request in every pool that could place it."""
    line = path_to_root(request.project, lambda below: below.parent)
    quotas: dict[int, list[Any]] = defaultdict(list)
    rows = Quota.objects.filter(project__in=line).select_related("project", "pool")
    for quota in with_effective_quota(rows):
        quotas[quota.pool_id].append(quota)
    bounds = [bound for pool in pools if (bound := _tightest_limit(quotas[pool], request)) is not None]
    if len(bounds) < len(pools) or any(milli >= request.required_milli for milli, _, _ in bounds):
        return None
    milli, quota, kind = max(bounds, key=lambda bound: bound[0])
    each = max(1, request.gpus_per_task * request.milli_per_gpu)
    name = _("{bound} of {project} in {pool}").format(
        bound=_(_BOUND_TEXTS[kind]), project=quota.project.name, pool=quota.pool.name
    )
    return (
        _("Needs {required_milli:g} GPUs; the {name} is {milli:g}.").format(
            required_milli=request.required_milli / 1000, name=name, milli=milli / 1000
        ),
        {
            "asked_gpus": request.required_milli / 1000,
            "bound_gpus": milli / 1000,
            "bound": kind,
            "project": quota.project.name,
            "nearest": _nearest_within(request, milli, each),
        },
    )


def _nearest_within(request: ResourceRequest, milli: int, each: int) -> dict[str, object] | None:
    """Return the nearest request within a bound: fewer tasks, else fewer GPUs for one task."""
    if milli >= each:
        return {"tasks": milli // each, "gpus_per_task": request.gpus_per_task}
    if milli >= request.milli_per_gpu:
        return {"tasks": 1, "gpus_per_task": milli // request.milli_per_gpu}
    return None


_BOUND_TEXTS = {
    "limit": gettext_noop("limit"),
    "user_limit": gettext_noop("user limit"),
    "guaranteed": gettext_noop("guarantee, which applies to non-preemptible jobs,"),
}


_BOUND_COLUMNS = {
    "limit": "effective_limit_milli",
    "user_limit": "user_limit_milli",
    "guaranteed": "effective_guaranteed_milli",
}


def _tightest_limit(quotas: list[Any], request: ResourceRequest) -> tuple[int, Quota, str] | None:
    """Return the smallest bound, its quota and its kind; the guarantee bounds non-preemptible jobs of a project."""
    own = [quota for quota in quotas if not request.preemptible and quota.project_id == request.project.pk]
    bounds = [
        (milli, quota, kind)
        for kind, column in _BOUND_COLUMNS.items()
        for quota in (own if kind == "guaranteed" else quotas)
        if (milli := getattr(quota, column)) is not None
    ]
    return min(bounds, key=lambda bound: bound[0], default=None)
