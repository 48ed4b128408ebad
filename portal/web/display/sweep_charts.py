"""Charts of a sweep as SVG paths in a square of 1000 by 1000: best value, learning curves, parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from django.utils.translation import gettext as _

from portal.domain.jobs.parameters import Parameter, Value, format_value
from portal.domain.sweeps.sweeps import TrialState
from portal.models import Sweep, Trial
from portal.selectors.sweeps.sweeps import MetricPoint, best_so_far
from portal.web.display.formatting import fraction, metric_value

SIZE = 1000


@dataclass(frozen=True)
class TrialLine:
    """A path of one trial; ``kind`` is best, done, active or pruned; pruned paths end in ``end``, a dot."""

    path: str
    kind: str
    label: str = ""
    end: str = ""


@dataclass(frozen=True)
class Mark:
    """A vertical line at ``x`` of 1000 with a label."""

    x: int
    label: str


@dataclass(frozen=True)
class Chart:
    lines: list[TrialLine]
    x_low: str
    x_high: str
    y_low: str
    y_high: str
    marks: Sequence[Mark] = ()


@dataclass(frozen=True)
class Axis:
    """An axis of the parallel coordinates, at ``x`` of 1000."""

    name: str
    x: int
    low: str
    high: str


@dataclass(frozen=True)
class ParallelCoordinates:
    axes: list[Axis]
    lines: list[TrialLine]


def best_chart(sweep: Sweep, trials: Sequence[Trial]) -> Chart | None:
    """Return the value of each trial as a dot, and the best so far as a line; None without values."""
    valued = [(each.number, each.value, each) for each in trials if each.value is not None]
    best = best_so_far(trials, sweep.direction)
    if not best:
        return None
    last = max(1, max(number for number, _, _ in valued))
    scale = _Scale([value for _, value, _ in valued])
    steps: list[tuple[float, float]] = []
    for number, value in best:
        steps += [(number, steps[-1][1])] if steps else []
        steps.append((number, value))
    steps.append((last, steps[-1][1]))
    dots = [
        TrialLine(
            _dot(n / last, scale(value)),
            _kind(each),
            _("Trial {n}: {value}").format(n=n, value=metric_value(value)),
        )
        for n, value, each in valued
    ]
    path = _path((number / last, scale(value)) for number, value in steps)
    return Chart(
        [*dots, TrialLine(path, "best")],
        "0",
        _("trial {last}").format(last=last),
        scale.low_text,
        scale.high_text,
    )


def curves_chart(
    trials: Sequence[Trial],
    curves: Mapping[int, Sequence[MetricPoint]],
    *,
    best: int | None = None,
    rungs: Sequence[int] = (),
) -> Chart | None:
    """Return the reported values of each trial over its steps; pruned ones end in a dot.

    ``best`` is the number of the best trial, ``rungs`` are the steps at which trials are compared.
    """
    known = {
        number: [(each.step, each.value) for each in points if each.value is not None]
        for number, points in curves.items()
    }
    values = [value for points in known.values() for _, value in points]
    if not values:
        return None
    scale, last = _Scale(values), max(1.0, max(step for points in known.values() for step, _ in points))
    lines = []
    for trial in sorted(trials, key=lambda each: each.number == best):
        if points := known.get(trial.number):
            drawn = [(step / last, scale(value)) for step, value in points]
            end = _dot(*drawn[-1]) if trial.state == TrialState.PRUNED else ""
            lines.append(
                TrialLine(
                    _path(drawn),
                    "best" if trial.number == best else _kind(trial),
                    _("Trial {n}: {value}").format(n=trial.number, value=metric_value(points[-1][1])),
                    end,
                )
            )
    marks = [
        Mark(round(step / last * SIZE), _("rung {step}").format(step=step)) for step in rungs if step <= last
    ]
    return Chart(lines, "0", _("step {last:g}").format(last=last), scale.low_text, scale.high_text, marks)


def parallel_coordinates(
    sweep: Sweep, parameters: Mapping[str, Parameter], trials: Sequence[Trial]
) -> ParallelCoordinates | None:
    """Return a line for each trial over an axis for each parameter and the metric; the best is marked."""
    valued = [each for each in trials if each.value is not None]
    varied = [each for each in parameters.values() if each.is_range or len(each.choices) > 1]
    if not valued or not varied:
        return None
    scale = _Scale([each.value for each in valued if each.value is not None])
    best = best_so_far(valued, sweep.direction)[-1][0]
    width = len(varied)
    axes = [Axis(each.name, round(n * SIZE / width), *_ends(each)) for n, each in enumerate(varied)]
    axes.append(Axis(sweep.metric or "value", SIZE, scale.low_text, scale.high_text))
    lines = []
    for trial in sorted(valued, key=lambda each: each.number == best):
        heights = [_height(each, trial.parameters[each.name]) for each in varied]
        points = [(n / width, y) for n, y in enumerate([*heights, scale(trial.value or 0.0)])]
        kind = "best" if trial.number == best else _kind(trial)
        lines.append(
            TrialLine(
                _path(points),
                kind,
                _("Trial {n}: {value}").format(n=trial.number, value=metric_value(trial.value)),
            )
        )
    return ParallelCoordinates(axes, lines)


class _Scale:
    """Maps values to 0..1; logarithmic if they are positive and span more than two decades."""

    def __init__(self, values: Iterable[float]) -> None:
        found = sorted(values)
        self._log = found[0] > 0 and found[-1] / found[0] > 100
        self.low_text, self.high_text = metric_value(found[0]), metric_value(found[-1])
        self._low, self._high = self._place(found[0]), self._place(found[-1])

    def __call__(self, value: float) -> float:
        if self._low == self._high:
            return 0.5
        return fraction(self._place(value), self._low, self._high)

    def _place(self, value: float) -> float:
        return math.log10(value) if self._log else value


def _height(parameter: Parameter, value: Value) -> float:
    if parameter.choices:
        return parameter.choices.index(value) / max(1, len(parameter.choices) - 1)
    number, low, high = (float(each) for each in (value, parameter.low, parameter.high))
    if parameter.log:
        number, low, high = math.log(number), math.log(low), math.log(high)
    return (number - low) / (high - low)


def _ends(parameter: Parameter) -> tuple[str, str]:
    if parameter.choices:
        return format_value(parameter.choices[0])[:20], format_value(parameter.choices[-1])[:20]
    return metric_value(parameter.low), metric_value(parameter.high)


def _kind(trial: Trial) -> str:
    if trial.state == TrialState.COMPLETED:
        return "done"
    return "active" if trial.state == TrialState.RUNNING else "pruned"


def _path(points: Iterable[tuple[float, float]]) -> str:
    """Return a path through points of 0..1, y upwards."""
    return "M" + "L".join(f"{x * SIZE:.1f} {(1 - y) * SIZE:.1f}" for x, y in points)


def _dot(x: float, y: float) -> str:
    return f"M{x * SIZE:.1f} {(1 - y) * SIZE:.1f}h.01"
