"""Step times from reports, the rank that slows a gang down, and the likely cause."""

from __future__ import annotations

import pytest

from portal.domain.jobs.stragglers import (
    GpuState,
    RankReport,
    StepTime,
    find_straggler,
    likely_cause,
    step_times,
)


def reports(*rows: tuple[float, float, float | None]) -> list[RankReport]:
    return [RankReport(*row) for row in rows]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ([], []),
        ([(0, 0, None)], []),
        ([(0, 0, None), (30, 60, None), (60, 90, None)], [0.5, 1.0]),
        ([(0, 0, 0), (30, 60, 12), (60, 120, 30)], [0.2, 0.3]),  # own work, without waiting
        ([(0, 0, None), (30, 60, 12)], [0.5]),  # it began to report its own work
        ([(0, 10, None), (30, 10, None), (60, 20, None)], [3.0]),  # no step in the first interval
        ([(0, 0, 50), (30, 60, 12)], []),  # the own work started again
    ],
)
def test_the_step_time_is_the_work_of_a_rank_or_the_time_between_reports(
    given: list[tuple[float, float, float | None]], seconds: list[float]
) -> None:
    assert [each.seconds for each in step_times(reports(*given))] == seconds


def times(*seconds: float) -> list[StepTime]:
    """One interval of 30 s each."""
    return [StepTime(30.0 * (place + 1), each) for place, each in enumerate(seconds)]


FAST = times(*[0.3] * 8)


@pytest.mark.parametrize(
    ("slow", "found"),
    [
        (times(*[0.3] * 8), None),
        (times(*[0.32] * 8), None),  # 7 % slower
        (times(*[0.4] * 8), (33, 30.0)),
        (times(*[0.3] * 3, *[0.4] * 5), (33, 120.0)),
        (times(*[0.3] * 5, *[0.4] * 3), None),  # for a minute only
        (times(*[0.4] * 7, 0.3), None),  # no longer
        ([], None),
    ],
)
def test_a_straggler_is_slower_than_the_median_rank_for_two_minutes(
    slow: list[StepTime], found: tuple[int, float] | None
) -> None:
    straggler = find_straggler({0: FAST, 1: FAST, 2: slow, 3: FAST})
    assert (straggler and (straggler.rank, straggler.slower_percent, straggler.since_s)) == (
        (2, *found) if found else None
    )


def test_the_slowest_of_several_slow_ranks_is_named() -> None:
    ranks = dict.fromkeys(range(6), FAST) | {2: times(*[0.4] * 8), 4: times(*[0.5] * 8)}
    straggler = find_straggler(ranks)
    assert straggler is not None and straggler.rank == 4


def test_of_two_ranks_the_slower_is_compared_with_the_other() -> None:
    straggler = find_straggler({0: FAST, 1: times(*[0.36] * 8)})
    assert straggler is not None and (straggler.rank, straggler.slower_percent) == (1, 20)


def test_a_single_rank_is_not_a_straggler() -> None:
    assert find_straggler({0: times(0.1, *[0.9] * 8)}) is None


OTHERS = [GpuState(90, 62, 320), GpuState(92, 64, 330), GpuState(None, None, None)]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (GpuState(91, 88, 320), "at 88 °C, the others at 63 °C"),
        (GpuState(91, 78, 320), "show no cause"),  # warmer, and not hot
        (GpuState(40, 60, 150), "used 40 %, the others 91 %"),
        (GpuState(92, 63, 210), "draws 210 W, the others 325 W"),
        (GpuState(90, 63, 325), "show no cause"),
        (GpuState(None, None, None), "show no cause"),
        (GpuState(91, 88, 320, "6 NVLinks are down."), "6 NVLinks are down."),
    ],
)
def test_the_cause_is_the_difference_of_its_gpu(own: GpuState, words: str) -> None:
    assert words in likely_cause(own, OTHERS)


def test_without_metrics_of_others_no_cause_is_named() -> None:
    assert "show no cause" in likely_cause(GpuState(10, 95, 100), [])
