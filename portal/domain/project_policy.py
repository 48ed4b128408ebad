"""What holds for a project where pools and the projects above it turned the same knob: the strictest. Pure.

Lower is stricter, and of words the later. A project may always be stricter than its pool. It may be less strict only
in numbers, up to the pool's value times ``idle_project_max_factor``, and never less strict than a project above it: a
limit of an ancestor binds those below, as its quota does. It is worked out at each look, so that whatever an
administrator turns bounds every project at once, whatever that project once set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from portal.domain.policy_settings import CHOICE_SETTINGS, NUMBER_SETTINGS, SettingValue, normalize_value

MAX_FACTOR_SETTING = "idle_project_max_factor"
"""The knob that says how much less strict than its pool a project may be."""


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """What holds. ``project``: the row number of the one that says so; None: its pool does."""

    value: SettingValue
    source_project: int | None = None
    is_clamped: bool = False
    """A project asks for more than the pool allows."""


def strictness(name: str, value: SettingValue) -> float:
    """The larger, the stricter."""
    return CHOICE_SETTINGS[name].options.index(str(value)) if name in CHOICE_SETTINGS else -float(value)


def loosest_allowed(name: str, pool_settings: Mapping[str, SettingValue]) -> SettingValue:
    """The least strict value that a project may have where its pool holds these."""
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
    """What holds in a pool for the first project of a line, which goes on with those above it, nearest first.

    Of projects that say the same the nearest is named, and the pool where it says the same as all of them.
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
    """The least strict value that would count in some pool for a project below these; None without any pool."""
    asked = [values[name] for values in ancestors if name in values]
    rooms = [
        max([loosest_allowed(name, pool), *asked], key=lambda one: strictness(name, one)) for pool in pools
    ]
    return min(rooms, key=lambda one: strictness(name, one), default=None)
