"""Reads the knobs of scheduling policy as they stand: each with its own value and what it would inherit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from portal.domain.policy_settings import (
    CHOICE_SETTINGS,
    NUMBER_SETTINGS,
    SettingValue,
    default_value,
    setting_names,
)
from portal.models import ClusterSettings, NodePool


@dataclass(frozen=True)
class SettingView:
    """One knob of the cluster or of a pool. ``own`` None: it holds what it inherits."""

    name: str
    own_value: SettingValue | None
    inherited_value: SettingValue
    from_cluster: bool
    """What it would inherit is the cluster's own value, not the default."""

    @property
    def value(self) -> SettingValue:
        """What holds."""
        return self.inherited_value if self.own_value is None else self.own_value

    @property
    def default(self) -> SettingValue:
        """What holds where nobody said otherwise."""
        return default_value(self.name)

    @property
    def unit(self) -> str:
        """The unit of a number; empty for a bare number and for a choice."""
        return NUMBER_SETTINGS[self.name].unit if self.name in NUMBER_SETTINGS else ""

    @property
    def options(self) -> tuple[str, ...]:
        """The words to choose from; empty for a number."""
        return CHOICE_SETTINGS[self.name].options if self.name in CHOICE_SETTINGS else ()

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Least and most, both allowed; None for a choice."""
        return (
            (NUMBER_SETTINGS[self.name].minimum, NUMBER_SETTINGS[self.name].maximum)
            if self.name in NUMBER_SETTINGS
            else None
        )

    @property
    def description(self) -> str:
        """What it does."""
        return (NUMBER_SETTINGS.get(self.name) or CHOICE_SETTINGS[self.name]).description


@dataclass(frozen=True)
class SettingsSheet:
    """All knobs of the cluster (``pool`` None) or of one pool, and the version they stand in."""

    pool: NodePool | None
    version: int
    settings: tuple[SettingView, ...]

    @property
    def etag(self) -> str:
        """The version as a strong entity tag, quotes included."""
        return f'"policy.{self.pool.public_id if self.pool else "cluster"}.{self.version}"'


def settings_sheet(pool: NodePool | None) -> SettingsSheet:
    """The knobs as they stand; two queries at most. A knob of another version of Fairway is not shown."""
    cluster = ClusterSettings.objects.filter(id=1).first() or ClusterSettings()
    of_cluster = cluster.policy
    if pool is None:
        knobs = tuple(
            SettingView(name, of_cluster.get(name), default_value(name), False) for name in setting_names()
        )
        return SettingsSheet(None, cluster.policy_version, knobs)
    row = NodePool.objects.get(pk=pool.pk)
    knobs = tuple(
        SettingView(name, row.policy.get(name), of_cluster.get(name, default_value(name)), name in of_cluster)
        for name in setting_names(per_pool=True)
    )
    return SettingsSheet(row, row.policy_version, knobs)


def effective_pool_settings(pools: Iterable[NodePool]) -> dict[int, dict[str, SettingValue]]:
    """What holds in each of these pools, by its row number and the name of the knob: one query."""
    cluster = cluster_settings()
    return {pool.pk: pool_settings(pool, cluster) for pool in pools}


def cluster_settings() -> dict[str, SettingValue]:
    """What the cluster holds otherwise than by default: one query."""
    row = ClusterSettings.objects.filter(id=1).first() or ClusterSettings()
    own: dict[str, SettingValue] = row.policy
    return own


def pool_settings(pool: NodePool, cluster: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
    """What holds in a pool, by the name of the knob, where the cluster holds these."""
    return {
        name: pool.policy.get(name, cluster.get(name, default_value(name)))
        for name in setting_names(per_pool=True)
    }
