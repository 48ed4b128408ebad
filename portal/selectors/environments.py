"""Reads what can be launched: on how many nodes each environment already is, and for which projects it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from portal.access import Person, visible_environments
from portal.models import Environment, EnvironmentOnNode, Node
from portal.words.states import NodeState, runtimes_for


@dataclass(frozen=True)
class Offer:
    """An environment with ``present`` of ``nodes`` that have it; ``projects`` are row numbers, none for all."""

    environment: Environment
    present: int
    nodes: int
    projects: frozenset[int]

    def is_for(self, line: list[int]) -> bool:
        """True when a project may run it; ``line`` are row numbers of that project and all above it."""
        return not self.projects or not self.projects.isdisjoint(line)


def offers_for(person: Person) -> list[Offer]:
    """What a person may launch, by title; for admins also what is not offered. Five queries at most."""
    living = Node.objects.exclude(state__in=[NodeState.RETIRED.value, NodeState.ENROLLING.value])
    runtimes = Counter(living.values_list("runtime", flat=True))
    there = EnvironmentOnNode.objects.filter(state="present", node__in=living)
    present = Counter(there.values_list("environment_id", flat=True))
    return [
        Offer(
            environment=row,
            present=present[row.pk],
            nodes=sum(runtimes[runtime] for runtime in runtimes_for(row.runtime)),
            projects=frozenset(project.pk for project in row.projects.all()),
        )
        for row in visible_environments(person).order_by("title", "id").prefetch_related("projects")
    ]
