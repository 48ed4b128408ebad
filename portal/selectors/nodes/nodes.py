"""Reads pools, nodes, GPUs and what can run on them, as rows for lists; fixed query counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

from django.contrib.postgres.aggregates import ArrayAgg
from django.db.models import (
    Count,
    Exists,
    IntegerField,
    OuterRef,
    Prefetch,
    Q,
    QuerySet,
    Subquery,
    Sum,
    Value,
)
from django.db.models.functions import Coalesce

from portal.access import Requester, nameable_projects, visible_environments, visible_jobs, visible_nodes
from portal.domain.node_operations import OperationKind
from portal.domain.states import GpuHealth, NodeState
from portal.errors import NotFound
from portal.models import Allocation, Environment, Gpu, Node, NodeOperation, NodePool, Template
from portal.selectors.environments import tag_claims

_Row = TypeVar("_Row", NodePool, Node, Environment, Template)


IS_REPORTED_GPU = Q(present=True) | ~Q(health=GpuHealth.OK.value)
"""GPUs that nodes name, and those that went and that nobody has looked at yet."""


def list_pools(requester: Requester) -> QuerySet[NodePool]:
    """All pools by name, each with ``node_count``, ``gpu_count``, ``used_milli`` and ``gpu_models``."""
    living = ~Q(nodes__state=NodeState.RETIRED.value)
    present = living & Q(nodes__gpus__present=True)
    gpus = Gpu.objects.filter(node__pool=OuterRef("pk"), present=True).exclude(
        node__state=NodeState.RETIRED.value
    )
    used = gpus.order_by().values("node__pool").annotate(n=Sum("used_milli")).values("n")
    visible_nodes(requester)  # whoever may see nodes may see pools
    return NodePool.objects.annotate(
        node_count=Count("nodes", filter=living, distinct=True),
        gpu_count=Count("nodes__gpus", filter=present, distinct=True),
        gpu_models=ArrayAgg("nodes__gpus__model", filter=present, distinct=True, default=Value([])),
        used_milli=Coalesce(Subquery(used, output_field=IntegerField()), Value(0)),
    ).order_by("name", "id")


def list_nodes(requester: Requester) -> QuerySet[Node]:
    """The visible nodes with pool and GPUs: two queries."""
    return _with_relations(visible_nodes(requester))


def get_nodes_by_id(rows: Iterable[int]) -> QuerySet[Node]:
    """Nodes by row number, the retired too, with pool and GPUs: for an answer to an act that was allowed."""
    return _with_relations(Node.objects.filter(pk__in=list(rows)))


def _with_relations(nodes: QuerySet[Node]) -> QuerySet[Node]:
    gpus = Gpu.objects.filter(IS_REPORTED_GPU).order_by("index")
    return nodes.select_related("pool").prefetch_related(Prefetch("gpus", queryset=gpus))


def list_gpus(requester: Requester) -> QuerySet[Gpu]:
    """The GPUs of visible nodes, those lost too, with node and pool."""
    return Gpu.objects.filter(IS_REPORTED_GPU, node__in=visible_nodes(requester)).select_related("node__pool")


def gpu_holders(requester: Requester, gpus: Iterable[Gpu]) -> dict[int, list[str]]:
    """Visible jobs that hold each of these GPUs now: public ids by GPU row; one query after the rights."""
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
    """What the person may launch, each with ``present_nodes`` of ``known_nodes`` that have it.

    ``limited`` are those for some projects only; of these come the ones that the person may see. ``claims`` is what
    its tag names on nodes.
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


def list_templates(requester: Requester) -> QuerySet[Template]:
    """The offered templates with their environments."""
    usable = Q(environment__isnull=True) | Q(environment__in=visible_environments(requester))
    return Template.objects.filter(usable, enabled=True).select_related("environment").order_by("name", "id")


def latest_finished_operation(
    node: Node, kind: OperationKind = OperationKind.PREFLIGHT
) -> NodeOperation | None:
    """The newest act of a kind on a node that has finished, a check unless told otherwise; None: there was none."""
    looks = node.operations.filter(kind=kind.value, finished_at__isnull=False)
    return looks.order_by("-id").first()


def get_by_key(rows: QuerySet[_Row], key: str) -> _Row:
    """The row by public id or name; NotThere otherwise."""
    row = rows.filter(Q(public_id=key) | Q(name=key)).first()
    if row is None:
        raise NotFound
    return row
