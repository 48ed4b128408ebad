"""Reads the knobs of scheduling policy as they stand: each with its own value and what it would inherit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from portal.models import ClusterSettings, NodePool
from portal.words.knobs import CHOICES, KNOBS, KnobValue, default_of, knob_names


@dataclass(frozen=True)
class Turned:
    """One knob of the cluster or of a pool. ``own`` None: it holds what it inherits."""

    name: str
    own: KnobValue | None
    inherited: KnobValue
    from_cluster: bool
    """What it would inherit is the cluster's own value, not the default."""

    @property
    def value(self) -> KnobValue:
        """What holds."""
        return self.inherited if self.own is None else self.own

    @property
    def default(self) -> KnobValue:
        """What holds where nobody said otherwise."""
        return default_of(self.name)

    @property
    def unit(self) -> str:
        """The unit of a number; empty for a bare number and for a choice."""
        return KNOBS[self.name].unit if self.name in KNOBS else ""

    @property
    def options(self) -> tuple[str, ...]:
        """The words to choose from; empty for a number."""
        return CHOICES[self.name].options if self.name in CHOICES else ()

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Least and most, both allowed; None for a choice."""
        return (KNOBS[self.name].low, KNOBS[self.name].high) if self.name in KNOBS else None

    @property
    def sentence(self) -> str:
        """What it does."""
        return (KNOBS.get(self.name) or CHOICES[self.name]).sentence


@dataclass(frozen=True)
class PolicySheet:
    """All knobs of the cluster (``pool`` None) or of one pool, and the version they stand in."""

    pool: NodePool | None
    version: int
    knobs: tuple[Turned, ...]

    @property
    def etag(self) -> str:
        """The version as a strong entity tag, quotes included."""
        return f'"policy.{self.pool.public_id if self.pool else "cluster"}.{self.version}"'


def policy_sheet(pool: NodePool | None) -> PolicySheet:
    """The knobs as they stand; two queries at most. A knob of another version of Fairway is not shown."""
    cluster = ClusterSettings.objects.filter(id=1).first() or ClusterSettings()
    of_cluster = cluster.policy
    if pool is None:
        knobs = tuple(Turned(name, of_cluster.get(name), default_of(name), False) for name in knob_names())
        return PolicySheet(None, cluster.policy_version, knobs)
    row = NodePool.objects.get(pk=pool.pk)
    knobs = tuple(
        Turned(name, row.policy.get(name), of_cluster.get(name, default_of(name)), name in of_cluster)
        for name in knob_names(per_pool=True)
    )
    return PolicySheet(row, row.policy_version, knobs)


def knobs_of(pools: Iterable[NodePool]) -> dict[int, dict[str, KnobValue]]:
    """What holds in each of these pools, by its row number and the name of the knob: one query."""
    cluster = cluster_knobs()
    return {pool.pk: held_by(pool, cluster) for pool in pools}


def cluster_knobs() -> dict[str, KnobValue]:
    """What the cluster holds otherwise than by default: one query."""
    row = ClusterSettings.objects.filter(id=1).first() or ClusterSettings()
    own: dict[str, KnobValue] = row.policy
    return own


def held_by(pool: NodePool, cluster: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """What holds in a pool, by the name of the knob, where the cluster holds these."""
    return {
        name: pool.policy.get(name, cluster.get(name, default_of(name))) for name in knob_names(per_pool=True)
    }
