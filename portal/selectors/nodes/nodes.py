"""Reads pools, nodes, GPUs and environments for lists; fixed numbers of queries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from django.contrib.postgres.aggregates import ArrayAgg
from django.db.models import (
    Count,
    Exists,
    IntegerField,
    JSONField,
    OuterRef,
    Prefetch,
    Q,
    QuerySet,
    Subquery,
    Sum,
    Value,
)
from django.db.models.functions import Coalesce, JSONObject

from portal.access import Requester, nameable_projects, visible_environments, visible_jobs, visible_nodes
from portal.domain.nodes.node_operations import OperationKind
from portal.domain.states import GpuHealth, GpuState, NodeState
from portal.models import Allocation, Environment, Gpu, Node, NodeOperation, NodePool
from portal.selectors.environments.environments import tag_claims
from portal.selectors.nodes.gpu_states import COUNTED_GPU, with_state

IS_REPORTED_GPU = Q(present=True) | ~Q(health=GpuHealth.OK.value)
"""GPUs that nodes report, and lost GPUs that are not acknowledged yet."""


def list_pools(requester: Requester) -> QuerySet[NodePool]:
    """Return all pools by name, with ``node_count``, ``gpus_by_state``, ``used_milli`` and ``gpu_models``."""
    living = ~Q(nodes__state=NodeState.RETIRED.value)
    present = living & Q(nodes__gpus__present=True)
    gpus = Gpu.objects.filter(COUNTED_GPU, node__pool=OuterRef("pk"))
    used = gpus.order_by().values("node__pool").annotate(n=Sum("used_milli")).values("n")
    numbers = JSONObject(**{state.value: Count("pk", filter=Q(state=state.value)) for state in GpuState})
    counts = with_state(gpus).order_by().values("node__pool").annotate(numbers=numbers).values("numbers")
    visible_nodes(requester)  # users who may see nodes may see pools
    return NodePool.objects.annotate(
        node_count=Count("nodes", filter=living, distinct=True),
        gpu_models=ArrayAgg("nodes__gpus__model", filter=present, distinct=True, default=Value([])),
        gpus_by_state=Subquery(counts, output_field=JSONField()),
        used_milli=Coalesce(Subquery(used, output_field=IntegerField()), Value(0)),
    ).order_by("name", "id")


def list_nodes(requester: Requester) -> QuerySet[Node]:
    """Return the visible nodes with pool and GPUs, in two queries."""
    return _with_relations(visible_nodes(requester))


def get_nodes_by_id(rows: Iterable[int]) -> QuerySet[Node]:
    """Return nodes by id, including retired ones, with pool and GPUs; the caller checks permissions."""
    return _with_relations(Node.objects.filter(pk__in=list(rows)))


def _with_relations(nodes: QuerySet[Node]) -> QuerySet[Node]:
    gpus = with_state(Gpu.objects.filter(IS_REPORTED_GPU)).order_by("index")
    return nodes.select_related("pool").prefetch_related(Prefetch("gpus", queryset=gpus))


def list_gpus(requester: Requester) -> QuerySet[Any]:
    """Return the GPUs of visible nodes, including lost ones, with node, pool and ``state``."""
    gpus = Gpu.objects.filter(IS_REPORTED_GPU, node__in=visible_nodes(requester))
    return with_state(gpus).select_related("node__pool")


def gpu_holders(requester: Requester, gpus: Iterable[Gpu]) -> dict[int, list[str]]:
    """Return the public ids of visible jobs on each of these GPUs, by GPU id."""
    held = Allocation.objects.filter(
        ended_at__isnull=True,
        gpu__in=[gpu.pk for gpu in gpus],
        task__attempt__job__in=visible_jobs(requester),
    )
    found: dict[int, list[str]] = defaultdict(list)
    for gpu, job in held.order_by("id").values_list("gpu_id", "task__attempt__job__public_id"):
        if job not in found[gpu]:
            found[gpu].append(job)
    return dict(found)


def list_environments(requester: Requester) -> QuerySet[Environment]:
    """Return the environments that the user may launch, with ``present_nodes`` of ``known_nodes``.

    ``limited`` marks environments for some projects only, of which the visible ones are included. ``claims``
    is what its tag names on nodes.
    """
    limits = Environment.projects.through.objects.filter(environment_id=OuterRef("pk"))
    return (
        visible_environments(requester)
        .prefetch_related(
            Prefetch("projects", nameable_projects(requester).order_by("name")),
            Prefetch("image_presences", tag_claims(), to_attr="claims"),
        )
        .annotate(
            limited=Exists(limits),
            known_nodes=Count("image_presences"),
            present_nodes=Count("image_presences", filter=Q(image_presences__state="present")),
        )
        .order_by("name", "id")
    )


def latest_finished_operation(
    node: Node, kind: OperationKind = OperationKind.PREFLIGHT
) -> NodeOperation | None:
    """Return the newest finished operation of this kind on a node, or None."""
    looks = node.operations.filter(kind=kind.value, finished_at__isnull=False)
    return looks.order_by("-id").first()
