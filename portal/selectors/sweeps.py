"""Reads sweeps, their trials and the values that these reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from django.db.models import Count, F, Max, Min, Q, QuerySet

from portal.access import Requester, visible_sweeps
from portal.domain.sweeps import ACTIVE_TRIAL_STATES, LIVE_TRIAL_STATES, Direction
from portal.models import Sweep, Trial, TrialReport
from portal.selectors.lookup import get_first

TRIAL_ORDERS = ("number", "state", "value", "step")


class MetricPoint(NamedTuple):
    step: float
    value: float | None


def list_sweeps(requester: Requester) -> QuerySet[Sweep]:
    """Return the sweeps that the user may see, with counts of trials and the least and greatest value."""
    rows = visible_sweeps(requester).select_related("owner", "project", "environment", "pool")
    return rows.annotate(
        active_count=Count("trials", filter=Q(trials__state__in=ACTIVE_TRIAL_STATES)),
        ended_count=Count("trials", filter=~Q(trials__state__in=LIVE_TRIAL_STATES)),
        least=Min("trials__value"),
        greatest=Max("trials__value"),
    )


def get_sweep(requester: Requester, public_id: str) -> Sweep:
    """Return the sweep. Raise NotFound if it does not exist or the user may not see it."""
    return get_first(list_sweeps(requester).filter(public_id=public_id), "There is no such sweep.")


def best_value(sweep: Sweep) -> float | None:
    """Return the best value of a row of ``list_sweeps``."""
    best: float | None = getattr(sweep, "least" if sweep.direction == Direction.MINIMIZE else "greatest")
    return best


def list_trials(sweep: Sweep, order: str = "number", *, descending: bool = False) -> QuerySet[Trial]:
    """Return the trials in an order of ``TRIAL_ORDERS``; trials without a value come last."""
    key = F(order if order in TRIAL_ORDERS else "number")
    ordered = key.desc(nulls_last=True) if descending else key.asc(nulls_last=True)
    return sweep.trials.select_related("job", "parent").order_by(ordered, "number")


def learning_curves(trials: Sequence[Trial]) -> dict[int, list[MetricPoint]]:
    """Return the reports of trials by their numbers, in one query."""
    found: dict[int, list[MetricPoint]] = defaultdict(list)
    rows = TrialReport.objects.filter(trial__in=trials).order_by("trial", "step")
    for number, step, value in rows.values_list("trial__number", "step", "value"):
        found[number].append(MetricPoint(step, value))
    return found


def best_so_far(trials: Sequence[Trial], direction: str) -> list[tuple[int, float]]:
    """Return number and value of each trial that was better than all before it."""
    found: list[tuple[int, float]] = []
    sign = 1 if direction == Direction.MINIMIZE else -1
    for trial in sorted(trials, key=lambda each: each.number):
        if trial.value is not None and (not found or sign * trial.value < sign * found[-1][1]):
            found.append((trial.number, trial.value))
    return found
