"""What ended attempts tell of layouts: the latest of each work, by the median, and only where enough is known."""

from __future__ import annotations

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from portal.domain.scheduling.throughput import (
    MAX_SAMPLES,
    MIN_SAMPLES,
    ROUNDING_PERCENT,
    Layout,
    LayoutSpeed,
    compare_layouts,
    median_rates,
)
from scheduler.core.capacity.throughput import ThroughputHistory

FAST, SLOW, THIRD = Layout("H200", 1, 1, 0), Layout("A100", 1, 1, 0), Layout("A100", 2, 2, 1)
LAYOUTS = st.sampled_from([FAST, SLOW, THIRD])
WORKS = st.sampled_from(["train", "eval"])
RATES = st.floats(0.001, 1e9)
LEARNED = st.lists(st.tuples(WORKS, LAYOUTS, RATES), max_size=120)


def learned(*attempts: tuple[str, Layout, float]) -> ThroughputHistory:
    known = ThroughputHistory()
    for number, (work, layout, per_s) in enumerate(attempts):
        known.learn(number, work, layout, per_s)
    return known


def both(fast: float, slow: float, times: int = MIN_SAMPLES) -> list[tuple[str, Layout, float]]:
    return [("train", FAST, fast), ("train", SLOW, slow)] * times


def test_the_faster_of_two_layouts_is_the_reference() -> None:
    known = learned(*both(10.0, 5.0))
    assert known.speeds("train") == (LayoutSpeed(FAST, 100), LayoutSpeed(SLOW, 50))
    assert known.speeds("eval") == ()


def test_two_attempts_or_a_single_layout_are_not_enough() -> None:
    assert learned(*both(10.0, 5.0, MIN_SAMPLES - 1)).speeds("train") == ()
    one = learned(*[("train", FAST, 10.0)] * 9, *both(10.0, 5.0, MIN_SAMPLES - 1))
    assert one.speeds("train") == () and not one.has_differences


def test_one_odd_attempt_does_not_count() -> None:
    known = learned(*both(10.0, 5.0), ("train", SLOW, 1e6), ("train", FAST, 10.0))
    assert known.speeds("train")[0] == LayoutSpeed(FAST, 100)


def test_differences_below_one_step_are_ignored() -> None:
    assert learned(*both(10.0, 9.9)).speeds("train") == ()
    assert learned(*both(10.0, 9.4)).speeds("train") == (LayoutSpeed(FAST, 100), LayoutSpeed(SLOW, 95))


def test_old_measurements_are_forgotten() -> None:
    known = learned(*both(10.0, 5.0, 5), *both(5.0, 10.0, MAX_SAMPLES))
    assert known.speeds("train") == (LayoutSpeed(SLOW, 100), LayoutSpeed(FAST, 50))
    known = learned(*both(10.0, 5.0))
    known.forget_before(1)
    assert known.speeds("train") == () and not known.has_differences


@given(LEARNED, st.integers(0, 130))
def test_throughput_follows_the_latest_attempts(attempts, first: int) -> None:
    known = learned(*attempts)
    known.forget_before(first)
    for work in ("train", "eval"):
        rates: dict[Layout, list[float]] = {}
        for of, layout, per_s in attempts[first:]:
            if of == work:
                rates.setdefault(layout, []).append(per_s)
        mids = {
            layout: median(mine[-MAX_SAMPLES:]) for layout, mine in rates.items() if len(mine) >= MIN_SAMPLES
        }
        speeds = known.speeds(work)
        if not speeds:
            slowest, fastest = (min(mids.values()), max(mids.values())) if mids else (1.0, 1.0)
            assert 100 * slowest / fastest >= 100 - ROUNDING_PERCENT / 2 - 1e-6
            continue
        assert {speed.layout for speed in speeds} == set(mids)
        for speed in speeds:
            exact = 100 * mids[speed.layout] / max(mids.values())
            assert ROUNDING_PERCENT <= speed.percent <= 100 and speed.percent % ROUNDING_PERCENT == 0
            assert abs(speed.percent - max(exact, ROUNDING_PERCENT)) <= ROUNDING_PERCENT / 2 + 1e-6
        assert speeds[0].percent == 100 and len({speed.percent for speed in speeds}) > 1


@given(LEARNED, st.lists(st.integers(0, 120), max_size=5))
def test_incremental_learning_equals_learning_anew(attempts, forgotten) -> None:
    """Asked and forgotten in between or not: the same is told."""
    lived = ThroughputHistory()
    for number, each in enumerate(attempts):
        lived.learn(number, *each)
        if number in forgotten:
            lived.forget_before(number // 2)
            assert lived.has_differences == any(lived.speeds(work) for work in ("train", "eval"))
    lived.forget_before(len(attempts) // 2)
    anew = learned(*attempts)
    anew.forget_before(len(attempts) // 2)
    assert all(lived.speeds(work) == anew.speeds(work) for work in ("train", "eval"))


@given(st.lists(st.tuples(LAYOUTS, RATES), max_size=60), st.sampled_from([0.5, 2.0, 1024.0]))
def test_units_do_not_matter(rates, factor: float) -> None:
    other = [(layout, factor * per_s) for layout, per_s in rates]
    assert compare_layouts(median_rates(rates)) == compare_layouts(median_rates(other))
