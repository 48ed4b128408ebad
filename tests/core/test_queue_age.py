"""A job's place in time among its equals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.actions.victims import ends_soon
from scheduler.core.model.policy import Policy
from scheduler.core.session.job_queue import effective_submit_s
from tests.core.cluster_builder import NOW_S, runs, waits

PLAIN = Policy(size_penalty_s_per_gpu=0.0, predicted_duration_weight=0.0)


@pytest.mark.parametrize(
    ("policy", "gpus", "tasks", "predicted_s", "shift_s"),
    [
        (PLAIN, 1, 1, 600.0, 0.0),
        (replace(PLAIN, size_penalty_s_per_gpu=3_600.0), 1, 1, None, 3_600.0),
        (replace(PLAIN, size_penalty_s_per_gpu=3_600.0), 4, 2, None, 8 * 3_600.0),
        (replace(PLAIN, predicted_duration_weight=2.0), 8, 1, 500.0, 1_000.0),
        (replace(PLAIN, predicted_duration_weight=2.0), 8, 1, None, 0.0),
        (replace(PLAIN, predicted_duration_weight=1.0, size_penalty_s_per_gpu=10.0), 4, 1, 100.0, 140.0),
    ],
)
def test_a_larger_job_ages_more_slowly(
    policy: Policy, gpus: int, tasks: int, predicted_s: float | None, shift_s: float
) -> None:
    row = waits("j", "p", gpus, tasks=tasks, age_s=50.0, predicted_duration_s=predicted_s)
    assert effective_submit_s(row, policy) == NOW_S - 50.0 + shift_s


def test_half_a_gpu_counts_half() -> None:
    row = waits("j", "p", 1, milli_per_gpu=500)
    assert effective_submit_s(row, replace(PLAIN, size_penalty_s_per_gpu=100.0)) == NOW_S + 50.0


@pytest.mark.parametrize(
    ("predicted_end_s", "spared"),
    [
        (None, False),
        (NOW_S - 1.0, False),
        (NOW_S, True),
        (NOW_S + 599.0, True),
        (NOW_S + 600.0, False),
    ],
)
def test_jobs_about_to_end_are_not_preempted(predicted_end_s: float | None, spared: bool) -> None:
    row = replace(runs("r", "p", ("n", range(1))), predicted_end_s=predicted_end_s)
    assert ends_soon(row, NOW_S, Policy(near_end_protection_s=600.0)) is spared
    assert not ends_soon(row, NOW_S, Policy(near_end_protection_s=0.0))
