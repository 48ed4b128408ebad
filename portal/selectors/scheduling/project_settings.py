"""Reads the knobs that projects may hold otherwise than their pools: what holds where, and who says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from portal.domain.policy_settings import SettingValue, setting_names
from portal.domain.project_policy import effective_setting, loosest_allowed, loosest_effective
from portal.domain.tree import path_to_root
from portal.models import NodePool, Project
from portal.selectors.scheduling.settings import cluster_settings, pool_settings

PROJECT_SETTINGS = setting_names(per_project=True)
AncestorSettings = list[tuple[int, dict[str, SettingValue]]]
"""A project and those above it, nearest first, each with the knobs of its own."""


@dataclass(frozen=True)
class EffectiveRule:
    """One knob as it holds for a project in a pool, and whose word that is.

    ``source``: "project", "above" (a project above it), "pool", "cluster" or "default". A project above is not
    named: who is in a project below need not see it.
    """

    name: str
    pool: NodePool
    value: SettingValue
    source: str
    is_clamped: bool
    """The project, or one above it, asks for more than this pool lets projects have."""
    loosest_allowed: SettingValue
    """The least strict value that this pool lets a project have."""

    @property
    def source_text(self) -> str:
        """Whose word it is, for people."""
        return {
            "project": "the project",
            "above": "a project above it",
            "pool": f"pool {self.pool.name}",
            "cluster": "the cluster",
            "default": "the default",
        }[self.source]


@dataclass(frozen=True)
class PoolRules:
    """Every knob of a pool as it holds for a project."""

    values: dict[str, SettingValue]
    rules: dict[str, EffectiveRule]
    """Of those that projects may have values of their own for."""


@dataclass(frozen=True)
class ProjectSetting:
    """A knob of a project. ``own`` None: it holds what it inherits."""

    name: str
    own_value: SettingValue | None
    loosest_effective: SettingValue | None
    """The least strict value that would count for it anywhere; None without any pool."""
    rules: list[EffectiveRule]
    """What holds, by the name of the pool."""


@dataclass(frozen=True)
class ProjectSettingsSheet:
    """The knobs of a project, and the version they stand in."""

    project: Project
    version: int
    settings: list[ProjectSetting]

    @property
    def etag(self) -> str:
        """The version as a strong entity tag, quotes included."""
        return f'"policy.{self.project.public_id}.{self.version}"'


def effective_rules(pairs: Iterable[tuple[NodePool, int]]) -> dict[tuple[int, int], PoolRules]:
    """What holds in these pools for these projects (row numbers), by the two row numbers: two queries."""
    cluster, tree = cluster_settings(), _tree()
    return {
        (pool.pk, project): _effective_rules(pool, cluster, _ancestor_settings(project, tree))
        for pool, project in {(pool.pk, project): (pool, project) for pool, project in pairs}.values()
    }


def project_settings_sheet(project: Project) -> ProjectSettingsSheet:
    """The knobs of a project as they stand; four queries."""
    row = Project.objects.get(pk=project.pk)
    cluster, line = cluster_settings(), _ancestor_settings(row.pk, _tree())
    pools = list(NodePool.objects.order_by("name"))
    rules = [_effective_rules(pool, cluster, line) for pool in pools]
    rooms = _loosest_effective_values([each.values for each in rules], line)
    knobs = [
        ProjectSetting(name, row.policy.get(name), rooms[name], [each.rules[name] for each in rules])
        for name in PROJECT_SETTINGS
    ]
    return ProjectSettingsSheet(row, row.policy_version, knobs)


def loosest_effective_values(project: Project) -> dict[str, SettingValue | None]:
    """By knob, the least strict value that would count for a project anywhere: three queries."""
    cluster = cluster_settings()
    pools = [pool_settings(pool, cluster) for pool in NodePool.objects.all()]
    return _loosest_effective_values(pools, _ancestor_settings(project.pk, _tree()))


# -- inside ----------------------------------------------------------------------------------------


def _tree() -> dict[int, tuple[int | None, dict[str, SettingValue]]]:
    """By project: the one above it, and its own knobs."""
    rows = Project.objects.values_list("id", "parent_id", "policy")
    return {row: (parent, policy) for row, parent, policy in rows}


def _ancestor_settings(
    project: int, tree: Mapping[int, tuple[int | None, dict[str, SettingValue]]]
) -> AncestorSettings:
    return [(row, tree[row][1]) for row in path_to_root(project, lambda below: tree[below][0])]


def _loosest_effective_values(
    pools: list[dict[str, SettingValue]], ancestors: AncestorSettings
) -> dict[str, SettingValue | None]:
    above = [values for _, values in ancestors[1:]]
    return {name: loosest_effective(name, pools, above) for name in PROJECT_SETTINGS}


def _effective_rules(
    pool: NodePool, cluster: Mapping[str, SettingValue], ancestors: AncestorSettings
) -> PoolRules:
    knobs = pool_settings(pool, cluster)
    rules = {}
    for name in PROJECT_SETTINGS:
        held = effective_setting(name, knobs, ancestors)
        if held.source_project is not None:
            source = "project" if held.source_project == ancestors[0][0] else "above"
        else:
            source = "pool" if name in pool.policy else "cluster" if name in cluster else "default"
        rules[name] = EffectiveRule(
            name, pool, held.value, source, held.is_clamped, loosest_allowed(name, knobs)
        )
    return PoolRules(knobs | {name: rule.value for name, rule in rules.items()}, rules)
