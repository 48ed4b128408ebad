"""The effective value of a setting for a project: the strictest of its pool's, its own and its ancestors'.

Lower numbers and later options are stricter. A project may always be stricter than its pool. It may be less
strict only in numbers, up to the pool's value times ``idle_project_max_factor``, and never less strict than
an ancestor, whose limits bind descendants as its quota does. Values are computed on every read, so that a
change by an administrator applies to all projects at once. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from portal.domain.scheduling.policy_settings import (
    CHOICE_SETTINGS,
    NUMBER_SETTINGS,
    SettingValue,
    normalize_value,
)

MAX_FACTOR_SETTING = "idle_project_max_factor"
"""The setting that limits how much less strict than its pool a project may be."""


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """The effective value. ``project`` is the id of the project that sets it; None: the pool does."""

    value: SettingValue
    source_project: int | None = None
    is_clamped: bool = False
    """A project requests more than the pool allows."""


def strictness(name: str, value: SettingValue) -> float:
    """Return a rank that grows with strictness."""
    return CHOICE_SETTINGS[name].options.index(str(value)) if name in CHOICE_SETTINGS else -float(value)


def loosest_allowed(name: str, pool_settings: Mapping[str, SettingValue]) -> SettingValue:
    """Return the least strict value that a project may have in a pool with these settings."""
    value = pool_settings[name]
    if isinstance(value, str):
        return value
    return normalize_value(
        name, min(NUMBER_SETTINGS[name].maximum, value * float(pool_settings[MAX_FACTOR_SETTING]))
    )


def effective_setting(
    name: str,
    pool_settings: Mapping[str, SettingValue],
    ancestors: Sequence[tuple[int, Mapping[str, SettingValue]]],
) -> EffectiveSetting:
    """Return the effective value for a project in a pool; ``ancestors`` start with the project itself.

    They are ordered nearest first. If several set the same value, the nearest project is named, or the pool
    if its value is the same.
    """
    asked = [(values[name], row) for row, values in ancestors if name in values]
    if not asked:
        return EffectiveSetting(pool_settings[name])
    value, row = max(asked, key=lambda one: strictness(name, one[0]))
    most = loosest_allowed(name, pool_settings)
    if strictness(name, value) < strictness(name, most):
        return EffectiveSetting(most, None, True)
    return EffectiveSetting(value, None if value == pool_settings[name] else row)


def loosest_effective(
    name: str, pools: Iterable[Mapping[str, SettingValue]], ancestors: Iterable[Mapping[str, SettingValue]]
) -> SettingValue | None:
    """Return the least strict value that takes effect in any pool below these ancestors, if any."""
    asked = [values[name] for values in ancestors if name in values]
    loosest = [
        max([loosest_allowed(name, pool), *asked], key=lambda one: strictness(name, one)) for pool in pools
    ]
    return min(loosest, key=lambda one: strictness(name, one), default=None)
