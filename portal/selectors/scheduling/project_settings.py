"""Reads the settings that projects may override: effective values and their sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from django.utils.translation import gettext as _

from portal.domain.projects.project_policy import effective_setting, loosest_allowed, loosest_effective
from portal.domain.projects.project_tree import path_to_root
from portal.domain.scheduling.policy_settings import SettingValue, setting_names
from portal.models import NodePool, Project
from portal.selectors.scheduling.settings import cluster_settings, pool_settings

PROJECT_SETTINGS = setting_names(per_project=True)
AncestorSettings = list[tuple[int, dict[str, SettingValue]]]
"""A project and its ancestors, nearest first, each with its own settings."""


@dataclass(frozen=True)
class EffectiveRule:
    """The effective value of a setting for a project in a pool, and its source.

    ``source`` is "project", "above" (an ancestor), "pool", "cluster" or "default". The ancestor is not named,
    because members of a descendant may not see it.
    """

    name: str
    pool: NodePool
    value: SettingValue
    source: str
    is_clamped: bool
    """The project or an ancestor requests more than this pool allows."""
    loosest_allowed: SettingValue
    """The least strict value that this pool allows."""

    @property
    def source_text(self) -> str:
        return {
            "project": _("the project"),
            "above": _("a parent project"),
            "pool": _("pool {name}").format(name=self.pool.name),
            "cluster": _("the cluster"),
            "default": _("the default"),
        }[self.source]


@dataclass(frozen=True)
class PoolRules:
    """The effective values of all settings of a pool for a project."""

    values: dict[str, SettingValue]
    rules: dict[str, EffectiveRule]
    """Settings that projects may override."""


@dataclass(frozen=True)
class ProjectSetting:
    """A setting of a project. Its own value is None if it is inherited."""

    name: str
    own_value: SettingValue | None
    loosest_effective: SettingValue | None
    """The least strict value that would take effect in any pool; None without pools."""
    rules: list[EffectiveRule]
    """Effective rules, by name of the pool."""


@dataclass(frozen=True)
class ProjectSettingsSheet:
    project: Project
    version: int
    settings: list[ProjectSetting]

    @property
    def etag(self) -> str:
        """The version as a strong entity tag, quotes included."""
        return f'"policy.{self.project.public_id}.{self.version}"'


def effective_rules(pairs: Iterable[tuple[NodePool, int]]) -> dict[tuple[int, int], PoolRules]:
    """Return the effective settings by (pool id, project id) for these pairs, in two queries."""
    cluster, tree = cluster_settings(), _tree()
    return {
        (pool.pk, project): _effective_rules(pool, cluster, _ancestor_settings(project, tree))
        for pool, project in {(pool.pk, project): (pool, project) for pool, project in pairs}.values()
    }


def project_settings_sheet(project: Project) -> ProjectSettingsSheet:
    """Return the settings of a project, in four queries."""
    row = Project.objects.get(pk=project.pk)
    cluster, line = cluster_settings(), _ancestor_settings(row.pk, _tree())
    pools = list(NodePool.objects.order_by("name"))
    rules = [_effective_rules(pool, cluster, line) for pool in pools]
    loosest = _loosest_effective_values([each.values for each in rules], line)
    settings = [
        ProjectSetting(name, row.policy.get(name), loosest[name], [each.rules[name] for each in rules])
        for name in PROJECT_SETTINGS
    ]
    return ProjectSettingsSheet(row, row.policy_version, settings)


def loosest_effective_values(project: Project) -> dict[str, SettingValue | None]:
    """Return the least strict value of each setting that would take effect for a project.

    Three queries.
    """
    cluster = cluster_settings()
    pools = [pool_settings(pool, cluster) for pool in NodePool.objects.all()]
    return _loosest_effective_values(pools, _ancestor_settings(project.pk, _tree()))


def _tree() -> dict[int, tuple[int | None, dict[str, SettingValue]]]:
    """Return (parent, own settings) by project id."""
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
    settings = pool_settings(pool, cluster)
    rules = {}
    for name in PROJECT_SETTINGS:
        held = effective_setting(name, settings, ancestors)
        if held.source_project is not None:
            source = "project" if held.source_project == ancestors[0][0] else "above"
        else:
            source = "pool" if name in pool.policy else "cluster" if name in cluster else "default"
        rules[name] = EffectiveRule(
            name, pool, held.value, source, held.is_clamped, loosest_allowed(name, settings)
        )
    return PoolRules(settings | {name: rule.value for name, rule in rules.items()}, rules)
