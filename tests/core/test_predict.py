"""How long jobs run, learned from those that ended."""

from __future__ import annotations

import pytest

from scheduler.core.predict import LEAST_KNOWN, MOST_KNOWN, Durations, Kind

TRAIN = Kind("vision", "ada", "train", 1_000)


def known(*taught: tuple[Kind, list[float]]) -> Durations:
    durations = Durations()
    for kind, seconds in taught:
        for duration_s in seconds:
            durations.learn(kind, duration_s)
    return durations


def test_nothing_is_known_of_the_unknown_but_its_limit() -> None:
    assert Durations().expected_s(TRAIN) is None
    assert Durations().expected_s(TRAIN, time_limit_s=600.0) == 600.0
    assert known((TRAIN, [60.0] * (LEAST_KNOWN - 1))).expected_s(TRAIN) is None


def test_the_same_person_template_and_size_tells_most_then_project_and_size_then_size() -> None:
    durations = known(
        (TRAIN, [100.0] * 5),
        (Kind("vision", "bob", "serve", 1_000), [900.0] * 20),
        (Kind("nlp", "eve", None, 1_000), [5_000.0] * 200),
    )
    assert durations.expected_s(TRAIN) == 100.0
    assert durations.expected_s(Kind("vision", "ada", None, 1_000)) == 900.0
    assert durations.expected_s(Kind("bio", "kim", "train", 1_000)) == 5_000.0
    assert durations.expected_s(Kind("vision", "ada", "train", 2_000)) is None


@pytest.mark.parametrize(
    ("ran_s", "part", "limit_s", "left_s"),
    [
        (0.0, 0.5, None, 60.0),
        (0.0, 0.0, None, 10.0),
        (0.0, 1.0, None, 100.0),
        (45.0, 0.5, None, 35.0),  # of 50 to 100 the middle is 80
        (0.0, 0.5, 30.0, 30.0),
        (45.0, 0.5, 50.0, 5.0),
        (60.0, 0.5, 50.0, 0.0),
        (70.0, 0.5, None, None),  # three ran longer: too few
    ],
)
def test_what_is_left_is_that_of_the_jobs_that_ran_longer(
    ran_s: float, part: float, limit_s: float | None, left_s: float | None
) -> None:
    durations = known((TRAIN, [10.0 * n for n in range(1, 11)]))
    assert durations.left_s(TRAIN, ran_s, limit_s, part) == left_s


def test_old_habits_are_forgotten() -> None:
    durations = known((TRAIN, [9_000.0] * MOST_KNOWN), (TRAIN, [30.0] * MOST_KNOWN))
    assert durations.left_s(TRAIN, 0.0, part=1.0) == 30.0
