"""How long jobs run, learned from those that ended."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.forecast.durations import (
    MAX_SAMPLES,
    MIN_SAMPLES,
    TEST_INTERVAL_JOBS,
    DurationHistory,
    DurationKey,
    QuantizedDurations,
)

TRAIN = DurationKey("vision", "ada", "train", 1_000)


def known(*taught: tuple[DurationKey, list[float]]) -> DurationHistory:
    durations = DurationHistory()
    for kind, seconds in taught:
        for duration_s in seconds:
            durations.learn(kind, duration_s)
    return durations


def test_unknown_jobs_are_predicted_only_by_their_limit() -> None:
    assert DurationHistory().expected_s(TRAIN) is None
    assert DurationHistory().remaining_s(TRAIN, 0.0, 600.0) == 600.0
    assert known((TRAIN, [60.0] * (MIN_SAMPLES - 1))).expected_s(TRAIN) is None


def test_prediction_backs_off_from_user_template_and_size_to_size() -> None:
    durations = known(
        (TRAIN, [100.0] * 5),
        (DurationKey("vision", "bob", "serve", 1_000), [900.0] * 20),
        (DurationKey("nlp", "eve", None, 1_000), [5_000.0] * 200),
    )
    assert durations.expected_s(TRAIN) == 100.0
    assert durations.expected_s(DurationKey("vision", "ada", None, 1_000)) == 900.0
    assert durations.expected_s(DurationKey("bio", "kim", "train", 1_000)) == 5_000.0
    assert durations.expected_s(DurationKey("vision", "ada", "train", 2_000)) is None


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
def test_the_remaining_time_is_that_of_longer_jobs(
    ran_s: float, part: float, limit_s: float | None, left_s: float | None
) -> None:
    durations = known((TRAIN, [10.0 * n for n in range(1, 11)]))
    assert durations.remaining_s(TRAIN, ran_s, limit_s, part) == left_s


def test_old_habits_are_forgotten() -> None:
    durations = known((TRAIN, [9_000.0] * MAX_SAMPLES), (TRAIN, [30.0] * MAX_SAMPLES))
    assert durations.remaining_s(TRAIN, 0.0, quantile=1.0) == 30.0


def test_beyond_its_bound_the_oldest_key_is_forgotten() -> None:
    other = DurationKey("nlp", "eve", None, 2_000)
    durations = DurationHistory(max_jobs=10)
    for kind, duration_s in [(TRAIN, 100.0)] * 5 + [(other, 900.0)] * 5:
        durations.learn(kind, duration_s)
    assert durations.expected_s(TRAIN) == 100.0
    durations.learn(other, 900.0)
    assert durations.expected_s(TRAIN) is None  # four are too few
    assert durations.learned_count == 11


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 1e6)), max_size=60))
def test_incremental_learning_equals_learning_anew(ran: list[tuple[str, float]]) -> None:
    latest, anew = DurationHistory(max_jobs=12), DurationHistory()
    for user, duration_s in ran:
        latest.learn(DurationKey("p", user, "t", 1_000), duration_s)
    for user, duration_s in ran[-12:]:
        anew.learn(DurationKey("p", user, "t", 1_000), duration_s)
    for user in "abcd":
        kind = DurationKey("p", user, "t", 1_000)
        assert latest.expected_s(kind) == anew.expected_s(kind)
        assert latest.remaining_s(kind, 1_000.0) == anew.remaining_s(kind, 1_000.0)


@pytest.mark.parametrize(
    ("ran_s", "in_all_s"),
    [
        (0.0, 678.8),  # the median, 600, and up to the next step
        (678.7, 678.8),
        (700.0, 960.0),  # of 700 to 1,100 the middle is 900, and up
        (1_000.0, 1_920.0),  # too few ran longer than 960: as long again
    ],
)
def test_predictions_change_in_steps_and_hold_until_exceeded(ran_s: float, in_all_s: float) -> None:
    durations = known((TRAIN, [100.0 * n for n in range(1, 12)]))
    assert QuantizedDurations(durations).total_s(TRAIN, ran_s) == pytest.approx(in_all_s, abs=0.1)


@given(st.lists(st.floats(0.0, 1e7), max_size=40), st.floats(0.0, 1e8))
def test_predictions_are_in_the_future_and_unknown_only_without_data(
    ran: list[float], so_far_s: float
) -> None:
    told_s = (steps := QuantizedDurations(durations := known((TRAIN, ran)))).total_s(TRAIN, so_far_s)
    assert (told_s is None) == (durations.expected_s(TRAIN) is None)
    if told_s is not None:
        assert told_s > so_far_s and told_s >= 60.0
        assert steps.total_s(TRAIN, (so_far_s + told_s) / 2) == told_s


def test_an_ended_job_changes_predictions_only_occasionally() -> None:
    durations, reported = known((TRAIN, [600.0 + n for n in range(40)])), set()
    steps = QuantizedDurations(durations)
    for n in range(200):
        durations.learn(TRAIN, 500.0 + n)
        reported.add(steps.total_s(TRAIN))
    assert len(reported) == 2  # 678.8 and 570.8


@pytest.mark.parametrize(("spread", "informative"), [(1.0, False), (4.0, True)])
def test_predictions_must_have_been_better_than_one_constant(spread: float, informative: bool) -> None:
    draw = random.Random(1)
    durations = DurationHistory()
    other = TRAIN._replace(size_milli=8_000)
    for number in range(401):
        kind, scale = ((TRAIN, 1.0), (other, spread))[number % 2]
        assert number > TEST_INTERVAL_JOBS or not durations.is_informative
        durations.learn(kind, scale * draw.lognormvariate(8.0, 1.0))
    assert durations.is_informative is informative


def test_predictions_that_have_become_worse_are_no_longer_used() -> None:
    draw = random.Random(1)
    durations = DurationHistory()
    other = TRAIN._replace(size_milli=8_000)
    seen = []
    for number in range(3 * MAX_SAMPLES):
        kind, scale = ((TRAIN, 1.0), (other, 4.0))[number % 2]
        durations.learn(kind, (scale if number < MAX_SAMPLES else 1.0) * draw.lognormvariate(8.0, 1.0))
        seen.append(durations.is_informative)
    assert seen[MAX_SAMPLES - 1] and not seen[-1]
