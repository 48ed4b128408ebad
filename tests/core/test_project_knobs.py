"""What holds for a project: the strictest of its line, bounded by the pool, whatever anybody set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from portal.words.knobs import CHOICES, KNOBS, default_of, knob_names
from portal.words.project_knobs import TIMES, holds, most_of, room_of, strictness

NAMES = knob_names(per_project=True)


def value_of(name: str) -> st.SearchStrategy:
    if name in CHOICES:
        return st.sampled_from(CHOICES[name].options)
    knob = KNOBS[name]
    if isinstance(knob.default, int):
        return st.integers(int(knob.low), int(knob.high))
    return st.floats(knob.low, knob.high)


@st.composite
def cases(draw):
    name = draw(st.sampled_from(NAMES))
    pool = {other: default_of(other) for other in knob_names(per_pool=True)}
    pool |= {name: draw(value_of(name)), TIMES: draw(st.sampled_from([1.0, 1.0, 2.0, 100.0]))}
    line = [(row, {name: value}) for row, value in enumerate(draw(st.lists(value_of(name), max_size=4)))]
    blanks = draw(st.integers(0, 4))
    return name, pool, [(row + 10, {}) for row in range(blanks)] + line


@given(cases())
def test_the_pool_bounds_every_project_and_every_project_those_below(case) -> None:
    name, pool, line = case
    held = holds(name, pool, line)
    hard = strictness(name, held.value)
    assert hard >= strictness(name, most_of(name, pool)) or not any(values for _, values in line)
    if name in KNOBS:
        assert KNOBS[name].low <= held.value <= KNOBS[name].high
    for row, values in line:
        if name in values:
            assert hard >= strictness(name, values[name])
            assert held.project != row or held.value == values[name]
    above = holds(name, pool, line[1:])
    assert (
        hard >= strictness(name, above.value) or above.project is None
    )  # a pool's word is no project's limit
    assert held.bounded == (held.project is None and held.value != pool[name]) or held.value == pool[name]


@given(cases())
def test_what_a_project_is_let_type_counts_as_typed(case) -> None:
    """The bound at the door and the bound at the look are the same one: the room, and nothing beyond it, holds."""
    name, pool, line = case
    room = room_of(name, [pool], [values for _, values in line])
    assert holds(name, pool, [(99, {name: room}), *line]).value == room
    assert room_of(name, [], []) is None


def test_who_says_so() -> None:
    pool = {name: default_of(name) for name in knob_names(per_pool=True)} | {TIMES: 2.0}

    def said(*line: float | None) -> tuple[object, int | None, bool]:
        rows = [(row, {} if value is None else {"idle_after_s": value}) for row, value in enumerate(line)]
        held = holds("idle_after_s", pool, rows)
        return held.value, held.project, held.bounded

    assert said() == said(None, None) == (3600.0, None, False)
    assert said(None, 600.0) == (600.0, 1, False)
    assert said(900.0, 600.0) == (600.0, 1, False)  # whoever is above binds those below
    assert said(300.0, 600.0) == (300.0, 0, False)
    assert said(5400.0) == (5400.0, 0, False)  # longer than the pool, since its knob lets it
    assert said(86_400.0) == (7200.0, None, True)
