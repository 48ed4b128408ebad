"""Reads environments: which may be launched, and on which nodes their images are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.db.models import Count, QuerySet

from portal.access import Requester, visible_environments
from portal.domain.nodes.driver_versions import is_cuda_sufficient, newest_cuda
from portal.domain.states import NodeState, compatible_runtimes
from portal.models import Environment, ImagePresence, Node


@dataclass(frozen=True)
class LaunchableEnvironment:
    """An environment and the number of compatible nodes that have it.

    ``projects`` are ids; empty means all. On ``old_driver_node_count`` nodes the driver does not support the
    image's CUDA version; ``newest_cuda`` is the newest version on any node.
    """

    environment: Environment
    present_node_count: int
    node_count: int
    projects: frozenset[int]
    is_saved: bool = False
    """Its image was saved from a job: it runs only on the nodes that have it."""
    old_driver_node_count: int = 0
    newest_cuda: str | None = None

    def is_offered_to(self, ancestors: list[int]) -> bool:
        """Return True if a project may run it; ``ancestors`` are the ids of the project and its ancestors."""
        return not self.projects or not self.projects.isdisjoint(ancestors)


def launchable_environments(requester: Requester) -> list[LaunchableEnvironment]:
    """Return the environments that the user may launch, by title, in at most five queries.

    Administrators also get disabled ones, and private ones of others.
    """
    living = Node.objects.exclude(state__in=[NodeState.RETIRED.value, NodeState.ENROLLING.value])
    kinds = living.order_by().values_list("runtime", "agent_info__max_cuda_version").annotate(Count("pk"))
    there = ImagePresence.objects.filter(state="present", node__in=living).order_by()
    machines = list(kinds)
    present = dict(there.values_list("environment_id").annotate(Count("pk")))
    found = []
    rows = visible_environments(requester).select_related("saved_image").prefetch_related("projects")
    for row in rows.order_by("title", "id"):
        fit = compatible_runtimes(row.runtime)
        fitting = [(cuda, nodes) for runtime, cuda, nodes in machines if runtime in fit]
        found.append(
            LaunchableEnvironment(
                environment=row,
                present_node_count=present.get(row.pk, 0),
                node_count=sum(nodes for _, nodes in fitting),
                projects=frozenset(project.pk for project in row.projects.all()),
                is_saved=hasattr(row, "saved_image"),
                old_driver_node_count=sum(
                    nodes for cuda, nodes in fitting if not is_cuda_sufficient(cuda, row.cuda)
                ),
                newest_cuda=newest_cuda(cuda for cuda, _ in fitting if cuda),
            )
        )
    return found


def tag_claims() -> QuerySet[ImagePresence]:
    """Return what environment tags name on nodes in service; each row is the claim of one node."""
    claims = ImagePresence.objects.exclude(image_pin="").exclude(node__state=NodeState.RETIRED.value)
    return claims.select_related("node").order_by("node__name")


def nodes_by_pin(claims: Iterable[ImagePresence]) -> dict[str, list[str]]:
    """Return the names of the nodes that report each image, for the claims of one environment."""
    found: dict[str, list[str]] = {}
    for row in claims:
        found.setdefault(row.image_pin, []).append(row.node.name)
    return found
