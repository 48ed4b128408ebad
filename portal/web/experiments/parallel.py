"""Parallel coordinates: an axis for each parameter that differs and each metric, a line for each run. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from portal.selectors.experiments.experiments import Run
from portal.web.display.formatting import fraction, metric_value

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
    marks: list[tuple[float, str]]
    """Height and label of each value that a line passes: numbers ascending, words in alphabetical order."""

    @property
    def data(self) -> str:
        heights, labels = zip(*self.marks, strict=True)
        return json.dumps({"name": self.name, "heights": heights, "labels": labels})

    @property
    def percent(self) -> float:
        return round(self.x * 100 / SIZE, 1)


@dataclass(frozen=True)
class RunLine:
    """A run's polyline. ``letter`` is blank for a run that is not compared."""

    name: str
    points: str
    places: str
    """Index of its mark on each axis."""
    letter: str
    number: int


@dataclass(frozen=True)
class ParallelCoordinates:
    axes: list[Axis]
    lines: list[RunLine]
    omitted: int
    """Runs without a finite value on one of the axes."""


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
    drawn = [i for i in range(len(runs)) if all(found.marks[i] is not None for _, found in scales)]
    if not drawn:
        return None
    axes = []
    for i, (name, found) in enumerate(scales):
        marks = sorted({mark for mark in (found.marks[j] for j in drawn) if mark}, reverse=found.is_number)
        axes.append(Axis(name, round(i * step, 1), found.top, found.bottom, marks))
    lines = []
    for index in drawn:
        passed = [mark for _, found in scales if (mark := found.marks[index])]
        points = " ".join(f"{i * step:.0f},{height:.0f}" for i, (height, _) in enumerate(passed))
        places = ",".join(str(axis.marks.index(mark)) for axis, mark in zip(axes, passed, strict=True))
        number = chosen.get(runs[index].id, 0)
        letter = "ABCD"[number - 1] if number else ""
        lines.append(RunLine(runs[index].name, points, places, letter, number))
    return ParallelCoordinates(axes, sorted(lines, key=lambda line: line.number), len(runs) - len(lines))


@dataclass(frozen=True)
class _Scale:
    marks: list[tuple[float, str] | None]
    """Height and label of each run's value."""
    top: str
    bottom: str
    is_number: bool


def _names(runs: Iterable[Run]) -> list[str]:
    return sorted({name for run in runs for name in run.params})


def _positions(values: Sequence[str | float | None]) -> _Scale | None:
    """Return each value's place, 0 at the top; None where all are equal or there are too many words.

    A number that is not finite has no place.
    """
    numbers = [_number(value) for value in values]
    finite = [each for each in numbers if each is not None and math.isfinite(each)]
    if finite and all(each is not None or value is None for each, value in zip(numbers, values, strict=True)):
        low, high = min(finite), max(finite)
        if low == high:
            return None
        marks = [
            (SIZE * (1 - fraction(each, low, high)), metric_value(each))
            if each is not None and math.isfinite(each)
            else None
            for each in numbers
        ]
        return _Scale(marks, metric_value(high), metric_value(low), True)
    words = sorted({str(value) for value in values if value is not None})
    if not 2 <= len(words) <= MAX_CATEGORIES:
        return None
    place = {word: SIZE * index / (len(words) - 1) for index, word in enumerate(words)}
    placed = [None if value is None else (place[str(value)], str(value)) for value in values]
    return _Scale(placed, words[0], words[-1], False)


def _number(value: str | float | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None
