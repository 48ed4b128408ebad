"""Intervals around what was played, from how waits came out before."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.forecast.calibration import (
    HOUR_S,
    SOFT_S,
    WaitCalibration,
    WaitInterval,
    interval_score,
)

DAY_S = 24 * HOUR_S
NOW_S = 1_700_000_000.0
WHOLE = 1_000


def untaught(median_s: float) -> WaitInterval:
    return WaitCalibration().interval(WHOLE, median_s)


def taught(*waits_s: float, milli: int = WHOLE, median_s: float = 1_000.0) -> WaitCalibration:
    """One forecast in each hour."""
    calibration = WaitCalibration()
    for hour, waited_s in enumerate(waits_s):
        calibration.learn(milli, NOW_S + hour * HOUR_S, median_s, waited_s)
    return calibration


def test_an_interval_is_as_wide_as_past_forecasts_were_wrong() -> None:
    found = taught(*(10.0 * (n % 100) for n in range(1_000))).interval(WHOLE, 1_000.0)
    assert found == pytest.approx((100.0, 500.0, 900.0), abs=60.0)


def test_above_the_soft_bound_ratios_count_and_below_it_differences() -> None:
    calibration = taught(*[2_000.0 + 2_000.0 + SOFT_S] * 500, median_s=2_000.0)  # twice as long, softened
    assert calibration.interval(WHOLE, 1e6).p50_s == pytest.approx(2e6, rel=0.01)
    assert calibration.interval(WHOLE, 0.0).p50_s == pytest.approx(SOFT_S)


@pytest.mark.parametrize("median_s", [60.0, 600.0, 6_000.0])
def test_an_untaught_interval_is_relative_to_the_simulation(median_s: float) -> None:
    """Minutes for a job that would start in minutes, hours for one that would start in hours."""
    low_s, middle_s, high_s = untaught(median_s)
    assert low_s < median_s < high_s and median_s <= middle_s
    assert high_s - low_s < 3.1 * (median_s + SOFT_S)


def test_forecasts_of_one_hour_weigh_as_one() -> None:
    """Many forecasts of one hour move the interval no more than one does."""
    one, crowd = WaitCalibration(), WaitCalibration()
    one.learn(WHOLE, NOW_S, 1_000.0, 60.0)
    for second in range(500):
        crowd.learn(WHOLE, NOW_S + second, 1_000.0, 60.0)
    assert crowd.interval(WHOLE, 1_000.0) == one.interval(WHOLE, 1_000.0)
    for hour in range(500):
        crowd.learn(WHOLE, NOW_S + hour * HOUR_S, 1_000.0, 60.0)
    assert crowd.interval(WHOLE, 1_000.0).p50_s == pytest.approx(60.0)


def test_sizes_without_data_use_all_sizes() -> None:
    calibration = WaitCalibration()
    for hour in range(500):
        calibration.learn(WHOLE, NOW_S + hour * HOUR_S, 1_000.0, 100.0)
    assert calibration.interval(8 * WHOLE, 1_000.0).p50_s == pytest.approx(100.0)
    middle_s = []
    for hour in range(500):
        calibration.learn(8 * WHOLE, NOW_S + hour * HOUR_S, 1_000.0, 9_000.0)
        middle_s.append(calibration.interval(8 * WHOLE, 1_000.0).p50_s)
    assert middle_s[0] == pytest.approx(100.0) and middle_s[-1] == pytest.approx(9_000.0)
    assert calibration.interval(WHOLE, 1_000.0).p50_s == pytest.approx(100.0)


def test_old_samples_have_little_weight() -> None:
    calibration = taught(*[100.0] * 200)
    for hour in range(200):
        calibration.learn(WHOLE, NOW_S + 30 * DAY_S + hour * HOUR_S, 1_000.0, 5_000.0)
    assert calibration.interval(WHOLE, 1_000.0).p50_s == pytest.approx(5_000.0)


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.core.forecast.calibration.MAX_RESIDUALS", 50)
    draw = random.Random(1)
    waits_s = [draw.uniform(60.0, 9_000.0) for _ in range(200)]
    calibration, anew = taught(*waits_s), WaitCalibration()
    for hour in range(150, 200):
        anew.learn(WHOLE, NOW_S + hour * HOUR_S, 1_000.0, waits_s[hour])
    assert calibration.interval(WHOLE, 70.0) == anew.interval(WHOLE, 70.0)


LEARNED = st.lists(
    st.tuples(st.sampled_from((300, 1_000, 8_000)), st.floats(0, 9e6), st.floats(0, 1e6), st.floats(0, 1e7)),
    max_size=60,
)


@given(LEARNED, st.integers(1, 10**6), st.floats(0, 1e7))
def test_an_interval_is_in_order_and_never_in_the_past(
    learned: list[tuple[int, float, float, float]], milli: int, median_s: float
) -> None:
    calibration = WaitCalibration()
    for size, made_s, simulated_s, waited_s in learned:
        calibration.learn(size, NOW_S + made_s, simulated_s, waited_s)
    found = calibration.interval(milli, median_s)
    assert 0.0 <= found.p10_s <= found.p50_s <= found.p90_s < 1e13


@given(st.randoms(use_true_random=False))
def test_samples_of_equal_weight_may_come_in_any_order(draw: random.Random) -> None:
    waits = [(NOW_S + hour * HOUR_S, 60.0 * hour) for hour in range(40)]
    found = []
    for _ in range(2):
        draw.shuffle(waits)
        calibration = WaitCalibration()
        for made_s, waited_s in waits:
            calibration.learn(WHOLE, made_s, 500.0, waited_s)
        found.append(calibration.interval(WHOLE, 500.0))
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize(
    ("before", "after", "least"), [(1.0, 1.0, 0.77), (0.2, 5.0, 0.74), (5.0, 0.2, 0.74), (0.05, 20.0, 0.70)]
)
@pytest.mark.parametrize("seed", range(4))
def test_long_run_coverage_matches_the_nominal_one_under_changing_load(
    seed: int, before: float, after: float, least: float
) -> None:
    """Jobs come in crowds that wait alike, tell only once they started, and from one day on wait otherwise."""
    draw = random.Random(seed)  # the same draws each time: what holds in the long run may fail once
    calibration = WaitCalibration()
    started: list[tuple[float, float, float, float]] = []
    inside: list[bool] = []
    for crowd in range(40 * 24):
        made_s = NOW_S + crowd * HOUR_S
        while started and started[0][0] <= made_s:
            _, *learned = started.pop(0)
            calibration.learn(WHOLE, *learned)
        shift = before if crowd < 20 * 24 else after
        spread = draw.gauss(0.0, 0.8)
        median_s = 600.0 * 20.0 ** draw.random()
        interval = calibration.interval(WHOLE, median_s)
        for _ in range(1 + int(draw.expovariate(0.5))):
            waited_s = 60.0 + (median_s + SOFT_S) * shift * 2.718 ** (spread + draw.gauss(0.0, 0.1))
            inside.append(interval.p10_s <= waited_s <= interval.p90_s)
            started.append((made_s + waited_s, made_s, median_s, waited_s))
        started.sort()
    assert least < sum(inside) / len(inside) < 0.83


def test_the_score_is_the_width_and_ten_times_how_far_it_was_missed() -> None:
    assert interval_score(10.0, 30.0, 20.0) == 20.0
    assert interval_score(10.0, 30.0, 35.0) == 20.0 + 10 * 5.0
    assert interval_score(10.0, 30.0, 4.0) == 20.0 + 10 * 6.0
