"""What holds for a project where pools and the projects above it turned the same knob: the strictest. Pure.

Lower is stricter, and of words the later. A project may always be stricter than its pool. It may be less strict only
in numbers, up to the pool's value times ``idle_project_times``, and never less strict than a project above it: a
limit of an ancestor binds those below, as its quota does. It is worked out at each look, so that whatever an
administrator turns bounds every project at once, whatever that project once set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from portal.words.knobs import CHOICES, KNOBS, KnobValue, whole

TIMES = "idle_project_times"
"""The knob that says how much less strict than its pool a project may be."""


@dataclass(frozen=True, slots=True)
class Holds:
    """What holds. ``project``: the row number of the one that says so; None: its pool does."""

    value: KnobValue
    project: int | None = None
    bounded: bool = False
    """A project asks for more than the pool allows."""


def strictness(name: str, value: KnobValue) -> float:
    """The larger, the stricter."""
    return CHOICES[name].options.index(str(value)) if name in CHOICES else -float(value)


def most_of(name: str, of_pool: Mapping[str, KnobValue]) -> KnobValue:
    """The least strict value that a project may have where its pool holds these."""
    value = of_pool[name]
    if isinstance(value, str):
        return value
    return whole(name, min(KNOBS[name].high, value * float(of_pool[TIMES])))


def holds(
    name: str, of_pool: Mapping[str, KnobValue], line: Sequence[tuple[int, Mapping[str, KnobValue]]]
) -> Holds:
    """What holds in a pool for the first project of a line, which goes on with those above it, nearest first.

    Of projects that say the same the nearest is named, and the pool where it says the same as all of them.
    """
    asked = [(values[name], row) for row, values in line if name in values]
    if not asked:
        return Holds(of_pool[name])
    value, row = max(asked, key=lambda one: strictness(name, one[0]))
    most = most_of(name, of_pool)
    if strictness(name, value) < strictness(name, most):
        return Holds(most, None, True)
    return Holds(value, None if value == of_pool[name] else row)


def room_of(
    name: str, pools: Iterable[Mapping[str, KnobValue]], above: Iterable[Mapping[str, KnobValue]]
) -> KnobValue | None:
    """The least strict value that would count in some pool for a project below these; None without any pool."""
    asked = [values[name] for values in above if name in values]
    rooms = [max([most_of(name, pool), *asked], key=lambda one: strictness(name, one)) for pool in pools]
    return min(rooms, key=lambda one: strictness(name, one), default=None)
