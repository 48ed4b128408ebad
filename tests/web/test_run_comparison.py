"""What differs between compared runs: odd values, and notes for their reader."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import sys

from hypothesis import given
from hypothesis import strategies as st

from portal.domain.sweeps.sweeps import Direction
from portal.selectors.experiments.experiments import Run
from portal.web.display.formatting import fraction
from portal.web.experiments.comparison import best_values, cautions, compare_runs
from portal.web.experiments.parallel import build_parallel_coordinates


def run(status: str = "FINISHED", **params: str) -> Run:
    at = dt.datetime(2026, 5, 12, tzinfo=dt.UTC)
    return Run("r", "r", "1", status, "ada", at, at, params, {}, {}, "", "")


def test_values_that_most_runs_do_not_have_are_odd() -> None:
    runs = [
        run(lr="1", wd="0", bs="64"),
        run(lr="1", wd="1", bs="64"),
        run(lr="2", wd="2", bs="64"),
        run(lr="1", bs="64"),
    ]
    rows = {row.name: row for row in compare_runs(runs, {})}
    assert rows["lr"].odd == [False, False, True, False]
    assert rows["wd"].odd == [True] * 4  # no value is that of most runs
    assert rows["bs"].odd == [False] * 4 and not rows["bs"].differs
    assert [row.name for row in compare_runs(runs, {})] == ["lr", "wd", "bs"]


def test_runs_that_run_or_failed_are_noted() -> None:
    runs = [run(), run("RUNNING"), run("FAILED")]
    assert [each.title for each in cautions(runs, compare_runs(runs, {}))] == [
        "B has not ended",
        "C did not complete",
    ]
    assert cautions([run(), run()], []) == []


def test_the_best_value_is_by_the_direction_of_the_metric() -> None:
    shown: list[dict[str, float]] = [
        {"loss": 1, "top1": 80, "equal": 3},
        {"loss": 2, "top1": 85, "equal": 3},
        {},
    ]
    runs = [dataclasses.replace(run(), metrics=metrics) for metrics in shown]
    low, high = Direction.MINIMIZE, Direction.MAXIMIZE
    assert best_values(runs, {"loss": low, "top1": high, "equal": low}) == {
        "loss": (1, low),
        "top1": (85, high),
    }
    assert best_values(runs, {}) == {}


def test_marks_of_axes_ascend_and_lines_name_theirs() -> None:
    shown = [("0.1", "sgd"), ("0.01", "adam"), ("0.1", "lion")]
    runs = [run(lr=lr, optimizer=optimizer) for lr, optimizer in shown] + [run(lr="1")]
    drawing = build_parallel_coordinates(runs, {}, [])
    assert drawing is not None and drawing.omitted == 1
    labels = {axis.name: [label for _, label in axis.marks] for axis in drawing.axes}
    assert labels == {"lr": ["0.01", "0.1"], "optimizer": ["adam", "lion", "sgd"]}
    assert [line.places for line in drawing.lines] == ["1,2", "0,0", "1,1"]


def test_values_that_are_not_finite_have_no_place_on_an_axis_of_numbers() -> None:
    losses = [10.0, math.nan, 9.0, math.inf, 0.5, -math.inf]
    runs = [dataclasses.replace(run(lr=f"{i}"), metrics={"loss": loss}) for i, loss in enumerate(losses)]
    drawing = build_parallel_coordinates(runs, {}, ["loss"])
    assert drawing is not None and drawing.omitted == 3
    assert [label for _, label in drawing.axes[1].marks] == ["0.5", "9", "10"]
    assert (drawing.axes[1].bottom, drawing.axes[1].top) == ("0.5", "10")
    largest = sys.float_info.max
    runs = [
        dataclasses.replace(run(lr=f"{i}"), metrics={"loss": loss})
        for i, loss in enumerate((largest, 0.0, -largest))
    ]
    drawing = build_parallel_coordinates(runs, {}, ["loss"])
    assert drawing is not None and [line.points for line in drawing.lines] == [
        "0,1000 1000,0",
        "0,500 1000,500",
        "0,0 1000,1000",
    ]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=3, max_size=3, unique=True))
def test_a_finite_value_has_a_place_between_any_two_others(values: list[float]) -> None:
    low, value, high = sorted(values)
    assert 0 <= fraction(value, low, high) <= 1 and fraction(high, low, high) == 1
