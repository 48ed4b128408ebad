"""Reads scheduling settings with own and inherited values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from portal.domain.scheduling.policy_settings import (
    CHOICE_SETTINGS,
    NUMBER_SETTINGS,
    SettingValue,
    default_value,
    setting_names,
)
from portal.models import ClusterSettings, NodePool


@dataclass(frozen=True)
class SettingView:
    """A setting of the cluster or a pool. ``own_value`` is None if it is inherited."""

    name: str
    own_value: SettingValue | None
    inherited_value: SettingValue
    from_cluster: bool
    """The inherited value is the cluster's, not the default."""

    @property
    def value(self) -> SettingValue:
        return self.inherited_value if self.own_value is None else self.own_value

    @property
    def default(self) -> SettingValue:
        return default_value(self.name)

    @property
    def unit(self) -> str:
        """The unit of a number; blank for a plain number and for a choice."""
        return NUMBER_SETTINGS[self.name].unit if self.name in NUMBER_SETTINGS else ""

    @property
    def options(self) -> tuple[str, ...]:
        """The options of a choice; empty for a number."""
        return CHOICE_SETTINGS[self.name].options if self.name in CHOICE_SETTINGS else ()

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Minimum and maximum, inclusive; None for a choice."""
        number = NUMBER_SETTINGS.get(self.name)
        return (number.minimum, number.maximum) if number else None

    @property
    def description(self) -> str:
        return (NUMBER_SETTINGS.get(self.name) or CHOICE_SETTINGS[self.name]).description


@dataclass(frozen=True)
class SettingsSheet:
    """All settings of the cluster (``pool`` None) or of one pool, and their version."""

    pool: NodePool | None
    version: int
    settings: tuple[SettingView, ...]

    @property
    def etag(self) -> str:
        """The version as a strong entity tag, quotes included."""
        return f'"policy.{self.pool.public_id if self.pool else "cluster"}.{self.version}"'


def settings_sheet(pool: NodePool | None) -> SettingsSheet:
    """Return the settings, in at most two queries. Settings unknown to this version are omitted."""
    cluster = ClusterSettings.objects.filter(id=1).first() or ClusterSettings()
    row = NodePool.objects.get(pk=pool.pk) if pool else cluster
    above = cluster.policy if pool else {}
    settings = tuple(
        SettingView(name, row.policy.get(name), above.get(name, default_value(name)), name in above)
        for name in setting_names(per_pool=pool is not None)
    )
    return SettingsSheet(pool, row.policy_version, settings)


def effective_pool_settings(pools: Iterable[NodePool]) -> dict[int, dict[str, SettingValue]]:
    """Return the effective settings by pool id and name, in one query."""
    cluster = cluster_settings()
    return {pool.pk: pool_settings(pool, cluster) for pool in pools}


def cluster_settings() -> dict[str, SettingValue]:
    """Return the cluster's own settings, without defaults, in one query."""
    row = ClusterSettings.objects.filter(id=1).first() or ClusterSettings()
    own: dict[str, SettingValue] = row.policy
    return own


def pool_settings(pool: NodePool, cluster: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
    """Return the effective settings of a pool by name, given the cluster's own settings."""
    return {
        name: pool.policy.get(name, cluster.get(name, default_value(name)))
        for name in setting_names(per_pool=True)
    }
