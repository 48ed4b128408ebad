"""Parallel coordinates: an axis for each parameter that differs and each metric, a line for each run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from portal.selectors.experiments import Run
from portal.web.display.formatting import metric_value

MAX_AXES = 8
MAX_CATEGORIES = 12
SIZE = 1000.0
"""Width and height of the drawing, in its own units."""


@dataclass(frozen=True)
class Axis:
    name: str
    x: float
    """In the drawing's units."""
    top: str
    bottom: str

    @property
    def percent(self) -> float:
        return round(self.x * 100 / SIZE, 1)


@dataclass(frozen=True)
class RunLine:
    """A run's polyline. ``letter`` is blank for a run that is not compared."""

    name: str
    points: str
    letter: str
    number: int


@dataclass(frozen=True)
class ParallelCoordinates:
    axes: list[Axis]
    lines: list[RunLine]
    omitted: int
    """Runs without a value on one of the axes."""


def build_parallel_coordinates(
    runs: Sequence[Run], chosen: Mapping[str, int], metrics: Sequence[str]
) -> ParallelCoordinates | None:
    """Return the drawing of the runs; ``chosen`` numbers the compared ones by id. None if nothing differs."""
    scales = [
        (name, positions)
        for name, positions in (
            *((name, _positions([run.params.get(name) for run in runs])) for name in _names(runs)),
            *((name, _positions([run.metrics.get(name) for run in runs])) for name in metrics),
        )
        if positions is not None
    ][:MAX_AXES]
    if len(scales) < 2:
        return None
    step = SIZE / (len(scales) - 1)
    axes = [Axis(name, round(i * step, 1), found.top, found.bottom) for i, (name, found) in enumerate(scales)]
    lines = []
    for index, run in enumerate(runs):
        heights = [found.heights[index] for _, found in scales]
        if None not in heights:
            points = " ".join(f"{i * step:.0f},{h:.0f}" for i, h in enumerate(heights))
            number = chosen.get(run.id, 0)
            lines.append(RunLine(run.name, points, "ABCD"[number - 1] if number else "", number))
    return ParallelCoordinates(axes, sorted(lines, key=lambda line: line.number), len(runs) - len(lines))


@dataclass(frozen=True)
class _Scale:
    heights: list[float | None]
    top: str
    bottom: str


def _names(runs: Iterable[Run]) -> list[str]:
    return sorted({name for run in runs for name in run.params})


def _positions(values: Sequence[str | float | None]) -> _Scale | None:
    """Return each value's height, 0 at the top; None where all are equal or there are too many words."""
    numbers = [_number(value) for value in values]
    present = [each for each in numbers if each is not None]
    if present and len(present) == sum(value is not None for value in values):
        low, high = min(present), max(present)
        if low == high:
            return None
        heights = [None if each is None else SIZE * (high - each) / (high - low) for each in numbers]
        return _Scale(heights, metric_value(high), metric_value(low))
    words = sorted({str(value) for value in values if value is not None})
    if not 2 <= len(words) <= MAX_CATEGORIES:
        return None
    place = {word: SIZE * index / (len(words) - 1) for index, word in enumerate(words)}
    return _Scale([None if value is None else place[str(value)] for value in values], words[0], words[-1])


def _number(value: str | float | None) -> float | None:
    try:
        found = float(value) if value is not None else None
    except ValueError:
        return None
    return found if found is not None and abs(found) < float("inf") else None
