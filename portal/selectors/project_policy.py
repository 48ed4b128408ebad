"""Reads the knobs that projects may hold otherwise than their pools: what holds where, and who says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from portal.lineage import lineage
from portal.models import NodePool, Project
from portal.selectors.policy import cluster_knobs, held_by
from portal.words.knobs import KnobValue, knob_names
from portal.words.project_knobs import holds, most_of, room_of

PROJECT_KNOBS = knob_names(per_project=True)
Line = list[tuple[int, dict[str, KnobValue]]]
"""A project and those above it, nearest first, each with the knobs of its own."""


@dataclass(frozen=True)
class Rule:
    """One knob as it holds for a project in a pool, and whose word that is.

    ``source``: "project", "above" (a project above it), "pool", "cluster" or "default". A project above is not
    named: who is in a project below need not see it.
    """

    name: str
    pool: NodePool
    value: KnobValue
    source: str
    bounded: bool
    """The project, or one above it, asks for more than this pool lets projects have."""
    most: KnobValue
    """The least strict value that this pool lets a project have."""

    @property
    def said_by(self) -> str:
        """Whose word it is, for people."""
        return {
            "project": "the project",
            "above": "a project above it",
            "pool": f"pool {self.pool.name}",
            "cluster": "the cluster",
            "default": "the default",
        }[self.source]


@dataclass(frozen=True)
class Rules:
    """Every knob of a pool as it holds for a project."""

    knobs: dict[str, KnobValue]
    rules: dict[str, Rule]
    """Of those that projects may have values of their own for."""


@dataclass(frozen=True)
class ProjectKnob:
    """A knob of a project. ``own`` None: it holds what it inherits."""

    name: str
    own: KnobValue | None
    room: KnobValue | None
    """The least strict value that would count for it anywhere; None without any pool."""
    rules: list[Rule]
    """What holds, by the name of the pool."""


@dataclass(frozen=True)
class ProjectSheet:
    """The knobs of a project, and the version they stand in."""

    project: Project
    version: int
    knobs: list[ProjectKnob]

    @property
    def etag(self) -> str:
        """The version as a strong entity tag, quotes included."""
        return f'"policy.{self.project.public_id}.{self.version}"'


def rules_for(wanted: Iterable[tuple[NodePool, int]]) -> dict[tuple[int, int], Rules]:
    """What holds in these pools for these projects (row numbers), by the two row numbers: two queries."""
    cluster, tree = cluster_knobs(), _tree()
    return {
        (pool.pk, project): _rules(pool, cluster, _line(project, tree))
        for pool, project in {(pool.pk, project): (pool, project) for pool, project in wanted}.values()
    }


def project_sheet(project: Project) -> ProjectSheet:
    """The knobs of a project as they stand; four queries."""
    row = Project.objects.get(pk=project.pk)
    cluster, line = cluster_knobs(), _line(row.pk, _tree())
    pools = list(NodePool.objects.order_by("name"))
    rules = [_rules(pool, cluster, line) for pool in pools]
    rooms = _rooms([each.knobs for each in rules], line)
    knobs = [
        ProjectKnob(name, row.policy.get(name), rooms[name], [each.rules[name] for each in rules])
        for name in PROJECT_KNOBS
    ]
    return ProjectSheet(row, row.policy_version, knobs)


def rooms_of(project: Project) -> dict[str, KnobValue | None]:
    """By knob, the least strict value that would count for a project anywhere: three queries."""
    cluster = cluster_knobs()
    pools = [held_by(pool, cluster) for pool in NodePool.objects.all()]
    return _rooms(pools, _line(project.pk, _tree()))


# -- inside ----------------------------------------------------------------------------------------


def _tree() -> dict[int, tuple[int | None, dict[str, KnobValue]]]:
    """By project: the one above it, and its own knobs."""
    rows = Project.objects.values_list("id", "parent_id", "policy")
    return {row: (parent, policy) for row, parent, policy in rows}


def _line(project: int, tree: Mapping[int, tuple[int | None, dict[str, KnobValue]]]) -> Line:
    return [(row, tree[row][1]) for row in lineage(project, lambda below: tree[below][0])]


def _rooms(pools: list[dict[str, KnobValue]], line: Line) -> dict[str, KnobValue | None]:
    above = [values for _, values in line[1:]]
    return {name: room_of(name, pools, above) for name in PROJECT_KNOBS}


def _rules(pool: NodePool, cluster: Mapping[str, KnobValue], line: Line) -> Rules:
    knobs = held_by(pool, cluster)
    rules = {}
    for name in PROJECT_KNOBS:
        held = holds(name, knobs, line)
        if held.project is not None:
            source = "project" if held.project == line[0][0] else "above"
        else:
            source = "pool" if name in pool.policy else "cluster" if name in cluster else "default"
        rules[name] = Rule(name, pool, held.value, source, held.bounded, most_of(name, knobs))
    return Rules(knobs | {name: rule.value for name, rule in rules.items()}, rules)
