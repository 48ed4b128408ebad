"""Reads what can be launched: on how many nodes each environment already is, and for which projects it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from django.db.models import QuerySet

from portal.access import Person, visible_environments
from portal.models import Environment, EnvironmentOnNode, Node
from portal.words.driver import cuda_will_do, newest_cuda
from portal.words.states import NodeState, runtimes_for


@dataclass(frozen=True)
class Offer:
    """An environment with ``present`` of ``nodes`` that have it; ``projects`` are row numbers, none for all.

    On ``too_old`` of the nodes the driver does not know the CUDA of its image, on none more than ``newest_cuda``.
    """

    environment: Environment
    present: int
    nodes: int
    projects: frozenset[int]
    too_old: int = 0
    newest_cuda: str | None = None

    def is_for(self, line: list[int]) -> bool:
        """True when a project may run it; ``line`` are row numbers of that project and all above it."""
        return not self.projects or not self.projects.isdisjoint(line)


def offers_for(person: Person) -> list[Offer]:
    """What a person may launch, by title; for admins also what is not offered. Five queries at most."""
    living = Node.objects.exclude(state__in=[NodeState.RETIRED.value, NodeState.ENROLLING.value])
    machines = Counter(living.values_list("runtime", "hello__cuda_driver"))
    there = EnvironmentOnNode.objects.filter(state="present", node__in=living)
    present = Counter(there.values_list("environment_id", flat=True))
    found = []
    for row in visible_environments(person).order_by("title", "id").prefetch_related("projects"):
        fit = runtimes_for(row.runtime)
        fitting = [(cuda, nodes) for (runtime, cuda), nodes in machines.items() if runtime in fit]
        found.append(
            Offer(
                environment=row,
                present=present[row.pk],
                nodes=sum(nodes for _, nodes in fitting),
                projects=frozenset(project.pk for project in row.projects.all()),
                too_old=sum(nodes for cuda, nodes in fitting if not cuda_will_do(cuda, row.cuda)),
                newest_cuda=newest_cuda(cuda for cuda, _ in fitting if cuda),
            )
        )
    return found


def tag_claims() -> QuerySet[EnvironmentOnNode]:
    """What the tags of environments name on nodes in service; each row is the claim of its node alone."""
    claims = EnvironmentOnNode.objects.exclude(image_pin="").exclude(node__state=NodeState.RETIRED.value)
    return claims.select_related("node").order_by("node__name")


def nodes_by_pin(claims: Iterable[EnvironmentOnNode]) -> dict[str, list[str]]:
    """Names of the nodes that report each image, for the claims of one environment."""
    found: dict[str, list[str]] = {}
    for row in claims:
        found.setdefault(row.image_pin, []).append(row.node.name)
    return found
