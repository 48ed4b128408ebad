"""What holds for a project: the strictest of its line, bounded by the pool, whatever anybody set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from portal.domain.projects.project_policy import (
    MAX_FACTOR_SETTING,
    effective_setting,
    loosest_allowed,
    loosest_effective,
    strictness,
)
from portal.domain.scheduling.policy_settings import (
    CHOICE_SETTINGS,
    NUMBER_SETTINGS,
    default_value,
    setting_names,
)

NAMES = setting_names(per_project=True)


def value_of(name: str) -> st.SearchStrategy:
    if name in CHOICE_SETTINGS:
        return st.sampled_from(CHOICE_SETTINGS[name].options)
    setting = NUMBER_SETTINGS[name]
    if isinstance(setting.default, int):
        return st.integers(int(setting.minimum), int(setting.maximum))
    return st.floats(setting.minimum, setting.maximum)


@st.composite
def cases(draw):
    name = draw(st.sampled_from(NAMES))
    pool = {other: default_value(other) for other in setting_names(per_pool=True)}
    pool |= {name: draw(value_of(name)), MAX_FACTOR_SETTING: draw(st.sampled_from([1.0, 1.0, 2.0, 100.0]))}
    line = [(row, {name: value}) for row, value in enumerate(draw(st.lists(value_of(name), max_size=4)))]
    blanks = draw(st.integers(0, 4))
    return name, pool, [(row + 10, {}) for row in range(blanks)] + line


@given(cases())
def test_the_pool_bounds_every_project_and_every_project_those_below(case) -> None:
    name, pool, line = case
    held = effective_setting(name, pool, line)
    hard = strictness(name, held.value)
    assert hard >= strictness(name, loosest_allowed(name, pool)) or not any(values for _, values in line)
    if name in NUMBER_SETTINGS:
        assert NUMBER_SETTINGS[name].minimum <= held.value <= NUMBER_SETTINGS[name].maximum
    for row, values in line:
        if name in values:
            assert hard >= strictness(name, values[name])
            assert held.source_project != row or held.value == values[name]
    above = effective_setting(name, pool, line[1:])
    assert (
        hard >= strictness(name, above.value) or above.source_project is None
    )  # a pool's word is no project's limit
    assert (
        held.is_clamped == (held.source_project is None and held.value != pool[name])
        or held.value == pool[name]
    )


@given(cases())
def test_defaults_of_a_project_count_as_typed(case) -> None:
    """The bound at the door and the bound at the look are the same one: the room, and nothing beyond it, holds."""
    name, pool, line = case
    room = loosest_effective(name, [pool], [values for _, values in line])
    assert effective_setting(name, pool, [(99, {name: room}), *line]).value == room
    assert loosest_effective(name, [], []) is None


def test_who_decided_a_value() -> None:
    pool = {name: default_value(name) for name in setting_names(per_pool=True)} | {MAX_FACTOR_SETTING: 2.0}

    def said(*line: float | None) -> tuple[object, int | None, bool]:
        rows = [(row, {} if value is None else {"idle_after_s": value}) for row, value in enumerate(line)]
        held = effective_setting("idle_after_s", pool, rows)
        return held.value, held.source_project, held.is_clamped

    assert said() == said(None, None) == (3600.0, None, False)
    assert said(None, 600.0) == (600.0, 1, False)
    assert said(900.0, 600.0) == (600.0, 1, False)  # whoever is above binds those below
    assert said(300.0, 600.0) == (300.0, 0, False)
    assert said(5400.0) == (5400.0, 0, False)  # longer than the pool, since its setting lets it
    assert said(86_400.0) == (7200.0, None, True)
